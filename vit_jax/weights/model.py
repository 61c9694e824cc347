"""Weights with all that belongs to them, and the model that fits their sizes."""

import dataclasses
import math
from collections.abc import Mapping

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import resnet, variants
from vit_jax.models.vit import as_pair
from vit_jax.weights import limits


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters, the model they are for, and how its images are prepared.

    `preprocess` is what the source states of image_size (height, width) and the other fields of
    config.preprocess, None if it states nothing. `loss` is 'softmax', for classes of which each
    image has one, or 'sigmoid', for classes that are independent; None if it is not stated.
    """

    # Nested, NumPy arrays, as model.init gives them; dtypes as in the source.
    params: dict = dataclasses.field(repr=False)
    model: dict  # all fields, for models.build(model, num_classes)
    num_classes: int  # outputs of the head, 0 for none
    # Their names, None if the source does not state them.
    classes: list[str] | None = dataclasses.field(repr=False)
    preprocess: dict | None
    layout: str  # a key of LAYOUTS, or 'workdir'
    source: str
    loss: str | None = None

    def float32_params(self) -> dict:
        """The parameters as float32, whatever the source has."""
        return jax.tree.map(lambda x: np.asarray(x, np.float32), self.params)

    def grid(self) -> tuple[int, int] | None:
        """(rows, columns) of patches that the learned_1d or relative embedding was made for.

        From `preprocess` if that fits, otherwise a square. None if there is no such embedding, or
        its patches do not form a square and the source does not state the grid.
        """
        patches, stated = _patches(flatten(self.params), self.model), self.stated_grid()
        if stated and math.prod(stated) == patches:
            return stated
        side = math.isqrt(patches)
        return (side, side) if patches and side * side == patches else None

    def image_size(self) -> tuple[int, int]:
        """(height, width) of the images that the model expects, 224x224 if it accepts any.

        Raises UserError if the position embeddings do not form a square and no size is stated.
        """
        grid = self.grid()
        patches = _patches(flatten(self.params), self.model)
        if not patches or (grid and grid == self.stated_grid()):
            return as_pair((self.preprocess or {}).get('image_size') or 224)
        if grid is None:
            raise UserError(
                f'{self.source} has position embeddings of {patches} patches, which do '
                'not form a square: add --preprocess image_size=HEIGHT,WIDTH of images '
                'that have as many.'
            )
        rows, columns = grid
        height, width = patch_in_pixels(self.model)
        return rows * height, columns * width

    def stated_grid(self) -> tuple[int, int] | None:
        """(rows, columns) of patches of the image_size in `preprocess`, None if it states none."""
        size = (self.preprocess or {}).get('image_size')
        try:
            return size and models.build(self.model, self.num_classes).grid(as_pair(size))
        except UserError:  # patches do not tile it: it is not the size of the model's images
            return None

    def channels(self) -> int:
        """Channels of the model's images."""
        return _channels(flatten(self.params))


def flatten(params: Mapping) -> dict[str, np.ndarray]:
    """{'blocks/norm1/scale': array, ...} of nested parameters."""
    return flax.traverse_util.flatten_dict(params, sep='/')


def describe(flat: Mapping[str, np.ndarray], stated: Mapping) -> tuple[dict, int]:
    """All fields of the model that has such parameters, and its number of classes.

    `flat` is from table.parameters, one name per layer. `stated` are fields that arrays do not
    show, such as gelu, epsilons and, in 'resnet', those of the ResNet; num_heads if the source
    states it, otherwise see guess_heads.
    """
    stated, fields = dict(stated), {}
    formulas = stated.pop('resnet', {})
    if 'resnet/root_conv/kernel' in flat:
        stages = _count(flat, 'resnet/', 'stages', limits.STAGES)
        units = [_count(flat, f'resnet/{s}/', f'units of stage {s}') for s in range(stages)]
        hybrid = 'resnet/root_norm/scale' in flat
        fields['resnet'] = (variants.hybrid_resnet if hybrid else variants.bit_resnet)(
            tuple(units), _get(flat, 'resnet/root_conv/kernel', 4).shape[-1]
        ) | formulas
    num_classes, representation_size = (
        len(_get(flat, name, 1)) if name in flat else 0 for name in ('head/bias', 'pre_logits/bias')
    )
    if 'embedding/kernel' not in flat:
        return with_defaults(fields), num_classes
    kernel = _get(flat, 'embedding/kernel', 4)
    fields |= dict(
        patch_size=kernel.shape[:2],
        hidden_size=len(_get(flat, 'norm/scale', 1)),
        num_layers=_count(flat, 'blocks/', 'layers'),
        mlp_dim=len(_get(flat, 'blocks/0/mlp/dense1/bias', 1)),
        pool='cls' if 'cls' in flat else 'map' if 'pool/probe' in flat else 'gap',
        num_registers=_get(flat, 'registers', 3).shape[1] if 'registers' in flat else 0,
        stem_norm='stem_norm/scale' in flat,
        position='learned_1d' if 'position/embedding' in flat else 'none',
        representation_size=representation_size,
        layer_scale_init=1e-5 if 'blocks/0/scale1' in flat else 0.0,
    )
    query = flat.get('blocks/0/attention/query/kernel')
    fields['num_heads'] = guess_heads(fields) if query is None or query.ndim < 3 else query.shape[1]
    return with_defaults(fields | stated), num_classes


def with_defaults(fields: Mapping) -> dict:
    """All fields of a model, from its sizes and those that differ from the defaults."""
    # Without training's kernels and loops: another machine may lack them, or compile for minutes.
    return models.fields('b16' if 'hidden_size' in fields else 'r50x1') | {
        name: value for name, value in fields.items() if name not in models.PER_MACHINE
    }


def _get(flat, name, ndim):
    if name not in flat or flat[name].ndim != ndim:
        found = f'has shape {flat[name].shape}' if name in flat else 'is missing'
        raise UserError(f'the array for {name}, which tells the size of the model, {found}.')
    return flat[name]


# Heads of further released models by hidden_size, num_layers and mlp_dim (timm 1.0.31).
_HEADS = {
    (64, 6, 192): 2,
    (64, 8, 192): 2,
    (256, 10, 1024): 4,
    (256, 14, 1280): 4,
    (320, 14, 1792): 5,
    (384, 36, 1536): 6,
    (512, 12, 2048): 8,
    (512, 20, 2048): 8,
    (640, 12, 2560): 10,
    (896, 12, 3584): 14,
    (896, 18, 2304): 14,
    (1536, 40, 6144): 16,
    **{numbers[:3]: numbers[3] for numbers in variants.SIZES.values()},
}


def guess_heads(model: Mapping) -> int:
    """Heads of the published size, otherwise one per 64 features: linear layers hide them."""
    return _HEADS.get(sizes(model), max(1, model['hidden_size'] // 64))


def heads_are_published(model: Mapping, num_classes: int) -> bool:
    """Whether all released models of these sizes have as many heads as guess_heads says."""
    # timm's vit_base_patch16_gap_224 has 16 heads; SigLIP's, with 12, have no head of classes.
    unclear = (
        (model['pool'], model['num_registers'], *model['patch_size']) == ('gap', 0, 16, 16)
        and sizes(model) == (768, 12, 3072)
        and num_classes
    )
    return sizes(model) in _HEADS and not unclear


def sizes(model: Mapping) -> tuple[int, int, int]:
    """hidden_size, num_layers and mlp_dim of a transformer."""
    return tuple(model[name] for name in ('hidden_size', 'num_layers', 'mlp_dim'))


def templates(
    model: Mapping, num_classes: int, flat: Mapping[str, np.ndarray], preprocess: Mapping | None
) -> dict[str, np.ndarray]:
    """Every parameter by flat name, layers stacked, as zeros of its shape that take no memory.

    The image size is that of the learned_1d or relative position embedding in `flat`; without one,
    it is that of `preprocess`.
    """
    module = models.build(model, num_classes, unroll=1)  # which changes no shape
    _check_sizes({**model, 'num_classes': num_classes}, flat)
    image_size = (preprocess or {}).get('image_size')
    if patches := _patches(flat, model):
        height, width = patch_in_pixels(model)
        image_size = height, width * patches  # one row: any grid will do
    elif not image_size or model.get('position') == 'sincos_2d':  # whose table takes memory
        image_size = [32 * p for p in as_pair(model.get('patch_size', 1))]
    elif 'patch_size' in model:
        limits.check_count(
            'patches in an image',
            math.prod(image_size) // math.prod(patch_in_pixels(model)),
            limits.PATCHES,
        )
    images = jax.ShapeDtypeStruct((1, *image_size, _channels(flat)), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    return {name: np.broadcast_to(np.int8(0), x.shape) for name, x in flatten(params).items()}


def _check_sizes(fields, flat):
    """Raises UserError for sizes without an array of this size, before arrays are made of them."""
    longest = max((n for x in flat.values() for n in x.shape), default=0)
    for name, value in fields.items():
        if name == 'resnet' and value:
            _check_sizes(value, flat)
            continue
        for size in value if isinstance(value, tuple | list) else [value]:
            if type(size) is int and size > longest:
                raise UserError(
                    f'{name} is {size}, but the longest axis of any array has {longest}'
                    ': the fields belong to other arrays.'
                )
    for count in (fields.get('num_layers', 0), *fields.get('units', ())):
        limits.check_count('layers', count)


def patch_in_pixels(model: Mapping) -> tuple[int, int]:
    """(height, width) of what becomes a token, in pixels: of a hybrid, with its ResNet's stride."""
    stride = resnet.stride(len(model['resnet']['units'])) if model['resnet'] else 1
    height, width = as_pair(model['patch_size'])
    return height * stride, width * stride


def _channels(flat):
    name = 'resnet/root_conv/kernel'
    return _get(flat, name if name in flat else 'embedding/kernel', 4).shape[-2]


def _patches(flat, model):
    """The number of patches of a learned_1d or relative position embedding, 0 if there is none."""
    leaf = {'learned_1d': 'embedding', 'relative': 'relative'}.get(model.get('position'))
    for name in (f'position/{leaf}', f'blocks/position/{leaf}'):  # once, or in every layer
        if name in flat and flat[name].ndim > 1:
            shape = flat[name].shape
            tokens = shape[-2] if leaf == 'embedding' else (shape[-3:][0] + 1) // 2
            return max(0, tokens - (model['pool'] == 'cls') - model['num_registers'])
    return 0


def _count(flat, prefix, what, most=limits.LAYERS):
    numbers = {name[len(prefix) :].split('/')[0] for name in flat if name.startswith(prefix)}
    count = 1 + max((int(n) for n in numbers if n.isascii() and n.isdecimal()), default=-1)
    limits.check_count(what, count, most)
    return count
