"""Figures of a model: its filters, position embeddings and attention distances."""

import math
from typing import Any

import numpy as np

from vit_jax.drawing import canvas
from vit_jax.drawing.canvas import Arrays
from vit_jax.errors import counted

MOST_TILES = 16  # per side of the figure of position embeddings


def filters(arrays: Arrays, title: str) -> Any:
    """Principal components of the filters on RGB pixels (figure 7, left).

    Zero is grey, and each component has its own scale.

    Args:
      arrays: `filters` [count, height, width, 3], and `variance` with their shares.
      title: first line of the title.
    """
    components = arrays['filters']
    columns = 7
    rows = math.ceil(len(components) / columns)
    share = arrays['variance'].sum()
    figure = canvas.new(
        0.5 + 1.25 * rows,
        f'{title}\nthe first {len(components)} principal components '
        f'of its filters on RGB pixels: {share:.1%} of their variance',
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        canvas.bare(axes)
    for axes, component in zip(panels, components, strict=False):
        axes.imshow(0.5 + component / (2 * np.abs(component).max()), interpolation='nearest')
    return figure


def positions(arrays: Arrays, title: str) -> Any:
    """Similarity of the position embeddings of all patches (figures 7, centre, and 10).

    There is a tile for each patch, or in large grids for every second or third patch and so on.

    Args:
      arrays: `similarity` [rows, columns, rows, columns].
      title: first line of the title.
    """
    similarity = arrays['similarity']
    rows, columns = similarity.shape[:2]
    step = math.ceil(max(rows, columns) / MOST_TILES)
    shown = similarity[::step, ::step]
    # One picture of all tiles, with empty lines between them.
    gap = max(1, round(max(rows, columns) / 12))
    padded = np.pad(shown, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    mosaic = padded.swapaxes(1, 2).reshape(shown.shape[0] * (rows + gap), -1)[:-gap, :-gap]
    height = min(11, 1.1 + 7.35 * mosaic.shape[0] / mosaic.shape[1])
    figure = canvas.new(
        height,
        f'{title}\nsimilarity of the position embeddings of all pairs of patches',
    )
    axes = figure.subplots()
    picture = axes.imshow(
        mosaic, cmap='viridis', vmin=min(-0.1, similarity.min()), vmax=1, interpolation='nearest'
    )
    for axis, count, length, name in (
        (axes.xaxis, shown.shape[1], columns, 'column'),
        (axes.yaxis, shown.shape[0], rows, 'row'),
    ):
        axis.set_ticks(
            (length - 1) / 2 + (length + gap) * np.arange(count),
            step * np.arange(count),
            fontsize=8,
        )
        axis.set_label_text(f'patch {name}')
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(picture, label='cosine similarity', shrink=0.8, pad=0.02)
    return figure


def distance(arrays: Arrays, title: str) -> Any:
    """Attention distance of each head in each layer (figures 7, right, and 11).

    Args:
      arrays: `distance` [layers, heads] in pixels; `uniform`, the distance of uniform attention;
        `of_each_image` and `image_size`.
      title: first line of the title.
    """
    distances = arrays['distance']
    layers, heads = distances.shape
    height, width = arrays['image_size']
    images = counted(len(arrays['of_each_image']), 'image')
    figure, (axes,) = canvas.charts(
        1, f'{title}\nattention distance of each head: mean over {images} of {height}x{width} px'
    )
    for k in range(heads):
        axes.plot(
            np.arange(layers),
            distances[:, k],
            'o',
            color=f'C{k}',
            alpha=0.75,
            markersize=6,
            label=f'head {k}' if heads <= 8 else None,
        )
    axes.plot(
        np.arange(layers),
        distances.mean(axis=1),
        color='0.3',
        linewidth=1,
        label='mean of the heads',
    )
    uniform = float(arrays['uniform'])
    axes.axhline(uniform, color='0.3', linewidth=1, linestyle=':', label='uniform attention')
    axes.set(xlabel='layer', ylabel='mean attention distance (pixels)', ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    canvas.legend(figure, axes)
    return figure
