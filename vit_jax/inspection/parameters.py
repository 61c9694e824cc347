"""What parameters show by themselves: filters and position embeddings (figures 7 and 10)."""

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
    """The first principal components of the filters on pixels, and their shares of the variance.

    The filters are the patch embedding or, of hybrids and ResNets, the first convolution (figure 7,
    left: 28 of ViT-L/32). Components have length one; of the two signs, that with which the entry
    of largest size is positive.
    """
    kernel = params['resnet']['root_conv'] if 'resnet' in params else params['embedding']
    kernel = np.asarray(kernel['kernel'], np.float64)
    samples = kernel.reshape(-1, kernel.shape[-1]).T
    _, scales, found = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)
    largest = np.take_along_axis(found, np.abs(found).argmax(axis=1, keepdims=True), axis=1)
    found = (found * np.sign(largest)).reshape(-1, *kernel.shape[:3])
    shares = scales**2 / np.sum(scales**2)
    return found[:count].astype(np.float32), shares[:count].astype(np.float32)


def position_similarity(
    model: nn.Module, params: PyTree, image_size: tuple[int, int]
) -> Float[np.ndarray, 'layers rows columns rows columns']:
    """Cosine similarity of the position embedding of each patch with those of all (figure 7).

    There is one layer unless each has an embedding of its own. Of relative positions it compares
    the embedding of the offset between two patches with that of offset zero. Raises Inapplicable
    where patches have no position embedding.
    """
    if isinstance(model, ResNet):
        raise Inapplicable('a ResNet has no position embedding of patches')
    block = model.fields
    if block.position == 'none':
        raise Inapplicable('model.position is none')
    if block.position == 'relative' and model.attention == 'axial':
        raise Inapplicable(
            'model.position is relative within rows and columns, of which pairs of '
            'patches in other rows and columns have none'
        )
    first, grid = model.prefix, model.grid(image_size)
    tokens = grid[0] * grid[1]
    module = Position(block.position, block.position_at, grid, block.num_heads, first)
    in_each = block.position_at == 'every_layer' and block.position != 'sincos_2d'
    found = (params['blocks'] if in_each else params).get('position', {})
    found = found if in_each else jax.tree.map(lambda x: x[None], found)
    count = len(jax.tree.leaves(found)[0]) if found else 1
    result = []
    for layer in range(count):
        own = jax.tree.map(operator.itemgetter(layer), found)
        table = np.asarray(
            module.apply({'params': own}, block.hidden_size, method='embedding'), np.float64
        )
        if block.position == 'relative':  # [offsets, heads, head_dim]
            table = table.reshape(len(table), -1)
            zero = len(table) // 2
            offsets = np.subtract.outer(np.arange(tokens), np.arange(tokens)).T + zero
            result.append((_unit(table) @ _unit(table)[zero])[offsets])
        else:
            unit = _unit(table[0, first:])
            result.append(unit @ unit.T)
    return np.stack(result).reshape(-1, *grid, *grid).astype(np.float32)


def _unit(vectors):
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
