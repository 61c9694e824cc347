"""What the parameters and the attention of a model look like, on a few photos of its data."""

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

PHOTOS, READ, SIDE = 4, 32, 256  # photos, of so many that are read; pixels of the longer side
TILE, GAP = 28, 2  # pixels of a tile of a picture, at least, and between two
MOST_WEIGHTS = 500_000_000  # of a photo: 2 GB


def inspect(model: Model) -> dict[str, Any]:
    """The figures of section 4.5, and what an explorer of attention needs.

    Returns `filters` and `similarity` (pictures) and `explorer`, see `explore`; instead of what
    does not apply to the model, None, and in `missing` why, by the same key.
    """
    found: dict[str, Any] = {'missing': {}}
    attempt(
        found,
        'filters',
        lambda: pictures.uri(mosaic(_stretched(parameters.filters(model.params)[0]))),
    )
    attempt(
        found,
        'similarity',
        lambda: pictures.uri(
            similarity(
                parameters.position_similarity(
                    model.module, model.params, model.weights.image_size()
                )[0]
            )
        ),
    )
    attempt(found, 'explorer', lambda: explore(model))
    return found


def explore(model: Model) -> dict[str, Any]:
    """Attention of all layers and heads for some photos of the evaluation split.

    Returns `photos`, each with `image`, `label`, `rollout` (the photo, dark where rollout finds
    little of it) and what attention.photo returns; `heads`, `blocks` (sides of what is taken
    together, of queries and keys) and `distances` [layers, heads] in pixels.
    """
    observe = observing.observer(model.module)  # raises what does not apply
    grid = model.module.grid(model.weights.image_size())
    layers = model.module.num_layers * (2 if model.module.attention == 'axial' else 1)
    heads = model.module.fields.num_heads
    if layers * heads * (math.prod(grid) + model.module.prefix) ** 2 > MOST_WEIGHTS:
        raise Inapplicable(
            f'the attention of a photo has {layers} layers, {heads} heads and '
            f'{math.prod(grid)} x {math.prod(grid)} patches, too many for a page.'
        )
    sizes = attention.block_sizes(grid, layers * heads * PHOTOS, model.module.pool == 'cls')
    shown, far = [], []
    for image, label in photos(model):
        seen = observe(model.params, image[None])
        far.append(np.asarray(maps.distances(seen, patch_in_pixels(model.weights.model)))[:, 0])
        look = model.pixels(image)
        shown.append(
            {
                'image': pictures.uri(pictures.thumbnail(look, SIDE)),
                'label': label,
                'rollout': pictures.uri(
                    pictures.thumbnail(spotlight(look, np.asarray(maps.rollout(seen))[0]), SIDE)
                ),
                **attention.photo(seen, sizes),
            }
        )
    return {
        'photos': shown,
        'heads': heads,
        'blocks': sizes,
        'distances': np.mean(far, axis=0).tolist(),
    }


def photos(model: Model) -> list[tuple[np.ndarray, str]]:
    """Prepared images and their labels: the first of the evaluation split with other labels.

    Raises UserError where no image can be read.
    """
    dataset = model.dataset
    source = sources.open_split(dataset, dataset['eval_split'], model.weights.classes)
    batch_size = model.batch_size(READ)
    batch = next(
        iter(
            pipeline.eval_batches(
                source,
                **split.batch_settings(
                    model.weights, split.make_mesh(batch_size), batch_size, dataset['files_at_once']
                ),
            )
        )
    )
    found: dict[str, np.ndarray] = {}
    for image, label in zip(
        batch['image'][batch['mask']], batch['label'][batch['mask']], strict=True
    ):
        found.setdefault(names_of(label, source.class_names), image)
    if not found:
        raise UserError(f'none of the first images of {dataset["eval_split"]} can be read')
    return [(image, label) for label, image in list(found.items())[:PHOTOS]]


def mosaic(tiles: np.ndarray, columns: int = 7) -> np.ndarray:
    """Pictures [count, height, width, 1 or 3] side by side, uint8 with opacity, in small gaps."""
    size = -(-TILE // max(tiles.shape[1:3]))  # so that the gaps are small
    tiles = tiles.repeat(size, axis=1).repeat(size, axis=2)
    count, height, width, _ = tiles.shape
    rows = -(-count // columns)
    found = np.zeros((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 4), np.uint8)
    for k, tile in enumerate(tiles):
        top, left = k // columns * (height + GAP), k % columns * (width + GAP)
        found[top : top + height, left : left + width, :3] = tile
        found[top : top + height, left : left + width, 3] = 255
    return found


def _stretched(filters):
    """Each component, so that zero is grey and the entry of largest size is 0 or 255."""
    largest = np.abs(filters).max(axis=(1, 2, 3), keepdims=True)
    return np.round(127.5 + 127.5 * filters / np.maximum(largest, 1e-12)).astype(np.uint8)


def similarity(values: np.ndarray) -> np.ndarray:
    """Cosine similarities [rows, columns, rows, columns] as tiles, from black (-1) to white (1)."""
    tiles = values.reshape(-1, *values.shape[2:], 1)
    return mosaic(np.clip(np.round((tiles + 1) * 127.5), 0, 255).astype(np.uint8), values.shape[1])


def spotlight(image: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The image, uint8, as bright as each patch has a share [rows, columns] of what is read."""
    height, width = image.shape[:2]
    light = np.sqrt(shares / max(shares.max(), 1e-12))
    rows, columns = (
        np.arange(n) * size // n for n, size in zip((height, width), shares.shape, strict=True)
    )
    return np.round(image * light[rows[:, None], columns][..., None]).astype(np.uint8)
