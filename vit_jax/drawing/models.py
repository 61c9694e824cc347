"""Figures of a model: its filters, its position embeddings, how far its heads look."""

import math
from typing import Any

import numpy as np

from vit_jax.drawing import canvas
from vit_jax.drawing.canvas import Arrays
from vit_jax.errors import counted

MOST_TILES = 16  # to a side of the figure of position embeddings


def filters(arrays: Arrays, title: str) -> Any:
    """Principal components of the filters on RGB pixels (figure 7, left).

    Of `filters` [count, height, width, 3], grey is zero, and each has its own scale; `variance` has
    their shares.
    """
    found, columns = arrays['filters'], 7
    rows = math.ceil(len(found) / columns)
    share = arrays['variance'].sum()
    figure = canvas.new(
        0.5 + 1.25 * rows,
        f'{title}\nthe first {len(found)} principal components '
        f'of its filters on RGB pixels: {share:.1%} of their variance',
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        canvas.bare(axes)
    for axes, one in zip(panels, found, strict=False):
        axes.imshow(0.5 + one / (2 * np.abs(one).max()), interpolation='nearest')
    return figure


def positions(arrays: Arrays, title: str) -> Any:
    """Similarity of the position embeddings of all patches (figures 7, centre, and 10).

    `similarity` [rows, columns, rows, columns] has a tile for each patch, or of large grids for
    every second, third and so on.
    """
    found = arrays['similarity']
    rows, columns = found.shape[:2]
    step = math.ceil(max(rows, columns) / MOST_TILES)
    shown = found[::step, ::step]
    # One picture for all tiles, with empty lines between them.
    gap = max(1, round(max(rows, columns) / 12))
    padded = np.pad(shown, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    mosaic = padded.swapaxes(1, 2).reshape(shown.shape[0] * (rows + gap), -1)[:-gap, :-gap]
    height = min(11, 1.1 + 7.35 * mosaic.shape[0] / mosaic.shape[1])
    figure = canvas.new(
        height,
        f'{title}\nsimilarity of the position embedding of each patch with those of all patches',
    )
    axes = figure.subplots()
    picture = axes.imshow(
        mosaic, cmap='viridis', vmin=min(-0.1, found.min()), vmax=1, interpolation='nearest'
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
    """How far each head of each layer looks (figures 7, right, and 11).

    `distance` [layers, heads] is in pixels; `uniform` is that of attention to all patches alike.
    """
    found, uniform = arrays['distance'], float(arrays['uniform'])
    layers, heads = found.shape
    height, width = arrays['image_size']
    figure, (axes,) = canvas.charts(
        1,
        f'{title}\nhow far each head looks: mean over '
        f'{counted(len(arrays["of_each_image"]), "image")} of {height}x{width} px',
    )
    for k in range(heads):
        axes.plot(
            np.arange(layers),
            found[:, k],
            'o',
            color=f'C{k}',
            alpha=0.75,
            markersize=6,
            label=f'head {k}' if heads <= 8 else None,
        )
    axes.plot(
        np.arange(layers), found.mean(axis=1), color='0.3', linewidth=1, label='mean of the heads'
    )
    axes.axhline(uniform, color='0.3', linewidth=1, linestyle=':', label='all patches alike')
    axes.set(xlabel='layer', ylabel='mean attention distance (pixels)', ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    canvas.legend(figure, axes)
    return figure
