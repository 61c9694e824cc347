"""Fits pre-trained parameters to a model: a new head, another image size, other patches."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import scipy.ndimage
from flax import traverse_util
from jaxtyping import Array, Float

from vit_jax.errors import UserError

HEAD = ('head', 'pre_logits')  # the whole pre-training head is removed (ViT section 3.2)


class Change(NamedTuple):
    """What became of one parameter: 'loaded', 'resized', 'dropped' or 'initialised'."""

    name: str
    action: str
    shape: tuple[int, ...]
    was: tuple[int, ...] | None = None


def adapt(params: Mapping, target: Mapping, *, grid: tuple[int, int],
          source_grid: tuple[int, int] | None = None, resize: str = 'bilinear',
          resize_patches: bool = False, keep_head: bool = False) -> tuple[dict, list[Change]]:
    """Pre-trained parameters in the shapes of a model.

    Args:
      params: pre-trained arrays, nested, encoder blocks stacked.
      target: the model's parameters, arrays or jax.ShapeDtypeStruct.
      grid: (rows, columns) of patches of the model's images.
      source_grid: likewise of the pre-training; None: not known, or no matter.
      resize: of position embeddings, see resize_grid.
      resize_patches: also fit the embedding's kernel to another patch size, see resize_kernel.
      keep_head: the model is used as it is; else its head is left out of the result.

    Returns:
      float32 parameters of all of `target` but a head to be trained, and what became of each.

    Raises:
      UserError: a parameter is missing, is unknown, or has a shape that cannot be made to fit.
    """
    ours, theirs = (traverse_util.flatten_dict(dict(tree), sep='/') for tree in (target, params))
    result, changes = {}, []
    if not keep_head:
        ours, head = _split_head(ours)
        theirs, old_head = _split_head(theirs)
        changes += [Change(name, 'initialised', x.shape) for name, x in head.items()]
        changes += [Change(name, 'dropped', x.shape) for name, x in old_head.items()]
    _check_names(ours, theirs)
    class_tokens = int('cls' in ours)
    for name, x in ours.items():
        array, action = np.asarray(theirs[name], np.float32), 'loaded'
        *_, module, leaf = ('', *name.split('/'))
        turned = (module, leaf) == ('position', 'embedding') and source_grid not in (None, grid)
        if turned or array.shape != x.shape:  # 4x4 and 2x8 patches have the same shape
            action = 'resized'
            if (module, leaf) == ('position', 'embedding'):
                array = _resize_position(array, grid, source_grid, class_tokens, resize, name)
            elif module == 'position' and leaf in ('row', 'column'):
                array = resize_grid(array, x.shape[-3:-1], resize)
            elif name == 'embedding/kernel' and resize_patches and _same_ends(array, x, 2):
                array = resize_kernel(array, x.shape[:2])
        if array.shape != x.shape:
            hint = (' or set transfer.resize_patches=True' if name == 'embedding/kernel' else '')
            raise UserError(f'{name} has shape {theirs[name].shape} in the pre-trained weights and '
                            f'{tuple(x.shape)} in the model. Choose the model that the weights are '
                            f'of{hint}.')
        result[name] = array
        changes.append(Change(name, action, x.shape, theirs[name].shape))
    return traverse_util.unflatten_dict(result, sep='/'), changes


def resize_grid(embedding: Float[np.ndarray, '... rows columns hidden'], grid: tuple[int, int],
                method: str) -> Float[np.ndarray, '... new_rows new_columns hidden']:
    """Position embeddings interpolated in two dimensions to `grid` (ViT section 3.2).

    Args:
      method: 'bilinear' with the corners aligned, as in the paper's code, or 'bicubic' with
        antialiasing, as in timm.
    """
    old = embedding.shape[-3:-1]
    if method == 'bilinear':
        factors = (*(1,) * (embedding.ndim - 3), grid[0] / old[0], grid[1] / old[1], 1)
        return scipy.ndimage.zoom(embedding, factors, order=1)
    shape = (*embedding.shape[:-3], *grid, embedding.shape[-1])
    return np.asarray(jax.image.resize(embedding, shape, 'bicubic'))


def resize_kernel(kernel: Float[np.ndarray, 'height width channels hidden'],
                  patch: tuple[int, int]) -> Float[Array, 'new_height new_width channels hidden']:
    """The patch embedding for patches of another size (FlexiViT, arXiv 2212.08013, equation 4).

    Pseudo-inverse of the bilinear resize of patches: embedding a patch that was resized with the
    new kernel gives what the old kernel gives for the patch itself, when patches grow.
    """
    old = kernel.shape[:2]
    basis = np.eye(old[0] * old[1], dtype=np.float32).reshape(*old, -1)
    resized = jax.image.resize(basis, (*patch, old[0] * old[1]), 'bilinear', antialias=False)
    matrix = np.asarray(resized, np.float64).reshape(patch[0] * patch[1], -1)  # new pixels of old
    flat = kernel.reshape(old[0] * old[1], -1)
    new = np.linalg.pinv(matrix.T) @ flat
    return new.reshape(*patch, *kernel.shape[2:]).astype(np.float32)


def table(changes: list[Change]) -> str:
    """The changes as text: one line for each parameter that was not simply loaded, and a count."""
    lines = [f'  {c.action:<12} {c.name:<32} {c.shape}'
             + (f', was {c.was}' if c.action == 'resized' else '')
             for c in changes if c.action != 'loaded']
    loaded = [c for c in changes if c.action == 'loaded']
    numbers = sum(int(np.prod(c.shape)) for c in loaded)
    return '\n'.join([f'  {"loaded":<12} {len(loaded)} arrays, {numbers:,} numbers', *lines])


def _resize_position(array, grid, source_grid, class_tokens, method, name):
    """Of all tokens, class token first; of one layer or stacked."""
    if source_grid is None:
        raise UserError(f'{name} has {array.shape[-2] - class_tokens} patches in the pre-trained '
                        'weights, which are no square, and nothing says for which image size they '
                        f'are: they fit only as many patches, and the images here have {grid[0]}x'
                        f'{grid[1]}. Choose another image_size, or weights that say it.')
    prefix, patches = array[..., :class_tokens, :], array[..., class_tokens:, :]
    patches = patches.reshape(*array.shape[:-2], *source_grid, array.shape[-1])
    resized = resize_grid(patches, grid, method)
    return np.concatenate([prefix, resized.reshape(*array.shape[:-2], -1, array.shape[-1])], -2)


def _split_head(flat):
    head = {name: x for name, x in flat.items() if name.split('/')[0] in HEAD}
    return {name: x for name, x in flat.items() if name not in head}, head


def _check_names(ours, theirs):
    different = sorted(ours.keys() ^ theirs.keys())
    if different:
        lines = [f'  {name}: ' + (f'only in the model, {tuple(ours[name].shape)}' if name in ours
                                  else f'only in the weights, {theirs[name].shape}')
                 for name in different]
        more = f'\n  and {len(lines) - 12} more' if len(lines) > 12 else ''
        raise UserError('the pre-trained weights are of another architecture than the model:\n'
                        + '\n'.join(lines[:12]) + more)


def _same_ends(array, x, count):
    return array.ndim == len(x.shape) and array.shape[-count:] == tuple(x.shape[-count:])
