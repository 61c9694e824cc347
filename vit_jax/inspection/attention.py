"""The attention weights of a model, which training does not compute explicitly."""

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
    """The attention of a model for a batch of images.

    Tokens are the class token if there is one, the registers, and the patches in row-major order.
    An axial block counts as two layers. In the first layer each patch attends to the patches of its
    row, in the second to the patches of its column; all other weights are zero.
    """

    logits: Float[Array, 'batch classes']  # float32; of every token if model.pool is none
    weights: Float[Array, 'layers batch heads tokens tokens']  # float32: [..., query, key]
    pooling: Float[Array, 'batch heads tokens'] | None  # attention of the pooling (map)
    grid: tuple[int, int]  # (rows, columns) of patches
    class_token: bool  # whether the first token is a class token

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return self.weights.shape[-1] - math.prod(self.grid)


def observer(model: nn.Module) -> Callable[[PyTree, Array | np.ndarray], Observed]:
    """Returns a function from parameters and prepared images to Observed.

    The images are [batch, height, width, 3]. The logits equal the model's logits up to rounding,
    and every row of the weights sums to one. The function has no dropout, and it is compiled for
    every new shape of images. For B/16 the weights take 22 MB per image of 224 px.

    Raises:
      Inapplicable: the model has no attention between patches.
    """
    check(model)

    @jax.jit
    def forward(params, images):
        logits, weights = apply(model, params, images)
        return logits, *among_all_tokens(weights, model.grid(images.shape[1:3]))

    def observe(params, images):
        logits, weights, pooling = forward(params, images)
        grid = model.grid(images.shape[1:3])
        return Observed(logits, weights, pooling, grid, model.pool == 'cls')

    return observe


def check(model: nn.Module) -> None:
    """Raises Inapplicable for a ResNet. AxialResNet attends between points, not patches."""
    if isinstance(model, ResNet):
        raise Inapplicable('a ResNet has no attention between patches')


def apply(
    model: nn.Module, params: PyTree, images: Float[Array, 'batch height width channels']
) -> tuple[Array, dict[str, Array]]:
    """Returns the logits, and the attention weights by the names that the model gives them.

    The names are `attention`, or `row_attention` and `column_attention`, see ViT.__call__. With
    attention pooling there is also `pooling` [batch, heads, patches].
    """
    logits, outputs = model.apply({'params': params}, images, return_intermediates=True)
    weights = {name: x for name, x in outputs.items() if name.endswith('attention')}
    if model.pool == 'map':  # the weights of AttentionPool
        patches = outputs['encoded'][:, model.prefix :]
        pool = params['pool']
        attention = Attention(model.fields.num_heads, 0.0, model.fields.dtype, registry.XLA)
        probes = jnp.tile(pool['probe'].astype(patches.dtype), (len(patches), 1, 1))
        _, pooling_weights = attention.apply(
            {'params': pool['attention']}, probes, patches, return_weights=True
        )
        weights['pooling'] = pooling_weights[:, :, 0]  # type: ignore[index]  # an array, because nothing is mutable
    return logits, weights


def among_all_tokens(
    weights: Mapping[str, Array], grid: tuple[int, int]
) -> tuple[
    Float[Array, 'layers batch heads tokens tokens'], Float[Array, 'batch heads tokens'] | None
]:
    """Returns the fields `weights` and `pooling` of Observed.

    Args:
      weights: the weights from `apply`, or other arrays of these names and shapes.
      grid: (rows, columns) of patches.
    """
    pooling = weights.get('pooling')
    if 'attention' in weights:
        full = weights['attention']
        num_registers = full.shape[-1] - math.prod(grid)
        if pooling is not None:  # pooling ignores the registers
            pooling = jnp.pad(pooling, ((0, 0), (0, 0), (num_registers, 0)))
        return full, pooling
    rows, columns = grid
    same_row = jnp.eye(rows)
    same_column = jnp.eye(columns)
    by_row = jnp.einsum(
        'lbrhqk,rs->lbhrqsk', weights['row_attention'], same_row, precision='highest'
    )
    by_column = jnp.einsum(
        'lbchqk,cd->lbhqckd', weights['column_attention'], same_column, precision='highest'
    )
    tokens = rows * columns
    matrices = [x.reshape(*x.shape[:3], tokens, tokens) for x in (by_row, by_column)]
    stacked = jnp.stack(matrices, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:]), pooling


def readout(observed: Observed) -> Float[Array, 'batch tokens']:
    """Returns the share of each output token in the input of the head. Rows sum to one.

    A class token has the share 1. With attention pooling the shares are the mean of the pooling
    weights over the heads. Otherwise all patches have the same share.
    """
    _, batch, _, tokens, _ = observed.weights.shape
    if observed.pooling is not None:
        return observed.pooling.mean(axis=1)
    if observed.class_token:
        return jnp.zeros((batch, tokens)).at[:, 0].set(1)
    num_patches = tokens - observed.prefix
    return jnp.full((batch, tokens), 1 / num_patches).at[:, : observed.prefix].set(0)
