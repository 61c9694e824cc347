"""What the tokens of a model attend to: weights that training never computes as such."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from vit_jax.errors import Inapplicable
from vit_jax.models.attention import Attention
from vit_jax.models.backends import registry
from vit_jax.models.resnet import ResNet


class Observed(NamedTuple):
    """What the attention of a model does with a batch of images.

    Tokens are the class token, if there is one, registers, and the patches in row-major order. An
    axial block has two layers: in the first each patch attends to those of its row, in the second
    to those of its column, with weight zero for all others.
    """

    logits: Float[Array, 'batch classes']  # float32; of every token where model.pool is none
    weights: Float[Array, 'layers batch heads tokens tokens']  # float32: of queries, to keys
    pooling: Float[Array, 'batch heads tokens'] | None  # of the query that `map` pooling has
    grid: tuple[int, int]  # (rows, columns) of patches
    class_token: bool  # whether one comes first

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return self.weights.shape[-1] - math.prod(self.grid)


def observer(model: nn.Module) -> Callable[[PyTree, Array | np.ndarray], Observed]:
    """A function of parameters and prepared images [batch, height, width, 3], without dropout.

    The logits are those of the model up to rounding, and every row of the weights sums to one. It
    is compiled for every new shape of images. For an image of B/16 at 224 px the weights take 22
    MB. Raises Inapplicable for a model without attention, and from the function what the model
    raises.
    """
    check(model)

    @jax.jit
    def forward(params, images):
        logits, weights = apply(model, params, images)
        return logits, *among_all_tokens(weights, model.grid(images.shape[1:3]))

    def observe(params, images):
        return Observed(
            *forward(params, images), model.grid(images.shape[1:3]), model.pool == 'cls'
        )

    return observe


def check(model: nn.Module) -> None:
    """Raises Inapplicable for a ResNet; an axial one attends between points of feature maps."""
    if isinstance(model, ResNet):
        raise Inapplicable('a ResNet has no attention between patches')


def apply(
    model: nn.Module, params: PyTree, images: Float[Array, 'batch height width channels']
) -> tuple[Array, dict[str, Array]]:
    """Logits, and the attention weights as the model has them, by name.

    They are `attention`, or `row_attention` and `column_attention`, as in ViT.__call__; and with
    attention pooling `pooling` [batch, heads, patches].
    """
    logits, outputs = model.apply({'params': params}, images, return_intermediates=True)
    weights = {name: x for name, x in outputs.items() if name.endswith('attention')}
    if model.pool == 'map':  # the weights of AttentionPool
        encoded, pool = outputs['encoded'][:, model.prefix :], params['pool']
        attention = Attention(model.fields.num_heads, 0.0, model.fields.dtype, registry.XLA)
        probes = jnp.tile(pool['probe'].astype(encoded.dtype), (len(encoded), 1, 1))
        _, found = attention.apply(
            {'params': pool['attention']}, probes, encoded, return_weights=True
        )
        weights['pooling'] = found[:, :, 0]  # type: ignore[index]  # an array: no `mutable`
    return logits, weights


def among_all_tokens(
    weights: Mapping[str, Array], grid: tuple[int, int]
) -> tuple[
    Float[Array, 'layers batch heads tokens tokens'], Float[Array, 'batch heads tokens'] | None
]:
    """The `weights` from `apply`, or anything of their shapes, as Observed has them: two fields."""
    pooling, found = weights.get('pooling'), weights.get('attention')
    if found is not None:
        registers = found.shape[-1] - math.prod(grid)  # which pooling does not see
        return found, pooling if pooling is None else jnp.pad(
            pooling, ((0, 0), (0, 0), (registers, 0))
        )
    rows, columns = (jnp.eye(n) for n in grid)
    both = (
        jnp.einsum('lbrhqk,rs->lbhrqsk', weights['row_attention'], rows, precision='highest'),
        jnp.einsum('lbchqk,cd->lbhqckd', weights['column_attention'], columns, precision='highest'),
    )
    tokens = grid[0] * grid[1]
    stacked = jnp.stack([x.reshape(*x.shape[:3], tokens, tokens) for x in both], axis=1)
    return stacked.reshape(-1, *stacked.shape[2:]), pooling


def readout(observed: Observed) -> Float[Array, 'batch tokens']:
    """The share of each token after the last layer in what the head reads; rows sum to one.

    All of it is the class token's, or that of the pooling attention as the mean over its heads, or
    the same for every patch.
    """
    _, batch, _, tokens, _ = observed.weights.shape
    if observed.pooling is not None:
        return observed.pooling.mean(axis=1)
    if observed.class_token:
        return jnp.zeros((batch, tokens)).at[:, 0].set(1)
    patches = tokens - observed.prefix
    return jnp.full((batch, tokens), 1 / patches).at[:, : observed.prefix].set(0)
