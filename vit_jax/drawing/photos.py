"""Figures of photos: what a model looks at in them."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image

from vit_jax.drawing import canvas
from vit_jax.drawing.canvas import Arrays
from vit_jax.errors import counted

PER_LINE = 6  # heads or layers
HEAT = 'inferno'
BRIGHTEST = 0.95  # the quantile where colours end: a few patches have many times the others' value
Photo = UInt8[np.ndarray, 'height width 3']


def rollout(arrays: Arrays, title: str) -> Any:
    """Attention through all layers, over photos (figures 6 and 14): `photos` and their `maps`."""
    return _rows(
        f'{title}\nattention rollout',
        arrays['photos'],
        [('rollout', heat, arrays['maps']), ('photo times rollout', darkened, arrays['maps'])],
    )


def attribution(arrays: Arrays, title: str) -> Any:
    """What speaks for a class, over photos: `photos`, `maps`, and `captions` with the class."""
    return _rows(
        f'{title}\nwhat speaks for a class: gradient times attention',
        arrays['photos'],
        [('relevance', heat, arrays['maps'])],
        arrays['captions'],
    )


def compare(arrays: Arrays, title: str) -> Any:
    """Rollout, thresholded attention (of all heads) and attribution, one below the other."""
    rows = [('rollout', heat, arrays['rollout']), ('60 % of the attention', kept, arrays['kept'])]
    if 'attribution' in arrays:
        rows.append(('relevance for its class', heat, arrays['attribution']))
    return _rows(
        f'{title}\nthree ways to ask what counts', arrays['photos'], rows, arrays.get('captions')
    )


def attention(arrays: Arrays, title: str) -> Any:
    """What the class token or a patch attends to, by head or layer.

    `maps` are [photos, panels, rows, columns], `query` is (row, column) of a patch or empty.
    """
    return _blocks(f'{title}\n{arrays["what"]}', arrays, heat)


def threshold(arrays: Arrays, title: str) -> Any:
    """The patches with 60 % of a head's attention: `maps` [photos, heads, rows, columns], bool."""
    return _blocks(f'{title}\n{arrays["what"]}', arrays, kept)


def heat(axes: Any, photo: Photo, values: Float[np.ndarray, 'rows columns']) -> None:
    """Values as colours over the grey photo, interpolated, from the least to BRIGHTEST."""
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
    """The photo times the values, interpolated, of which BRIGHTEST leaves it as it is."""
    share = np.minimum(values / np.quantile(values, BRIGHTEST), 1)
    large = Image.fromarray(share.astype(np.float32)).resize(
        photo.shape[1::-1], Image.Resampling.BILINEAR
    )
    axes.imshow((photo * np.asarray(large)[..., None]).astype(np.uint8))


def kept(axes: Any, photo: Photo, values: Bool[np.ndarray, 'rows columns']) -> None:
    """The photo where patches are kept, and dark elsewhere; says how many patches are kept.

    Attention that rests on a few patches leaves the picture dark: the number says why.
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
    """'4 of 196 patches', and in a second line that all of them are in the corners of the image."""
    text = f'{counted(values.sum(), "patch", "patches")} of {values.size}'
    in_corners = values[:: max(1, len(values) - 1), :: max(1, values.shape[1] - 1)]
    if in_corners.sum() == values.sum():
        text += '\nall in the corners'
    return text


def _extent(photo):
    height, width = photo.shape[:2]
    return -0.5, width - 0.5, height - 0.5, -0.5


def _rows(title, photos, rows, captions=None):
    """Photos side by side, with the same of each in a row: (name, how to draw, values)."""
    count, (height, width) = len(photos), photos.shape[1:3]
    side = min(2.4, (canvas.WIDTH - 0.4) / count)  # of a photo, in inches
    figure = canvas.new(
        (0.6 if captions is None else 0.8) + (side * height / width + 0.03) * (1 + len(rows)), title
    )
    panels = figure.subplots(1 + len(rows), count, squeeze=False)
    for k, photo in enumerate(photos):
        canvas.bare(panels[0, k], '' if captions is None else captions[k]).imshow(photo)
        for axes, (_, draw, values) in zip(panels[1:, k], rows, strict=True):
            draw(canvas.bare(axes), photo, values[k])
    for axes, name in zip(panels[:, 0], ['photo', *(name for name, *_ in rows)], strict=True):
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
    """Each photo beside its panels, in as many lines as they need."""
    photos, maps, names = arrays['photos'], arrays['maps'], arrays['panels']
    lines, columns = math.ceil(len(names) / PER_LINE), min(len(names), PER_LINE)
    height, width = photos.shape[1:3]
    side = min(2.2, canvas.WIDTH / (1 + columns))
    figure = canvas.new(0.8 + (side * height / width + 0.03) * lines * len(photos), title)
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
