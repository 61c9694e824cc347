"""Which patches speak for a class: the gradient of its logit times the attention.

As Chefer et al. define it for self-attention (arXiv 2103.15679, equations 3, 5 and 6): relevance R
begins as the identity, and every layer adds C R, C being the mean over heads of what is positive in
gradient times attention weight. The map is the row of the class token. Where the paper has no rule:
without a class token the map is the mean of the rows of patches, less the identity; and attention
pooling is a last layer with one query, its probe, whose C R is the map.
"""

from collections.abc import Callable, Mapping

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from vit_jax.errors import Inapplicable
from vit_jax.inspection import attention
from vit_jax.inspection.attention import Observed
from vit_jax.inspection.maps import on_grid
from vit_jax.models.attention import Attention

# The parameters of the attention that has the weights of each name of attention.apply.
_PLACES = {
    'attention': 'blocks/attention',
    'row_attention': 'blocks/row/attention',
    'column_attention': 'blocks/column/attention',
    'pooling': 'pool/attention',
}
_CHANGE = 'change_of_weights'


def attributor(
    model: nn.Module,
) -> Callable[[PyTree, Array, Int[Array, ' batch']], Float[Array, 'batch rows columns']]:
    """A function of parameters, prepared images and a class for each, to relevance from 0 on.

    It is compiled for every new shape of images. Raises Inapplicable for a model without attention
    or without logits of whole images.
    """
    attention.check(model)
    if not model.num_classes:
        raise Inapplicable('the weights have no head and so no classes')
    if model.pool == 'none':
        raise Inapplicable('model.pool is none: every token has logits of its own')

    @jax.jit
    def attribute(params, images, classes):
        return relevance(*gradients(model, params, images, classes))

    return attribute


def gradients(
    model: nn.Module,
    params: PyTree,
    images: Float[Array, 'batch height width 3'],
    classes: Int[Array, ' batch'],
) -> tuple[Observed, Observed]:
    """What is observed of images, and the gradient of their classes' logits by the weights.

    The latter has gradients in the fields `weights` and `pooling`.
    """

    def score(changes):
        with nn.intercept_methods(_add_change):
            logits, weights = attention.apply(model, _with_changes(params, changes), images)
        return jnp.take_along_axis(logits, classes[:, None], axis=1).sum(), (logits, weights)

    shapes = jax.eval_shape(lambda: attention.apply(model, params, images)[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    found, (logits, weights) = jax.grad(score, has_aux=True)(zeros)
    grid = model.grid(images.shape[1:3])

    def as_observed(x):
        return Observed(logits, *attention.among_all_tokens(x, grid), grid, model.pool == 'cls')

    return as_observed(weights), as_observed(found)


def relevance(observed: Observed, gradient: Observed) -> Float[Array, 'batch rows columns']:
    """Relevance of each patch, by the equations above."""

    def positive(x, y):
        return jnp.maximum(x * y, 0)

    start = found = jnp.eye(observed.weights.shape[-1])
    for layer in positive(observed.weights, gradient.weights).mean(axis=2):
        found = found + jnp.matmul(layer, found, precision='highest')
    if observed.pooling is None:
        rows, found = attention.readout(observed), found - start
    else:
        rows = positive(observed.pooling, gradient.pooling).mean(axis=1)
    return on_grid(jnp.einsum('bq,bqk->bk', rows, found, precision='highest'), observed)


def _with_changes(params: Mapping, changes: Mapping[str, Array]) -> dict:
    """Parameters with changes of the attention weights beside those of each attention."""
    flat = flax.traverse_util.flatten_dict(dict(params), sep='/')
    for name, x in changes.items():
        # Rows and columns of an image are further images of a batch; a probe is the only query.
        x = x[:, :, None] if name == 'pooling' else x.reshape(len(x), -1, *x.shape[-3:])
        flat[f'{_PLACES[name]}/{_CHANGE}'] = x
    return flax.traverse_util.unflatten_dict(flat, sep='/')


def _add_change(function, args, kwargs, context):
    """Attention as it is, plus what the change of its weights, which is zero, would do.

    The result is linear in the weights, so that the gradient by the change is theirs; and the
    model need not be written a second time without its fused attention.
    """
    result = function(*args, **kwargs)
    if not isinstance(context.module, Attention) or context.method_name != '__call__':
        return result
    params = context.module.variables['params']
    if _CHANGE not in params:
        return result
    (y, weights), tokens = result, args[1]
    value = jnp.einsum('bkd,dhe->bkhe', tokens, params['value']['kernel']) + params['value']['bias']
    change = jnp.einsum('bhqk,bkhe,hed->bqd', params[_CHANGE], value, params['out']['kernel'])
    return y + change.astype(y.dtype), weights
