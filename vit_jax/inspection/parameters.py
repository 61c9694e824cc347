"""Properties of parameters alone: filters and position embeddings (figures 7 and 10)."""

import operator

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Float, PyTree

from vit_jax.errors import Inapplicable
from vit_jax.models.position import Position
from vit_jax.models.resnet import ResNet


def filters(
    params: PyTree, count: int = 28
) -> tuple[Float[np.ndarray, 'count height width channels'], Float[np.ndarray, ' count']]:
    """Returns the first principal components of the filters on pixels.

    The filters are the patch embedding or, in hybrids and ResNets, the first convolution (figure 7,
    left: 28 components of ViT-L/32).

    Args:
      params: the parameters of a model.
      count: number of components.

    Returns:
      The components, of length one, and their shares of the variance. The largest entry of each
      component is positive.
    """
    layer = params['resnet']['root_conv'] if 'resnet' in params else params['embedding']
    kernel = np.asarray(layer['kernel'], np.float64)
    samples = kernel.reshape(-1, kernel.shape[-1]).T
    _, scales, components = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)
    places = np.abs(components).argmax(axis=1, keepdims=True)
    signs = np.sign(np.take_along_axis(components, places, axis=1))
    components = (components * signs).reshape(-1, *kernel.shape[:3])
    shares = scales**2 / np.sum(scales**2)
    return components[:count].astype(np.float32), shares[:count].astype(np.float32)


def position_similarity(
    model: nn.Module, params: PyTree, image_size: tuple[int, int]
) -> Float[np.ndarray, 'layers rows columns rows columns']:
    """Returns the cosine similarity of the position embeddings of all pairs of patches (figure 7).

    For relative positions the similarity is between the embedding of the offset from patch to patch
    and the embedding of offset zero.

    Args:
      model: a model from models.build.
      params: its parameters.
      image_size: (height, width) in pixels.

    Returns:
      The similarity in one array, or in an array per layer if each layer has its own embedding.

    Raises:
      Inapplicable: the patches have no position embedding.
    """
    if isinstance(model, ResNet):
        raise Inapplicable('a ResNet has no position embedding of patches')
    block = model.fields
    if block.position == 'none':
        raise Inapplicable('model.position is none')
    if block.position == 'relative' and model.attention == 'axial':
        raise Inapplicable(
            'model.position is relative within rows and columns: there is no embedding for patches '
            'in different rows and columns'
        )
    grid = model.grid(image_size)
    position = Position(block.position, block.position_at, grid, block.num_heads, model.prefix)
    similarities = []
    for layer_params in _of_each_layer(block, params):
        table = position.apply({'params': layer_params}, block.hidden_size, method='embedding')
        table = np.asarray(table, np.float64)
        if block.position == 'relative':
            similarities.append(_offset_similarity(table, num_patches=grid[0] * grid[1]))
        else:
            unit = _unit(table[0, model.prefix :])
            similarities.append(unit @ unit.T)
    return np.stack(similarities).reshape(-1, *grid, *grid).astype(np.float32)


def _of_each_layer(block, params):
    """The parameters of each layer's position embedding; a single entry if layers share one."""
    has_own_parameters = block.position_at == 'every_layer' and block.position != 'sincos_2d'
    if not has_own_parameters:
        return [params.get('position', {})]
    stacked = params['blocks']['position']
    num_layers = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(operator.itemgetter(layer), stacked) for layer in range(num_layers)]


def _offset_similarity(table, num_patches):
    """The similarity [query, key] from a table [offsets, heads, head_dim]."""
    unit = _unit(table.reshape(len(table), -1))
    zero_offset = len(table) // 2
    similarity = unit @ unit[zero_offset]
    places = np.arange(num_patches)
    offsets = np.subtract.outer(places, places).T + zero_offset
    return similarity[offsets]


def _unit(vectors):
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
