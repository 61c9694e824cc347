"""The relevance of each patch for a class: the gradient of the class's logit times the attention.

This is the method of Chefer et al. for self-attention (arXiv 2103.15679, equations 3, 5 and 6). The
relevance R starts as the identity. Every layer adds C R, where C is the mean over heads of the
positive part of gradient times attention weight. The map is the row of the class token.

Two cases are not in that paper. Without a class token, the map is the mean of the rows of all
patches, without the identity. Attention pooling counts as a last layer with one query, the probe,
and the map is C R of this layer.
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

# The parameters of the attention layer for each name of weights of attention.apply.
_LAYERS = {
    'attention': 'blocks/attention',
    'row_attention': 'blocks/row/attention',
    'column_attention': 'blocks/column/attention',
    'pooling': 'pool/attention',
}
_CHANGE = 'change_of_weights'


def attributor(
    model: nn.Module,
) -> Callable[[PyTree, Array, Int[Array, ' batch']], Float[Array, 'batch rows columns']]:
    """Returns a function from parameters, prepared images and a class of each image to relevance.

    Relevance is zero or positive. The function is compiled for every new shape of images.

    Raises:
      Inapplicable: the model has no attention, or no logits of whole images.
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
    """Returns the attention for images, and the gradients of the logits of their classes.

    The fields `weights` and `pooling` of the second Observed are the gradients with respect to the
    weights.
    """

    def score(changes):
        with nn.intercept_methods(_add_change):
            logits, weights = attention.apply(model, _with_changes(params, changes), images)
        return jnp.take_along_axis(logits, classes[:, None], axis=1).sum(), (logits, weights)

    shapes = jax.eval_shape(lambda: attention.apply(model, params, images)[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    gradients_by_name, (logits, weights) = jax.grad(score, has_aux=True)(zeros)
    grid = model.grid(images.shape[1:3])

    def as_observed(arrays):
        all_weights, pooling = attention.among_all_tokens(arrays, grid)
        return Observed(logits, all_weights, pooling, grid, model.pool == 'cls')

    return as_observed(weights), as_observed(gradients_by_name)


def relevance(observed: Observed, gradient: Observed) -> Float[Array, 'batch rows columns']:
    """Returns the relevance of each patch, by the equations of the module's docstring.

    Args:
      observed: the attention weights.
      gradient: the gradients with respect to these weights.
    """

    def contribution(weights, gradients):
        return jnp.maximum(weights * gradients, 0)

    identity = jnp.eye(observed.weights.shape[-1])
    total = identity  # R
    for layer in contribution(observed.weights, gradient.weights).mean(axis=2):  # C
        total = total + jnp.matmul(layer, total, precision='highest')
    if observed.pooling is None:
        shares = attention.readout(observed)
        total = total - identity
    else:
        shares = contribution(observed.pooling, gradient.pooling).mean(axis=1)
    return on_grid(jnp.einsum('bq,bqk->bk', shares, total, precision='highest'), observed)


def _with_changes(params: Mapping, changes: Mapping[str, Array]) -> dict:
    """The parameters, with a change of the attention weights added to each attention layer."""
    flat = flax.traverse_util.flatten_dict(dict(params), sep='/')
    for name, change in changes.items():
        if name == 'pooling':  # the probe is the only query
            change = change[:, :, None]
        else:  # rows and columns are further entries of the batch
            change = change.reshape(len(change), -1, *change.shape[-3:])
        flat[f'{_LAYERS[name]}/{_CHANGE}'] = change
    return flax.traverse_util.unflatten_dict(flat, sep='/')


def _add_change(function, args, kwargs, context):
    """Adds the effect of a change of the weights, which is zero, to the output of attention.

    The output is linear in the weights, so the gradient with respect to the change is the gradient
    with respect to the weights. This also works with fused attention.
    """
    result = function(*args, **kwargs)
    if not isinstance(context.module, Attention) or context.method_name != '__call__':
        return result
    params = context.module.variables['params']
    if _CHANGE not in params:
        return result
    y, weights = result
    tokens = args[1]
    value = jnp.einsum('bkd,dhe->bkhe', tokens, params['value']['kernel']) + params['value']['bias']
    change = jnp.einsum('bhqk,bkhe,hed->bqd', params[_CHANGE], value, params['out']['kernel'])
    return y + change.astype(y.dtype), weights
