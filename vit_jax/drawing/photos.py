"""Figures of photos, with maps of a model's attention over them."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from vit_jax.drawing import canvas
from vit_jax.drawing.canvas import Arrays
from vit_jax.errors import counted

PER_LINE = 6  # panels of heads or layers per line
HEAT = 'inferno'
BRIGHTEST = 0.95  # quantile of the brightest colour, because a few patches have extreme values
Photo = UInt8[np.ndarray, 'height width 3']


def rollout(arrays: Arrays, title: str) -> Any:
    """Attention through all layers, over photos (figures 6 and 14)."""
    return _rows(
        f'{title}\nattention rollout',
        arrays['photos'],
        [('rollout', heat, arrays['maps']), ('photo times rollout', darkened, arrays['maps'])],
    )


def one_rollout(photo: Photo, values: Float[np.ndarray, 'rows columns'], title: str) -> Any:
    """One photo, its attention through all layers, and their product, side by side (figure 6)."""
    height, width = photo.shape[:2]
    figure = canvas.new(0.8 + canvas.WIDTH / 3 * height / width, title)
    photo_axes, rollout_axes, product_axes = figure.subplots(1, 3)
    canvas.bare(photo_axes, 'photo').imshow(photo)
    heat(canvas.bare(rollout_axes, 'attention rollout'), photo, values)
    darkened(canvas.bare(product_axes, 'photo times rollout'), photo, values)
    return figure


def attribution(arrays: Arrays, title: str) -> Any:
    """Evidence for a class, over photos, with the class in the caption."""
    return _rows(
        f'{title}\nevidence for a class: gradient times attention',
        arrays['photos'],
        [('relevance', heat, arrays['maps'])],
        arrays['captions'],
    )


def compare(arrays: Arrays, title: str) -> Any:
    """Rollout, thresholded attention of all heads, and attribution, one below the other."""
    rows = [('rollout', heat, arrays['rollout']), ('60 % of the attention', kept, arrays['kept'])]
    if 'attribution' in arrays:
        rows.append(('relevance for its class', heat, arrays['attribution']))
    return _rows(
        f'{title}\nmaps of the important patches', arrays['photos'], rows, arrays.get('captions')
    )


def attention(arrays: Arrays, title: str) -> Any:
    """Attention of the class token or a patch, by head or layer.

    Args:
      arrays: `photos`, `maps` [photos, panels, rows, columns], `panels` with their names, `what`
        with the second line of the title, and `query`, (row, column) of a patch or empty.
      title: first line of the title.
    """
    return _blocks(f'{title}\n{arrays["what"]}', arrays, heat)


def threshold(arrays: Arrays, title: str) -> Any:
    """The patches with 60 % of a head's attention: maps [photos, heads, rows, columns] of bool."""
    return _blocks(f'{title}\n{arrays["what"]}', arrays, kept)


def heat(axes: Any, photo: Photo, values: Float[np.ndarray, 'rows columns']) -> None:
    """Draws values as colours over the grey photo, interpolated, from the least to BRIGHTEST."""
    axes.imshow(photo.mean(axis=-1), cmap='gray', vmin=0, vmax=255)
    axes.imshow(
        values,
        cmap=HEAT,
        alpha=0.65,
        extent=_extent(photo),
        interpolation='bilinear',
        vmax=np.quantile(values, BRIGHTEST),
    )


def darkened(axes: Any, photo: Photo, values: Float[np.ndarray, 'rows columns']) -> None:
    """Draws the photo times the interpolated values, where the quantile BRIGHTEST counts as 1."""
    share = np.minimum(values / np.quantile(values, BRIGHTEST), 1)
    large = Image.fromarray(share.astype(np.float32)).resize(
        photo.shape[1::-1], Image.Resampling.BILINEAR
    )
    axes.imshow((photo * np.asarray(large)[..., None]).astype(np.uint8))


def kept(axes: Any, photo: Photo, values: Bool[np.ndarray, 'rows columns']) -> None:
    """Draws the photo, dark outside of the kept patches, and writes their number below.

    The number explains why a picture is dark: the attention is on a few patches.
    """
    axes.imshow(photo)
    shade = np.zeros((*values.shape, 4))
    shade[..., 3] = np.where(values, 0, 0.8)
    axes.imshow(shade, extent=_extent(photo), interpolation='nearest')
    axes.text(
        0.5,
        0.02,
        how_many_kept(values),
        transform=axes.transAxes,
        color='white',
        fontsize=7,
        horizontalalignment='center',
        verticalalignment='bottom',
        bbox={'facecolor': 'black', 'edgecolor': 'none', 'alpha': 0.5, 'pad': 1},
    )


def how_many_kept(values: Bool[np.ndarray, 'rows columns']) -> str:
    """Returns '4 patches of 196', with a second line if all of them are in corners of the image."""
    text = f'{counted(values.sum(), "patch", "patches")} of {values.size}'
    rows, columns = values.shape
    corners = values[:: max(1, rows - 1), :: max(1, columns - 1)]
    if corners.sum() == values.sum():
        text += '\nall in the corners'
    return text


def _extent(photo):
    height, width = photo.shape[:2]
    return -0.5, width - 0.5, height - 0.5, -0.5


def _rows(title, photos, rows, captions=None):
    """Draws photos side by side, and below them a row for each (name, draw, maps)."""
    count, height, width = photos.shape[:3]
    photo_width = min(2.4, (canvas.WIDTH - 0.4) / count)  # in inches
    row_height = photo_width * height / width + 0.03
    title_height = 0.6 if captions is None else 0.8
    figure = canvas.new(title_height + row_height * (1 + len(rows)), title)
    panels = figure.subplots(1 + len(rows), count, squeeze=False)
    for k, photo in enumerate(photos):
        caption = '' if captions is None else captions[k]
        canvas.bare(panels[0, k], caption).imshow(photo)
        for axes, (_, draw, maps) in zip(panels[1:, k], rows, strict=True):
            draw(canvas.bare(axes), photo, maps[k])
    names = ['photo', *(name for name, _, _ in rows)]
    for axes, name in zip(panels[:, 0], names, strict=True):
        axes.text(
            -0.04,
            0.5,
            name,
            transform=axes.transAxes,
            rotation=90,
            fontsize=9,
            horizontalalignment='right',
            verticalalignment='center',
        )
    return figure


def _blocks(title, arrays, draw):
    """Draws each photo and, to the right of it, its panels in one or more lines."""
    photos = arrays['photos']
    maps = arrays['maps']
    names = arrays['panels']
    lines = math.ceil(len(names) / PER_LINE)
    columns = min(len(names), PER_LINE)
    height, width = photos.shape[1:3]
    photo_width = min(2.2, canvas.WIDTH / (1 + columns))  # in inches
    line_height = photo_width * height / width + 0.03
    figure = canvas.new(0.8 + line_height * lines * len(photos), title)
    panels = figure.subplots(lines * len(photos), 1 + columns, squeeze=False)
    for axes in panels.flat:
        canvas.bare(axes)
    for k, photo in enumerate(photos):
        block = panels[k * lines : (k + 1) * lines]
        block[0, 0].imshow(photo)
        for name, axes, values in zip(names, block[:, 1:].flat, maps[k], strict=False):
            draw(axes, photo, values)
            if k == 0:
                axes.set_title(name, fontsize=9)
        if 'query' in arrays and len(arrays['query']):
            row, column = (arrays['query'] + 0.5) * (height, width) / maps.shape[-2:]
            block[0, 0].plot(column, row, 'o', color='white', markeredgecolor='black', markersize=7)
    return figure
