"""Figures of the parameters and the attention of a model, on a few photos of its data."""

import math
from typing import Any

import numpy as np

from vit_jax.data import pipeline, sources
from vit_jax.errors import Inapplicable, UserError
from vit_jax.inspection import attention as observing
from vit_jax.inspection import maps, parameters
from vit_jax.reporting import attention, pictures
from vit_jax.reporting.attempts import attempt
from vit_jax.reporting.data import names_of
from vit_jax.reporting.model import Model
from vit_jax.scoring import split
from vit_jax.weights.model import patch_in_pixels

PHOTOS = 4  # number of photos on the page
READ = 32  # number of images that are read to choose the photos
SIDE = 256  # pixels of the longer side of a photo
TILE = 28  # smallest side of a tile in pixels
GAP = 2  # pixels between two tiles
MOST_WEIGHTS = 500_000_000  # largest number of attention weights of a photo, 2 GB


def inspect(model: Model) -> dict[str, Any]:
    """Returns the figures of section 4.5, and the data of an explorer of attention.

    Returns:
      `filters` and `similarity` (pictures) and `explorer`, see `explore`. A figure that does not
      apply to the model is None, and `missing` has the reason by the same key.
    """
    content: dict[str, Any] = {'missing': {}}
    attempt(content, 'filters', lambda: _filters(model))
    attempt(content, 'similarity', lambda: _similarity(model))
    attempt(content, 'explorer', lambda: explore(model))
    return content


def _filters(model):
    components, _ = parameters.filters(model.params)
    return pictures.uri(mosaic(_stretched(components)))


def _similarity(model):
    image_size = model.weights.image_size()
    similarities = parameters.position_similarity(model.module, model.params, image_size)
    return pictures.uri(similarity(similarities[0]))


def explore(model: Model) -> dict[str, Any]:
    """Returns the attention of all layers and heads for some photos of the evaluation split.

    Returns:
      `photos`, each with `image`, `label`, `rollout` (the photo, dark where attention rollout is
      low) and the content of attention.photo; `heads`; `blocks` (sides of the blocks of queries
      and of keys); and `distances` [layers, heads] in pixels.

    Raises:
      Inapplicable: if the model has no attention, or too many weights for a page.
    """
    observe = observing.observer(model.module)  # raises Inapplicable without attention
    grid = model.module.grid(model.weights.image_size())
    layers = model.module.num_layers
    if model.module.attention == 'axial':
        layers *= 2  # along rows and along columns
    heads = model.module.fields.num_heads
    if layers * heads * (math.prod(grid) + model.module.prefix) ** 2 > MOST_WEIGHTS:
        raise Inapplicable(
            f'the attention of a photo has {layers} layers, {heads} heads and '
            f'{math.prod(grid)} x {math.prod(grid)} patches, too many for a page.'
        )
    sizes = attention.block_sizes(grid, layers * heads * PHOTOS, model.module.pool == 'cls')
    patch = patch_in_pixels(model.weights.model)
    shown = []
    distances = []
    for image, label in photos(model):
        seen = observe(model.params, image[None])
        distances.append(np.asarray(maps.distances(seen, patch))[:, 0])
        pixels = model.pixels(image)
        rollout = spotlight(pixels, np.asarray(maps.rollout(seen))[0])
        shown.append(
            {
                'image': pictures.uri(pictures.thumbnail(pixels, SIDE)),
                'label': label,
                'rollout': pictures.uri(pictures.thumbnail(rollout, SIDE)),
                **attention.photo(seen, sizes),
            }
        )
    return {
        'photos': shown,
        'heads': heads,
        'blocks': sizes,
        'distances': np.mean(distances, axis=0).tolist(),
    }


def photos(model: Model) -> list[tuple[np.ndarray, str]]:
    """Returns prepared images of the evaluation split and their labels, each label once.

    Raises:
      UserError: if none of the first images can be read.
    """
    dataset = model.dataset
    source = sources.open_split(dataset, dataset['eval_split'], model.weights.classes)
    batch_size = model.batch_size(READ)
    settings = split.batch_settings(
        model.weights, split.make_mesh(batch_size), batch_size, dataset['files_at_once']
    )
    batch = next(iter(pipeline.eval_batches(source, **settings)))
    images = batch['image'][batch['mask']]
    labels = batch['label'][batch['mask']]
    image_of_label: dict[str, np.ndarray] = {}
    for image, label in zip(images, labels, strict=True):
        image_of_label.setdefault(names_of(label, source.class_names), image)
    if not image_of_label:
        raise UserError(
            f'none of the first images of {dataset["eval_split"]} can be read', kind='unreadable'
        )
    return [(image, label) for label, image in list(image_of_label.items())[:PHOTOS]]


def mosaic(tiles: np.ndarray, columns: int = 7) -> np.ndarray:
    """Arranges pictures in rows, with small transparent gaps.

    Args:
      tiles: uint8 [count, height, width, 1 or 3].
      columns: tiles in a row.

    Returns:
      uint8 [height, width, 4], red, green, blue and opacity.
    """
    scale = -(-TILE // max(tiles.shape[1:3]))  # larger tiles make the gaps look small
    tiles = tiles.repeat(scale, axis=1).repeat(scale, axis=2)
    count, height, width, _ = tiles.shape
    rows = -(-count // columns)
    picture = np.zeros((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 4), np.uint8)
    for k, tile in enumerate(tiles):
        row, column = divmod(k, columns)
        top = row * (height + GAP)
        left = column * (width + GAP)
        picture[top : top + height, left : left + width, :3] = tile
        picture[top : top + height, left : left + width, 3] = 255
    return picture


def _stretched(filters):
    """Scales each component so that zero is grey and the largest magnitude becomes 0 or 255."""
    largest = np.abs(filters).max(axis=(1, 2, 3), keepdims=True)
    return np.round(127.5 + 127.5 * filters / np.maximum(largest, 1e-12)).astype(np.uint8)


def similarity(values: np.ndarray) -> np.ndarray:
    """Draws cosine similarities [rows, columns, rows, columns] as tiles, -1 black and 1 white."""
    tiles = values.reshape(-1, *values.shape[2:], 1)
    return mosaic(np.clip(np.round((tiles + 1) * 127.5), 0, 255).astype(np.uint8), values.shape[1])


def spotlight(image: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Darkens an image except where patches have large shares.

    Args:
      image: uint8 [height, width, 3].
      shares: the shares of the patches [rows, columns].

    Returns:
      uint8 [height, width, 3].
    """
    height, width = image.shape[:2]
    num_rows, num_columns = shares.shape
    light = np.sqrt(shares / max(shares.max(), 1e-12))
    row_of_pixel = np.arange(height) * num_rows // height
    column_of_pixel = np.arange(width) * num_columns // width
    light_of_pixel = light[row_of_pixel[:, None], column_of_pixel]
    return np.round(image * light_of_pixel[..., None]).astype(np.uint8)
