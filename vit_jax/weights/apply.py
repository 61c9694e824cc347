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
    """Reads image files and prepares them for the model.

    A warning lists the defaults that replace missing fields of `preprocess`.

    Args:
      weights: the weights; they describe the preparation.
      paths: one image file or more.

    Returns:
      Normalised images, float32 [batch, height, width, 3].

    Raises:
      UserError: there is no file, a file cannot be read, or the model does not take RGB images.
    """
    if isinstance(paths, str | os.PathLike):
        raise UserError(
            f'prepare takes a list of files, as in [{str(paths)!r}].',
            kind='value',
            field='paths',
            value=paths,
        )
    description.check_rgb(weights)
    if not len(paths):
        raise UserError(
            'paths is empty: prepare expects one image file or more.',
            kind='value',
            field='paths',
            value=paths,
        )
    size = weights.image_size()
    preprocess = description.complete_preprocess(weights)
    return np.stack([image_files.load(os.fspath(path), size, preprocess) for path in paths])


def as_pixels(
    images: Float[np.ndarray, '... 3'], preprocess: Mapping
) -> UInt8[np.ndarray, '... 3']:
    """Pixels of prepared images, rounded: the inverse of (pixels / 255 - mean) / std."""
    mean = np.asarray(preprocess['mean'], np.float32)
    std = np.asarray(preprocess['std'], np.float32)
    return np.clip(np.round((images * std + mean) * 255), 0, 255).astype(np.uint8)


def predictor(weights: Weights) -> Callable[[Images], Outputs]:
    """Builds a function from prepared images to (representations, probabilities), float32.

    Probabilities sum to one; if the `loss` of the weights is 'sigmoid', each class has its own.
    Without a head, the function returns None in place of the probabilities. The function is
    compiled for every new number of images. On a CPU, the images are split over the largest number
    of devices that divides their number.

    The function raises UserError if the images are not prepared, are not a batch, or have the wrong
    number of channels.
    """
    loaded = build(weights)
    model = loaded.module
    activation = jax.nn.sigmoid if weights.loss == 'sigmoid' else jax.nn.softmax

    @functools.lru_cache(1)  # keeps the copies of the parameters for one number of devices
    def placed(num_devices):
        mesh = Mesh(np.array(jax.local_devices()[:num_devices]), ('data',))
        replicated = NamedSharding(mesh, PartitionSpec())
        split = NamedSharding(mesh, PartitionSpec('data'))
        return jax.device_put(loaded.params, replicated), split

    def outputs(params, images):
        logits, sown = model.apply({'params': params}, images, mutable='intermediates')
        representation = sown['intermediates']['representation'][0]
        return representation.astype(jnp.float32), activation(logits)

    @functools.partial(model.backend.jit, static_argnums=2)
    def forward(params, images, num_devices):
        return in_parts(
            functools.partial(outputs, params),
            images,
            fastest(model, len(images), images.shape[1:3], num_devices),
        )

    def predict(images):
        images = np.asarray(images)
        check_images(weights, images)
        num_devices = 1
        if jax.default_backend() == 'cpu':
            num_devices = math.gcd(len(images), jax.local_device_count())
        params, split = placed(num_devices)
        images = jax.device_put(images.astype(np.float32, copy=False), split)
        representations, probabilities = forward(params, images, num_devices)
        return (
            np.asarray(representations),
            np.asarray(probabilities) if weights.num_classes else None,
        )

    return predict


def check_images(weights: Weights, images: Images) -> None:
    """Raises UserError for images that are not prepared: grey, not in a batch, or 0 to 255."""
    models.check_images(images)  # type: ignore[arg-type]  # it reads only what NumPy arrays have
    _check_channels(weights, images)
    _check_size(weights, images)
    _check_range(weights.preprocess or {}, images)


def _check_channels(weights, images):
    channels = weights.channels()
    if images.shape[-1] != channels:
        raise UserError(
            f'images have shape {images.shape}: expected [batch, height, width, '
            f'{channels}]. Repeat the channel of grey images, or let prepare read files.',
            kind='value',
            field='images',
            value=images.shape,
        )


def _check_size(weights, images):
    """Raises UserError if the images do not have the size that the position embeddings are for."""
    height, width = images.shape[1:3]
    grid = weights.grid()
    if not grid or grid != weights.stated_grid():
        return
    if models.build(weights.model, weights.num_classes).grid((height, width)) != grid:
        expected_height, expected_width = weights.image_size()
        raise UserError(
            f'images have {height}x{width} pixels: the position embeddings of {weights.source} '
            f'are for images of {expected_height}x{expected_width}. Let prepare read files, or '
            'fine-tune the model on the other size.',
            kind='value',
            field='images',
            value=images.shape,
        )


def _check_range(preprocess, images):
    """Raises UserError for values far outside the range of normalised pixels."""
    mean = np.asarray(preprocess.get('mean', 0.5), np.float32)
    std = np.asarray(preprocess.get('std', 0.5), np.float32)
    low = float(np.min(-mean / std))
    high = float(np.max((1 - mean) / std))
    least = float(images.min())
    most = float(images.max())
    if not 2 * low - 1 <= least <= most <= 2 * high + 1:
        raise UserError(
            f'images have values from {least:.4g} to {most:.4g}: expected prepared images, '
            f'(pixels / 255 - mean) / std, with values from {low:.3g} to {high:.3g}. Let prepare '
            'read files.',
            kind='value',
            field='images',
        )
