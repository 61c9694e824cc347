"""Masked patch prediction, the paper's self-supervision (section 4.6, appendix B.1.2)."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vit_jax.errors import UserError
from vit_jax.models.backends.backend import Backend
from vit_jax.models.patch_grid import as_pair
from vit_jax.models.vit import ViT

# Targets of a patch: its mean colour, with 3 bits for each of red, green and blue; the mean colours
# of its 4 x 4 parts; or all its pixels.
TARGETS = ('mean_color', 'small_patch', 'pixels')
COLORS = 8**3
PARTS = 4


class Corruption(NamedTuple):
    """The corruption of the patches in a batch of images."""

    corrupted: Bool[Array, 'batch patches']  # whether the patch is to be predicted
    masked: Bool[Array, 'batch patches']  # whether the mask embedding replaces the patch
    source: Int[Array, 'batch patches']  # number of the patch that replaces each patch


class MaskedPatches(nn.Module):
    """Predicts the targets of corrupted patches from the output tokens at their positions."""

    # The corruption of an image depends on its position in the batch.
    rows_are_independent = False

    vit: ViT  # returns every token; its parameters are under 'vit'
    target: str  # one of TARGETS
    rate: float  # share of the patches that are corrupted
    mean: tuple[float, ...]  # the normalisation of images, from config.preprocess
    std: tuple[float, ...]

    @property
    def backend(self) -> Backend:
        """The backend of the ViT."""
        return self.vit.backend

    def by_xla(self) -> 'MaskedPatches':
        """Returns the same model, computed by XLA's own layers."""
        return self.clone(vit=self.vit.by_xla())

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width 3'], train: bool = False
    ) -> dict[str, Array]:
        """Corrupts patches and predicts them.

        Args:
          images: normalised pixels.
          train: enables dropout and stochastic depth. The corruption needs the PRNG key
            'corruption'; without it, as in evaluation, it depends only on the position in the
            batch.

        Returns:
          A dict with `targets` and `corrupted` [batch, patches] and `predictions`, float32. For
          targets [batch, patches, parts] predictions are logits [batch, patches, parts, COLORS];
          for pixels they have the shape of the targets.
        """
        height, width = images.shape[1:3]
        grid = self.vit.grid((height, width))
        hidden_size = self.vit.fields.hidden_size
        key = self.make_rng('corruption') if self.has_rng('corruption') else jax.random.key(0)
        corruption = draw(key, len(images), math.prod(grid), self.rate)
        embedding = self.param(
            'mask_embedding', nn.initializers.normal(0.02), (hidden_size,), jnp.float32
        )

        def corrupt(patches):
            moved = jnp.take_along_axis(patches, corruption.source[..., None], axis=1)
            mask = corruption.masked[..., None]
            return jnp.where(mask, embedding.astype(patches.dtype), moved)

        pixels = images * np.array(self.std) + np.array(self.mean)
        expected = targets(pixels, as_pair(self.vit.patch_size), self.target)
        outputs_per_target = 1 if self.target == 'pixels' else COLORS
        head = nn.Dense(
            expected.shape[-1] * outputs_per_target,
            name='patch_head',
            kernel_init=nn.initializers.zeros,
        )
        predictions = head(self.vit(images, train, corrupt=corrupt))
        if self.target != 'pixels':
            predictions = predictions.reshape(*expected.shape, COLORS)
        return {
            'predictions': predictions,
            'targets': expected,
            'corrupted': corruption.corrupted,
        }


def build(model: nn.Module, masked: Mapping, preprocess: Mapping) -> MaskedPatches:
    """Returns the module that predicts masked patches with a model; its pooling is not used.

    Args:
      model: a model from models.build that `check` accepts.
      masked: `config.masked`.
      preprocess: `config.preprocess`.
    """
    assert isinstance(model, ViT)
    return MaskedPatches(
        model.clone(pool='none', num_classes=0),
        masked['target'],
        masked['rate'],
        tuple(preprocess['mean']),
        tuple(preprocess['std']),
    )


def draw(key: Array, batch: int, patches: int, rate: float) -> Corruption:
    """Corrupts round(rate * patches) patches of each image, at least one.

    The mask embedding replaces 80 % of them, another patch of the image replaces 10 %, and 10 %
    stay unchanged.
    """
    order_key, action_key, offset_key = jax.random.split(key, 3)
    ranks = jax.random.uniform(order_key, (batch, patches)).argsort(-1).argsort(-1)
    corrupted = ranks < max(1, round(rate * patches))
    action = jax.random.uniform(action_key, (batch, patches))
    offset = jax.random.randint(offset_key, (batch, patches), 1, max(patches, 2))
    replaced = corrupted & (action >= 0.8) & (action < 0.9)
    masked = corrupted & (action < 0.8)
    source = (jnp.arange(patches) + jnp.where(replaced, offset, 0)) % patches
    return Corruption(corrupted, masked, source)


def targets(
    images: Float[Array, 'batch height width 3'], patch_size: tuple[int, int], target: str
) -> Array:
    """Returns the targets of each patch.

    Args:
      images: pixels in [0, 1].
      patch_size: (height, width) in pixels.
      target: one of TARGETS.

    Returns:
      int32 colours [batch, patches, parts], whose bits are 3 of red, 3 of green and 3 of blue; or
      float32 pixels [batch, patches, numbers] in [-1, 1].
    """
    batch = len(images)
    height, width = patch_size
    rows = images.shape[1] // height
    columns = images.shape[2] // width
    images = images[:, : rows * height, : columns * width]  # like model.partial_patches=drop
    patches = (
        images.reshape(batch, rows, height, columns, width, 3)
        .swapaxes(2, 3)
        .reshape(batch, rows * columns, height, width, 3)
    )
    if target == 'pixels':
        return 2 * patches.reshape(*patches.shape[:2], -1) - 1
    parts = 1 if target == 'mean_color' else PARTS
    means = (
        patches.reshape(*patches.shape[:2], parts, height // parts, parts, width // parts, 3)
        .mean((3, 5))
        .reshape(*patches.shape[:2], parts**2, 3)
    )
    # Grey levels are 1 / 255 apart, so 1e-4 only outweighs the rounding error of the mean.
    bits = jnp.clip(jnp.floor(means * 8 + 1e-4), 0, 7).astype(jnp.int32)
    return bits @ jnp.array([64, 8, 1])


def check(model: nn.Module, target: str) -> None:
    """Raises UserError unless a model from models.build can predict the target of its patches."""
    if not isinstance(model, ViT) or model.resnet is not None:
        raise UserError(
            f'masked.target is {target}, which hides patches from a transformer, and this model is '
            'or contains a ResNet. Use a ViT, as in configs/masked.py:b16.',
            kind='value',
            field='masked.target',
            value=target,
        )
    if model.pool != 'gap':
        raise UserError(
            f'model.pool is {model.pool}: expected gap, because masked.target is {target}. Patches '
            'are predicted without class token and attention pooling, and fine-tuning starts from '
            'the mean of the tokens. Add --config.model.pool=gap.',
            kind='value',
            field='model.pool',
            value=model.pool,
        )
    if model.representation_size:
        raise UserError(
            f'model.representation_size is {model.representation_size}: expected 0, because '
            f'masked.target is {target}, which has no hidden layer in the head. Add '
            '--config.model.representation_size=0.',
            kind='value',
            field='model.representation_size',
            value=model.representation_size,
        )
    patch_size = as_pair(model.patch_size)
    if target == 'small_patch' and any(side % PARTS for side in patch_size):
        raise UserError(
            f'masked.target is small_patch, and {PARTS} x {PARTS} parts do not divide patches of '
            f'{patch_size} pixels (model.patch_size). Use mean_color or pixels.',
            kind='value',
            field='masked.target',
            value=target,
        )
