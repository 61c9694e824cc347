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
from vit_jax.models.vit import ViT, as_pair

# What is predicted of a patch: its mean colour of 3 bits for each of red, green and blue; the same
# of each of its 4 x 4 parts; or all its pixels.
TARGETS = ('mean_color', 'small_patch', 'pixels')
COLORS = 8**3
PARTS = 4


class Corruption(NamedTuple):
    """What is done to the patches of a batch."""

    corrupted: Bool[Array, 'batch patches']  # what has to be predicted
    masked: Bool[Array, 'batch patches']  # of these, those that become the mask embedding
    source: Int[Array, 'batch patches']  # the patch whose embedding stands in each place


class MaskedPatches(nn.Module):
    """Predicts what corrupted patches looked like, from the outputs at their places."""

    # Patches are drawn by the place of an image in its batch.
    rows_are_independent = False

    vit: ViT  # which returns every token; its parameters are those named vit
    target: str  # one of TARGETS
    rate: float  # share of the patches that are corrupted
    mean: tuple[float, ...]  # what images were normalised with, as in config.preprocess
    std: tuple[float, ...]

    @property
    def backend(self) -> Backend:
        """That of the ViT."""
        return self.vit.backend

    def by_xla(self) -> 'MaskedPatches':
        """The same model, computed by XLA's own layers."""
        return self.clone(vit=self.vit.by_xla())

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width 3'], train: bool = False
    ) -> dict[str, Array]:
        """Returns predictions [batch, patches, ...], targets and corrupted [batch, patches].

        Predictions are float32 logits [..., parts, COLORS] for targets [..., parts], or pixels
        [..., numbers] for as many. Patches are drawn with the PRNG key 'corruption'; without it,
        as in evaluation, always the same of each place in a batch.
        """
        height, width = images.shape[1:3]
        grid = self.vit.grid((height, width))
        hidden = self.vit.fields.hidden_size
        key = self.make_rng('corruption') if self.has_rng('corruption') else jax.random.key(0)
        drawn = draw(key, len(images), math.prod(grid), self.rate)
        embedding = self.param(
            'mask_embedding', nn.initializers.normal(0.02), (hidden,), jnp.float32
        )

        def corrupt(x):
            moved = jnp.take_along_axis(x, drawn.source[..., None], axis=1)
            return jnp.where(drawn.masked[..., None], embedding.astype(x.dtype), moved)

        wanted = targets(
            images * np.array(self.std) + np.array(self.mean),
            as_pair(self.vit.patch_size),
            self.target,
        )
        colors = self.target != 'pixels'
        outputs = nn.Dense(
            wanted.shape[-1] * (COLORS if colors else 1),
            name='patch_head',
            kernel_init=nn.initializers.zeros,
        )(self.vit(images, train, corrupt=corrupt))
        if colors:
            outputs = outputs.reshape(*wanted.shape, COLORS)
        return {'predictions': outputs, 'targets': wanted, 'corrupted': drawn.corrupted}


def build(model: nn.Module, masked: Mapping, preprocess: Mapping) -> MaskedPatches:
    """Around a model from models.build; `masked` and `preprocess` are those sections of a config.

    What pools tokens has no part in it.
    """
    assert isinstance(model, ViT)  # of a config that `check` has let through
    return MaskedPatches(
        model.clone(pool='none', num_classes=0),
        masked['target'],
        masked['rate'],
        tuple(preprocess['mean']),
        tuple(preprocess['std']),
    )


def draw(key: Array, batch: int, patches: int, rate: float) -> Corruption:
    """Corrupts round(rate * patches) of each image: 80 % masked, 10 % another patch, 10 % kept."""
    order, action, other = jax.random.split(key, 3)
    ranks = jax.random.uniform(order, (batch, patches)).argsort(-1).argsort(-1)
    corrupted = ranks < max(1, round(rate * patches))
    action = jax.random.uniform(action, (batch, patches))
    offset = jax.random.randint(other, (batch, patches), 1, max(patches, 2))
    replaced = corrupted & (action >= 0.8) & (action < 0.9)
    return Corruption(
        corrupted,
        corrupted & (action < 0.8),
        (jnp.arange(patches) + jnp.where(replaced, offset, 0)) % patches,
    )


def targets(
    images: Float[Array, 'batch height width 3'], patch_size: tuple[int, int], target: str
) -> Array:
    """What is to be predicted of each patch of images with values in 0..1: [batch, patches, ...].

    int32 [..., parts], a colour's three bits of red, green and blue after each other, or float32
    [..., numbers], the pixels in -1..1.
    """
    batch, (height, width) = len(images), patch_size
    rows, columns = images.shape[1] // height, images.shape[2] // width
    images = images[:, : rows * height, : columns * width]  # the model drops the rest, too
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
    # Rounding errors of the mean do not decide: whole grey levels are 1 / 255 apart.
    bits = jnp.clip(jnp.floor(means * 8 + 1e-4), 0, 7).astype(jnp.int32)
    return bits @ jnp.array([64, 8, 1])


def check(model: nn.Module, target: str) -> None:
    """Raises UserError unless the patches of a model from models.build can be predicted."""
    if not isinstance(model, ViT) or model.resnet is not None:
        raise UserError(
            f'masked.target is {target}, which hides patches from a transformer, and '
            'this model has a ResNet in front of it or in its place: take a ViT, as in '
            'configs/masked.py:b16.'
        )
    if model.pool != 'gap':
        raise UserError(
            f'model.pool is {model.pool} and masked.target {target}: patches are '
            'predicted without a class token or attention pooling, and the mean of '
            'tokens is what fine-tuning then begins with: add --config.model.pool=gap.'
        )
    if model.representation_size:
        raise UserError(
            f'model.representation_size is {model.representation_size}, which is a '
            f'layer of the head, and masked.target {target} has no such head: add '
            '--config.model.representation_size=0.'
        )
    if target == 'small_patch' and any(side % PARTS for side in as_pair(model.patch_size)):
        raise UserError(
            f'masked.target is small_patch, and {PARTS} x {PARTS} parts do not divide '
            f'patches of {as_pair(model.patch_size)} pixels (model.patch_size): take '
            'mean_color or pixels.'
        )
