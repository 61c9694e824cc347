"""Weights with everything that belongs to them, and the model that fits their sizes."""

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
    """Parameters, their model, and the preparation of its images.

    Attributes:
      params: nested NumPy arrays, with the names and shapes of model.init, and with the dtypes of
        the source.
      model: all fields of the model, for models.build(model, num_classes).
      num_classes: number of outputs of the head; 0 without a head.
      classes: names of the classes; None if the source does not state them.
      preprocess: image_size (height, width) and the other fields of config.preprocess, as far as
        the source states them; None if it states none.
      layout: a key of LAYOUTS, or 'workdir'.
      source: the path, address or name that the weights were loaded from.
      loss: 'softmax' if each image has one class, 'sigmoid' if classes are independent; None if the
        source does not state it.
    """

    params: dict = dataclasses.field(repr=False)
    model: dict
    num_classes: int
    classes: list[str] | None = dataclasses.field(repr=False)
    preprocess: dict | None
    layout: str
    source: str
    loss: str | None = None

    def float32_params(self) -> dict:
        """The parameters as float32."""
        return jax.tree.map(lambda x: np.asarray(x, np.float32), self.params)

    def grid(self) -> tuple[int, int] | None:
        """(rows, columns) of patches that the learned_1d or relative embedding was made for.

        It is the grid of the image_size in `preprocess` if this grid has the right number of
        patches, otherwise a square. It is None if there is no such embedding, or if neither grid
        fits.
        """
        patches = _patches(flatten(self.params), self.model)
        stated = self.stated_grid()
        if stated and math.prod(stated) == patches:
            return stated
        side = math.isqrt(patches)
        if patches and side * side == patches:
            return side, side
        return None

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
                'that have as many.',
                kind='missing',
                field='image_size',
                file=self.source,
            )
        rows, columns = grid
        height, width = patch_in_pixels(self.model)
        return rows * height, columns * width

    def stated_grid(self) -> tuple[int, int] | None:
        """(rows, columns) of patches of the image_size in `preprocess`; None if none is stated."""
        size = (self.preprocess or {}).get('image_size')
        if not size:
            return None
        try:
            return models.build(self.model, self.num_classes).grid(as_pair(size))
        except UserError:  # patches do not tile it: the model has images of another size
            return None

    def channels(self) -> int:
        """Number of channels of the model's images."""
        return _channels(flatten(self.params))


def flatten(params: Mapping) -> dict[str, np.ndarray]:
    """Returns {'blocks/norm1/scale': array, ...} for nested parameters."""
    return flax.traverse_util.flatten_dict(params, sep='/')


def describe(flat: Mapping[str, np.ndarray], stated: Mapping) -> tuple[dict, int]:
    """Returns all fields of the model with these parameters, and its number of classes.

    Args:
      flat: parameters from table.parameters, one name per layer.
      stated: fields that arrays do not show, such as gelu, epsilons, num_heads (guess_heads if it
        is absent) and, under 'resnet', fields of the ResNet.
    """
    stated = dict(stated)
    resnet_fields = stated.pop('resnet', {})
    fields = {}
    if 'resnet/root_conv/kernel' in flat:
        fields['resnet'] = _describe_resnet(flat) | resnet_fields
    num_classes = _length(flat, 'head/bias')
    if 'embedding/kernel' in flat:
        fields |= _describe_transformer(flat) | stated
    return with_defaults(fields), num_classes


def _describe_resnet(flat):
    stages = _count(flat, 'resnet/', 'stages', limits.STAGES)
    units = [_count(flat, f'resnet/{s}/', f'units of stage {s}') for s in range(stages)]
    width = _get(flat, 'resnet/root_conv/kernel', 4).shape[-1]
    if 'resnet/root_norm/scale' in flat:
        return variants.hybrid_resnet(tuple(units), width)
    return variants.bit_resnet(tuple(units), width)


def _describe_transformer(flat):
    kernel = _get(flat, 'embedding/kernel', 4)
    fields = dict(
        patch_size=kernel.shape[:2],
        hidden_size=len(_get(flat, 'norm/scale', 1)),
        num_layers=_count(flat, 'blocks/', 'layers'),
        mlp_dim=len(_get(flat, 'blocks/0/mlp/dense1/bias', 1)),
        pool=_pool(flat),
        num_registers=_get(flat, 'registers', 3).shape[1] if 'registers' in flat else 0,
        stem_norm='stem_norm/scale' in flat,
        position='learned_1d' if 'position/embedding' in flat else 'none',
        representation_size=_length(flat, 'pre_logits/bias'),
        layer_scale_init=1e-5 if 'blocks/0/scale1' in flat else 0.0,
    )
    query = flat.get('blocks/0/attention/query/kernel')
    shows_heads = query is not None and query.ndim >= 3
    fields['num_heads'] = query.shape[1] if shows_heads else guess_heads(fields)
    return fields


def _pool(flat):
    if 'cls' in flat:
        return 'cls'
    if 'pool/probe' in flat:
        return 'map'
    return 'gap'


def _length(flat, name):
    """The length of an array with one axis, 0 if there is no such array."""
    if name not in flat:
        return 0
    return len(_get(flat, name, 1))


def with_defaults(fields: Mapping) -> dict:
    """All fields of a model, from its sizes and the fields that differ from the defaults.

    The fields in models.PER_MACHINE keep their defaults. Another machine may lack the kernels that
    the training used, or need minutes to compile an unrolled loop.
    """
    defaults = models.fields('b16' if 'hidden_size' in fields else 'r50x1')
    portable = {name: x for name, x in fields.items() if name not in models.PER_MACHINE}
    return defaults | portable


def _get(flat, name, ndim):
    """The array `name`; UserError if it is missing or does not have `ndim` axes."""
    if name not in flat:
        raise UserError(
            f'the array for {name}, which determines the size of the model, is missing.',
            kind='missing',
        )
    if flat[name].ndim != ndim:
        raise UserError(
            f'the array for {name}, which determines the size of the model, has shape '
            f'{flat[name].shape}: expected {ndim} axes.',
            kind='content',
        )
    return flat[name]


# Heads by (hidden_size, num_layers, mlp_dim): models/variants.py and further models of timm 1.0.31.
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
    """Number of heads of the published model of these sizes, otherwise one per 64 features.

    It is a guess, because the shapes of linear layers do not show the number of heads.
    """
    return _HEADS.get(sizes(model), max(1, model['hidden_size'] // 64))


def heads_are_published(model: Mapping, num_classes: int) -> bool:
    """Whether all released models of these sizes have as many heads as guess_heads returns."""
    if sizes(model) not in _HEADS:
        return False
    # timm's vit_base_patch16_gap_224 has 16 heads. SigLIP's models of the same sizes have 12 heads
    # and no classes.
    is_base_gap_16 = (
        sizes(model) == (768, 12, 3072)
        and model['pool'] == 'gap'
        and model['num_registers'] == 0
        and tuple(model['patch_size']) == (16, 16)
    )
    return not (is_base_gap_16 and num_classes)


def sizes(model: Mapping) -> tuple[int, int, int]:
    """hidden_size, num_layers and mlp_dim of a transformer."""
    return model['hidden_size'], model['num_layers'], model['mlp_dim']


def num_prefix_tokens(model: Mapping) -> int:
    """The number of tokens before the patches: the class token and registers."""
    if model['pool'] == 'cls':
        return 1 + model['num_registers']
    return model['num_registers']


def templates(
    model: Mapping, num_classes: int, flat: Mapping[str, np.ndarray], preprocess: Mapping | None
) -> dict[str, np.ndarray]:
    """Every parameter by flat name, layers stacked, as zeros that take no memory.

    The image size comes from the learned_1d or relative position embedding in `flat` or, without
    such an embedding, from `preprocess`.
    """
    module = models.build(model, num_classes, unroll=1)  # unroll changes no shape
    _check_sizes({**model, 'num_classes': num_classes}, flat)
    image_size = _template_image_size(model, flat, (preprocess or {}).get('image_size'))
    images = jax.ShapeDtypeStruct((1, *image_size, _channels(flat)), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    return {name: np.broadcast_to(np.int8(0), x.shape) for name, x in flatten(params).items()}


def _template_image_size(model, flat, stated):
    """(height, width) of images for which the parameters have the shapes in `flat`."""
    patches = _patches(flat, model)
    if patches:
        height, width = patch_in_pixels(model)
        return height, width * patches  # one row: the shape of the embedding does not show rows
    # Without an embedding the size does not matter. A large table of sincos_2d would take memory.
    if not stated or model.get('position') == 'sincos_2d':
        height, width = as_pair(model.get('patch_size', 1))
        return 32 * height, 32 * width
    if 'patch_size' in model:
        count = math.prod(stated) // math.prod(patch_in_pixels(model))
        limits.check_count('patches in an image', count, limits.PATCHES)
    return stated


def _check_sizes(fields, flat):
    """Raises UserError for a size that no array has, before arrays of this size are created."""
    longest = max((max(x.shape, default=0) for x in flat.values()), default=0)
    for name, value in fields.items():
        if name == 'resnet' and value:
            _check_sizes(value, flat)
            continue
        for size in value if isinstance(value, tuple | list) else [value]:
            if type(size) is int and size > longest:
                raise UserError(
                    f'{name} is {size}, but the longest axis of any array has {longest}'
                    ': the fields belong to other arrays.',
                    kind='content',
                    field=name,
                    value=value,
                )
    for count in (fields.get('num_layers', 0), *fields.get('units', ())):
        limits.check_count('layers', count)


def patch_in_pixels(model: Mapping) -> tuple[int, int]:
    """(height, width) in pixels of the part of an image that becomes a token.

    For a hybrid it is the patch times the stride of the ResNet.
    """
    height, width = as_pair(model['patch_size'])
    if not model['resnet']:
        return height, width
    stride = resnet.stride(len(model['resnet']['units']))
    return height * stride, width * stride


def _channels(flat):
    name = 'resnet/root_conv/kernel'
    if name not in flat:
        name = 'embedding/kernel'
    return _get(flat, name, 4).shape[-2]


def _patches(flat, model):
    """The number of patches of a learned_1d or relative position embedding; 0 without one."""
    leaf = {'learned_1d': 'embedding', 'relative': 'relative'}.get(model.get('position'))
    table = _position_table(flat, leaf)
    if table is None:
        return 0
    tokens = table.shape[-2]
    if leaf == 'relative':  # a row for each offset between two tokens, 2 * tokens - 1
        tokens = (table.shape[-3:][0] + 1) // 2
    return max(0, tokens - num_prefix_tokens(model))


def _position_table(flat, leaf):
    """The position embedding of the stem or of every layer; None if it has no axis of tokens."""
    for name in (f'position/{leaf}', f'blocks/position/{leaf}'):
        if name in flat and flat[name].ndim > 1:
            return flat[name]
    return None


def _count(flat, prefix, noun, most=limits.LAYERS):
    """One more than the largest number that follows the prefix in a name; 0 if there is none."""
    suffixes = {name[len(prefix) :].split('/')[0] for name in flat if name.startswith(prefix)}
    numbers = [int(suffix) for suffix in suffixes if suffix.isascii() and suffix.isdecimal()]
    count = 1 + max(numbers, default=-1)
    limits.check_count(noun, count, most)
    return count
