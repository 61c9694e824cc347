"""The teacher of distillation, whose logits a model learns (arXiv 2106.05237)."""

import dataclasses
import logging
import zlib
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.weights import adapt, description
from vit_jax.weights.model import flatten

log = logging.getLogger(__name__)

# Fields of a model that change its logits but no shape of its parameters.
_NOT_IN_SHAPES = ('num_heads', 'gelu', 'layer_norm_epsilon')


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher and the preprocessing of its images.

    Attributes:
      model: the Flax module.
      fields: the fields of the model.
      params: float32 on the host, or jax.ShapeDtypeStruct.
      checksum: the checksum of the parameters and everything else that decides the logits.
      image_size: (height, width) of the teacher's images.
      scale: [3]. The student's images times `scale` plus `offset` have the teacher's normalisation.
      offset: [3], see `scale`.
      temperature: the temperature of the distillation.
      share: the weight of the distillation in the loss; the labels have the weight 1 - share.
    """

    model: nn.Module
    fields: dict
    params: PyTree
    checksum: int
    image_size: tuple[int, int]
    scale: np.ndarray
    offset: np.ndarray
    temperature: float
    share: float

    def logits(
        self, params: PyTree, images: Float[Array, 'batch height width 3']
    ) -> Float[Array, 'batch classes']:
        """The logits for the student's images, mixed or not, without dropout.

        The images are normalised and resized for the teacher. Resizing is linear, with antialiasing
        where images become smaller.
        """
        size = len(images), *self.image_size, 3
        images = jax.image.resize(images * self.scale + self.offset, size, 'linear')
        return self.model.apply({'params': params}, images)  # type: ignore[return-value]  # a tuple only if mutable


def load(config: ConfigDict, class_names: Sequence[str] | None = None) -> Teacher | None:
    """Loads the teacher of a config, which computes in the student's dtype; None without one.

    Args:
      config: a checked config.
      class_names: the class names of the data; None if only `config.dataset.num_classes` is known.

    Raises:
      UserError: if the weights cannot be read, have other classes or independent classes (loss
        sigmoid), do not fit the image size, differ from `config.teacher.checksum`, or differ
        between processes.
    """
    section = config.teacher
    if not section.weights:
        return None
    loaded = _load_weights(section.weights)
    _check_classes(loaded, config, class_names)
    scale, offset = _normalisation(loaded, config.preprocess)
    size = _image_size(loaded, config)
    model = models.build(loaded.model, loaded.num_classes, dtype=config.model.dtype)
    params = _fitted_params(loaded, model, size, config.transfer.position_resize)
    checksum = _checksum(
        params,
        size,
        scale.tolist(),
        offset.tolist(),
        *(loaded.model.get(field) for field in _NOT_IN_SHAPES),
    )
    consensus.check_equal('the teacher', {'checksum': checksum})
    if section.checksum not in (0, checksum):
        raise UserError(
            f'teacher.checksum is {section.checksum}, and {loaded.source} has the checksum '
            f'{checksum}: use the weights with the first checksum, or leave teacher.checksum out.',
            kind='value',
            field='teacher.checksum',
            value=section.checksum,
        )
    log.info(
        'teacher: %s (%s layout) with images of %dx%d; images of the student: %dx%d',
        loaded.source,
        loaded.layout,
        *size,
        *config.image_size,
    )
    return Teacher(
        model=model,
        fields=loaded.model,
        params=params,
        checksum=checksum,
        image_size=size,
        scale=scale,
        offset=offset,
        temperature=section.temperature,
        share=section.share,
    )


def _load_weights(path):
    """The weights of a teacher."""
    try:
        loaded = weights.load(path)
        description.check_rgb(loaded)
    except UserError as error:
        raise UserError(
            f'teacher.weights: {error}',
            kind=error.kind,
            field='teacher.weights',
            file=error.file,
            value=path,
        ) from error
    return loaded


def _check_classes(loaded, config, class_names):
    """Raises UserError if the teacher's classes differ from the data's, or are independent."""
    if class_names is None:
        loaded = dataclasses.replace(loaded, classes=None)
    names = class_names or [str(k) for k in range(config.dataset.num_classes)]
    description.check_classes(loaded, names, 'the data')
    if loaded.loss == 'sigmoid':
        raise UserError(
            f'the teacher {loaded.source} was trained with the loss sigmoid, whose '
            'classes are independent, and distillation compares probabilities that sum '
            'to one: fine-tune it with loss.name=softmax first.',
            kind='value',
            field='teacher.weights',
            value=config.teacher.weights,
        )


def _normalisation(loaded, preprocess):
    """Returns (scale, offset) of a Teacher."""
    stated = loaded.preprocess or {}
    missing = [name for name in ('mean', 'std') if not stated.get(name)]
    if missing:
        log.warning(
            "the teacher %s does not state %s of its images: the student's are used. "
            'vit_jax.convert --preprocess FIELD=VALUE writes others into the weights.',
            loaded.source,
            ' and '.join(missing),
        )
    mean = np.float64(stated.get('mean') or preprocess['mean'])
    std = np.float64(stated.get('std') or preprocess['std'])
    scale = np.float32(preprocess.std / std)
    offset = np.float32((preprocess.mean - mean) / std)
    return scale, offset


def _image_size(loaded, config):
    """The image size of the config, else of the weights, else of the student."""
    if config.teacher.image_size:
        return tuple(config.teacher.image_size)
    states_size = loaded.grid() or (loaded.preprocess or {}).get('image_size')
    if states_size:
        return tuple(loaded.image_size())
    return tuple(config.image_size)


def _fitted_params(loaded, model, size, position_resize):
    """The parameters in float32, with position embeddings for images of `size`."""
    try:
        grid = model.grid(size)
        description.log_assumed_grid(
            loaded,
            grid,
            'write weights that state it by vit_jax.convert --preprocess image_size=HEIGHT,WIDTH',
        )
        image = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
        body, _ = adapt.adapt(
            loaded.params,
            jax.eval_shape(model.init, jax.random.key(0), image)['params'],
            grid=grid,
            source_grid=loaded.grid(),
            resize=position_resize,
        )
        head = {name: loaded.params[name] for name in adapt.HEAD if name in loaded.params}
        return body | jax.tree.map(lambda x: np.asarray(x, np.float32), head)
    except UserError as error:
        raise UserError(
            f'the teacher {loaded.source} cannot use images of {size[0]}x{size[1]} '
            f'(teacher.image_size): {error}',
            kind=error.kind,
            field='teacher.image_size',
            value=size,
        ) from error


def _checksum(params, *others):
    """A checksum of all arrays and of other values, 31 bits."""
    checksum = zlib.crc32(repr(others).encode())
    for _, x in sorted(flatten(params).items()):
        checksum = zlib.crc32(np.ascontiguousarray(x), checksum)
    return checksum % 2**31
