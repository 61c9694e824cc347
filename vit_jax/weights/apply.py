"""From images to features and probabilities, for programs that have their images in memory."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, UInt8

from vit_jax import models
from vit_jax.data import images as image_files
from vit_jax.errors import UserError
from vit_jax.parallel.microbatch import fastest, in_parts
from vit_jax.weights import description
from vit_jax.weights.loaded import build
from vit_jax.weights.model import Weights

Images = Float[np.ndarray, 'batch height width channels']
Outputs = tuple[Float[np.ndarray, 'batch features'], Float[np.ndarray, 'batch classes'] | None]


def prepare(weights: Weights, paths: Sequence[str]) -> Images:
    """Image files as the model takes them, float32; UserError if one cannot be read.

    Warns of what the weights do not say of images, and of the defaults that are used.
    """
    if isinstance(paths, str | os.PathLike):
        raise UserError(f'prepare takes a list of files, as in [{str(paths)!r}].')
    description.check_rgb(weights)
    if not len(paths):
        raise UserError('prepare takes one image file or more, and there is none.')
    size, preprocess = weights.image_size(), description.complete_preprocess(weights)
    return np.stack([image_files.load(os.fspath(path), size, preprocess) for path in paths])


def as_pixels(
    images: Float[np.ndarray, '... 3'], preprocess: Mapping
) -> UInt8[np.ndarray, '... 3']:
    """Prepared images as they look, rounded: the inverse of (pixels / 255 - mean) / std."""
    mean, std = (np.asarray(preprocess[name], np.float32) for name in ('mean', 'std'))
    return np.clip(np.round((images * std + mean) * 255), 0, 255).astype(np.uint8)


def predictor(weights: Weights) -> Callable[[Images], Outputs]:
    """A function from prepared images to (representations, probabilities), float32.

    Probabilities sum to one, or each class has its own where the `loss` of the weights is sigmoid.
    Instead of probabilities it gives None without a head. It is compiled for every new number of
    images, which are split over as many devices of a CPU as divide it. Raises UserError for images
    that are not prepared, not in a batch, or of other channels.
    """
    loaded = build(weights)
    model = loaded.module
    activation = jax.nn.sigmoid if weights.loss == 'sigmoid' else jax.nn.softmax

    @functools.lru_cache(1)  # the copies of one number of devices
    def placed(devices):
        mesh = Mesh(np.array(jax.local_devices()[:devices]), ('data',))
        return (
            jax.device_put(loaded.params, NamedSharding(mesh, PartitionSpec())),
            NamedSharding(mesh, PartitionSpec('data')),
        )

    def outputs(params, images):
        logits, sown = model.apply({'params': params}, images, mutable='intermediates')
        representation = sown['intermediates']['representation'][0]
        return representation.astype(jnp.float32), activation(logits)

    @functools.partial(model.backend.jit, static_argnums=2)
    def forward(params, images, devices):
        return in_parts(
            functools.partial(outputs, params),
            images,
            fastest(model, len(images), images.shape[1:3], devices),
        )

    def predict(images):
        images = np.asarray(images)
        check_images(weights, images)
        devices = jax.local_device_count() if jax.default_backend() == 'cpu' else 1
        devices = math.gcd(len(images), devices)
        params, split = placed(devices)
        images = jax.device_put(images.astype(np.float32, copy=False), split)
        representations, probabilities = forward(params, images, devices)
        return (
            np.asarray(representations),
            np.asarray(probabilities) if weights.num_classes else None,
        )

    return predict


def check_images(weights: Weights, images: Images) -> None:
    """Raises UserError for what only looks like prepared images: grey, single, or of 0 to 255."""
    models.check_images(images)  # type: ignore[arg-type]  # reads what NumPy's arrays have, too
    if images.shape[-1] != (channels := weights.channels()):
        raise UserError(
            f'images have shape {images.shape}: expected [batch, height, width, '
            f'{channels}]. Repeat the channel of grey images, or let prepare read '
            'files.'
        )
    grid, height, width = weights.grid(), *images.shape[1:3]
    if (
        grid
        and grid == weights.stated_grid()
        and models.build(weights.model, weights.num_classes).grid((height, width)) != grid
    ):
        raise UserError(
            'images have {}x{} pixels: the positions of {} are for images of {}x{}. '
            'Let prepare read files, or fine-tune it for others.'.format(
                height, width, weights.source, *weights.image_size()
            )
        )
    given = weights.preprocess or {}
    mean, std = (np.asarray(given.get(name, 0.5), np.float32) for name in ('mean', 'std'))
    low, high = float(np.min(-mean / std)), float(np.max((1 - mean) / std))
    least, most = float(images.min()), float(images.max())
    if not 2 * low - 1 <= least <= most <= 2 * high + 1:
        raise UserError(
            f'images have values from {least:.4g} to {most:.4g}; prepared ones have '
            f'{low:.3g} to {high:.3g}: expected (pixels / 255 - mean) / std, which '
            'prepare makes of files.'
        )
