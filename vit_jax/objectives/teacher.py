"""A teacher, whose logits are the targets of training: distillation (arXiv 2106.05237)."""

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

# Fields of a model that change its logits and no shape of its parameters.
_NOT_SHOWN = ('num_heads', 'gelu', 'layer_norm_epsilon')


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher, and how it sees the images of the student."""

    model: nn.Module
    fields: dict  # of the model
    params: PyTree  # float32 on the host, or jax.ShapeDtypeStruct
    checksum: int  # of its parameters, and of what else decides its logits
    image_size: tuple[int, int]  # (height, width) of the images that it sees
    scale: np.ndarray  # [3]; the student's images x scale + offset are normalised as its own
    offset: np.ndarray
    temperature: float
    share: float  # of the distillation in the loss

    def logits(
        self, params: PyTree, images: Float[Array, 'batch height width 3']
    ) -> Float[Array, 'batch classes']:
        """Of the student's view, mixed or not, normalised and resized as the teacher's images.

        Nothing is dropped. Interpolation is linear, antialiased where the view becomes smaller.
        """
        size = len(images), *self.image_size, 3
        images = jax.image.resize(images * self.scale + self.offset, size, 'linear')
        return self.model.apply({'params': params}, images)  # type: ignore[return-value]  # a tuple only if mutable


def load(config: ConfigDict, class_names: Sequence[str] | None = None) -> Teacher | None:
    """The teacher of a checked config, None without one.

    It computes in the student's dtype. `class_names` are those of the data; without them their
    number is `config.dataset.num_classes`. Raises UserError when the weights cannot be read, have
    other classes or independent ones (loss sigmoid), or cannot see images of the size; or are not
    those of `config.teacher.checksum`, or not the same for all processes.
    """
    given = config.teacher
    if not given.weights:
        return None
    try:
        loaded = weights.load(given.weights)
        description.check_rgb(loaded)
    except UserError as error:
        raise UserError(f'teacher.weights: {error}') from error
    if class_names is None:
        loaded = dataclasses.replace(loaded, classes=None)
    names = class_names or [str(k) for k in range(config.dataset.num_classes)]
    description.check_classes(loaded, names, 'the data')
    if loaded.loss == 'sigmoid':
        raise UserError(
            f'the teacher {loaded.source} was trained with the loss sigmoid, for which '
            'classes are independent, and distillation compares probabilities that sum '
            'to one: fine-tune it with loss.name=softmax first.'
        )
    scale, offset = _normalisation(loaded, config.preprocess)
    size = _image_size(loaded, config)
    model = models.build(loaded.model, loaded.num_classes, dtype=config.model.dtype)
    try:
        description.log_assumed_grid(
            loaded,
            model.grid(size),
            'write weights that say it by vit_jax.convert --preprocess image_size=HEIGHT,WIDTH',
        )
        params = _fitted(loaded, model, size, config.transfer.position_resize)
    except UserError as error:
        raise UserError(
            f'the teacher {loaded.source} cannot see images of {size[0]}x{size[1]} '
            f'(teacher.image_size): {error}'
        ) from error
    checksum = _checksum(
        params,
        size,
        scale.tolist(),
        offset.tolist(),
        *(loaded.model.get(field) for field in _NOT_SHOWN),
    )
    consensus.check_equal('the teacher', {'checksum': checksum})
    if given.checksum not in (0, checksum):
        raise UserError(
            f'teacher.checksum is {given.checksum} and that of {loaded.source} is '
            f'{checksum}: name the weights with that checksum, or leave it out.'
        )
    log.info(
        'teacher: %s (%s layout), which sees images of %dx%d, the student of %dx%d',
        loaded.source,
        loaded.layout,
        *size,
        *config.image_size,
    )
    return Teacher(
        model, loaded.model, params, checksum, size, scale, offset, given.temperature, given.share
    )


def _normalisation(loaded, preprocess):
    """(scale, offset) of a Teacher."""
    stated = loaded.preprocess or {}
    if missing := [name for name in ('mean', 'std') if not stated.get(name)]:
        log.warning(
            "the teacher %s does not say %s of its images: the student's are used. Others "
            'can be written into it by vit_jax.convert --preprocess FIELD=VALUE.',
            loaded.source,
            ' and '.join(missing),
        )
    mean, std = (np.float64(stated.get(name) or preprocess[name]) for name in ('mean', 'std'))
    return np.float32(preprocess.std / std), np.float32((preprocess.mean - mean) / std)


def _image_size(loaded, config):
    """That of the config, else that of the weights; the student's where they take any."""
    states = loaded.grid() or (loaded.preprocess or {}).get('image_size')
    return tuple(
        config.teacher.image_size or (loaded.image_size() if states else config.image_size)
    )


def _fitted(loaded, model, size, position_resize):
    """The parameters in float32, positions resized for images of `size`."""
    image = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    body, _ = adapt.adapt(
        loaded.params,
        jax.eval_shape(model.init, jax.random.key(0), image)['params'],
        grid=model.grid(size),
        source_grid=loaded.grid(),
        resize=position_resize,
    )
    head = {name: loaded.params[name] for name in adapt.HEAD if name in loaded.params}
    return body | jax.tree.map(lambda x: np.asarray(x, np.float32), head)


def _checksum(params, *others):
    """Of all numbers, 31 bits."""
    checksum = zlib.crc32(repr(others).encode())
    for _, x in sorted(flatten(params).items()):
        checksum = zlib.crc32(np.ascontiguousarray(x), checksum)
    return checksum % 2**31
