"""What the tokens of a model attend to: weights that training never computes as such."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from vit_jax.errors import Inapplicable
from vit_jax.models.attention import Attention


class Observed(NamedTuple):
    """What the attention of a model does with a batch of images.

    Tokens are the class token, if there is one, and the patches in row-major order. An axial block
    has two layers: in the first each patch attends to those of its row, in the second to those of
    its column, with weight zero for all others.
    """

    logits: Float[Array, 'batch classes']  # float32; of every token where model.pool is none
    weights: Float[Array, 'layers batch heads tokens tokens']  # float32: of queries, to keys
    pooling: Float[Array, 'batch heads tokens'] | None  # of the query that `map` pooling has
    grid: tuple[int, int]  # (rows, columns) of patches
    class_token: bool  # whether one comes before the patches


def observer(model: nn.Module) -> Callable[[PyTree, Array], Observed]:
    """A function of parameters and prepared images [batch, height, width, 3], without dropout.

    The logits are those of the model up to rounding, and every row of the weights sums to one. It
    is compiled for every new shape of images. For an image of B/16 at 224 px the weights take 22
    MB. Raises Inapplicable for a model without attention, and from the function what the model
    raises.
    """
    check(model)

    @jax.jit
    def forward(params, images):
        logits, outputs = model.apply({'params': params}, images, return_intermediates=True)
        pooling = _pooling(model, params, outputs['encoded']) if model.pool == 'map' else None
        return logits, among_all_tokens(outputs, model.grid(images.shape[1:3])), pooling

    def observe(params, images):
        return Observed(*forward(params, images), model.grid(images.shape[1:3]),
                        model.pool == 'cls')
    return observe


def check(model: nn.Module) -> None:
    """Raises Inapplicable for a model without attention."""
    if not hasattr(model, 'pool'):
        raise Inapplicable('a ResNet has no attention')


def among_all_tokens(outputs: Mapping[str, Array], grid: tuple[int, int]
                     ) -> Float[Array, 'layers batch heads tokens tokens']:
    """Weights, or anything of their shapes, by query and key, from what ViT.__call__ returns.

    `outputs` has `attention`, or `row_attention` and `column_attention`, see Observed.
    """
    if 'attention' in outputs:
        return outputs['attention']
    rows, columns = (jnp.eye(n) for n in grid)
    both = (jnp.einsum('lbrhqk,rs->lbhrqsk', outputs['row_attention'], rows, precision='highest'),
            jnp.einsum('lbchqk,cd->lbhqckd', outputs['column_attention'], columns,
                       precision='highest'))
    tokens = grid[0] * grid[1]
    stacked = jnp.stack([x.reshape(*x.shape[:3], tokens, tokens) for x in both], axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def readout(observed: Observed) -> Float[Array, 'batch tokens']:
    """The share of each token after the last layer in what the head reads; rows sum to one.

    All of it is the class token's, or that of the pooling attention as the mean over its heads, or
    the same for every token.
    """
    _, batch, _, tokens, _ = observed.weights.shape
    if observed.pooling is not None:
        return observed.pooling.mean(axis=1)
    if observed.class_token:
        return jnp.zeros((batch, tokens)).at[:, 0].set(1)
    return jnp.full((batch, tokens), 1 / tokens)


def _pooling(model, params, encoded):
    """The weights of AttentionPool for tokens after the last LayerNorm."""
    probe = params['pool']['probe'].astype(encoded.dtype)
    attention = Attention(model.block.num_heads, 0.0, model.block.dtype)
    _, weights = attention.apply(
        {'params': params['pool']['attention']},
        jnp.tile(probe, (len(encoded), 1, 1)), encoded, return_weights=True)
    return weights[:, :, 0]
