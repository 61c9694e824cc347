"""Starts a run from pre-trained weights: config fields that the weights decide, and parameters."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import traverse_util
from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import models, weights
from vit_jax.errors import UserError, nearest_names
from vit_jax.models import variants
from vit_jax.processes import consensus
from vit_jax.weights import adapt, description

log = logging.getLogger(__name__)

# Fields that must be equal in weights and config. The shapes of arrays do not always determine
# them.
_SAME = (
    'pool',
    'norm_after_pool',
    'position',
    'position_at',
    'attention',
    'block',
    'num_registers',
    'stem_norm',
)
FROM_WEIGHTS = ('model', 'preprocess')  # sections of a config with fields that weights may decide


def take_fields(
    config: ConfigDict, begun: Mapping | None
) -> tuple[dict[str, Any], weights.Weights | None]:
    """Reads the values of `transfer.take` from the weights, or from a resumed run.

    Args:
      config: the config from the file and the command line.
      begun: the recorded config of a run that resumes and keeps its values; None for a new run.

    Returns:
      The values by dotted field, and the weights. The weights are None if the config names none or
      the run resumes.

    Raises:
      UserError: if the weights cannot be read, or `transfer.take` names a field that does not
        exist.
    """
    take = config.transfer.take
    if not config.pretrained:
        if take:
            raise UserError(
                'this recipe starts from pre-trained weights: add '
                '--config.pretrained=WEIGHTS, a file, a directory, a workdir, '
                'hf:ORGANISATION/NAME, timm:NAME or gs://BUCKET/FILE.',
                kind='missing',
                field='pretrained',
            )
        return {}, None
    fields = config_lib.flatten(config)
    _check_taken_names(take, fields)
    if begun:
        return _taken(take, fields, begun), None
    try:
        loaded = _load(config)
    except UserError as error:
        raise UserError(
            f'pretrained: {error}',
            kind=error.kind,
            field='pretrained',
            file=error.file,
            value=config.pretrained,
        ) from error
    stated = {'model': loaded.model, 'preprocess': loaded.preprocess or {}}
    taken = _taken(take, fields, stated)
    for field, value in taken.items():
        if value != fields[field]:
            log.info(
                '%s is %r from the weights, instead of %r: to keep yours, leave it out of '
                'transfer.take',
                field,
                value,
                fields[field],
            )
    return taken, loaded


def _check_taken_names(take, fields):
    """Raises UserError unless transfer.take names fields of the config that weights may decide."""
    for field in take:
        if field not in fields:
            raise UserError(
                f'transfer.take names {field!r}, which the config does not have. '
                f'{nearest_names(field, fields)}',
                kind='unknown',
                field='transfer.take',
                value=field,
            )
    for field in take:
        if field.partition('.')[0] not in FROM_WEIGHTS:
            raise UserError(
                f'transfer.take names {field!r}, which weights do not contain: expected fields of '
                f'{" and ".join(FROM_WEIGHTS)}, as in preprocess.mean.',
                kind='choice',
                field='transfer.take',
                value=field,
            )


def _load(config):
    """The weights that a run starts from."""
    loaded = weights.load(config.pretrained)
    description.check_rgb(loaded)
    if config.transfer.image_size:
        loaded = description.with_image_size(
            loaded, config.transfer.image_size, 'transfer.image_size'
        )
    return loaded


def _taken(take, fields, stated):
    """The values of the fields in `take`, as the weights or the config of a run state them."""
    stated = config_lib.flatten(stated)
    taken = {}
    for field in take:
        value = stated.get(field)
        if value is None:
            log.info('the weights do not state %s: it stays %s', field, fields[field])
        elif isinstance(value, list):
            taken[field] = tuple(value)
        else:
            taken[field] = value
    return taken


def absolute_paths(address: str, teacher: str, recorded_path: str = '') -> dict[str, str]:
    """The absolute paths of weights, by dotted field, for fields with a path on this machine.

    A resumed run keeps the path that it started from as long as this path exists.

    Args:
      address: `config.pretrained`.
      teacher: `config.teacher.weights`.
      recorded_path: `config.pretrained` of a run that resumes; '' for a new run.
    """
    paths = {}
    if _is_local(address):
        paths['pretrained'] = os.path.abspath(address)
    if _is_local(teacher):
        paths['teacher.weights'] = os.path.abspath(teacher)
    if (
        os.path.isabs(recorded_path)
        and os.path.exists(recorded_path)
        and config_lib.may_have_moved(recorded_path, address)
    ):
        paths['pretrained'] = recorded_path
    return paths


def _is_local(address):
    """Whether weights are a path on this machine, and not the name of a model on a hub."""
    return os.path.exists(address) and not re.match(r'(hf|timm):|\w+://', address)


def initial_params(
    loaded: weights.Weights, config: ConfigDict, target: PyTree, class_names: Sequence[str]
) -> PyTree:
    """The weights as parameters of the model; logs a line for each array.

    The head stays if `transfer.keep_head` is set; otherwise the result is without a head.

    Args:
      loaded: the weights.
      config: the config of the run.
      target: the parameters of the model, or their shapes.
      class_names: of the data, which a head that stays must have.

    Raises:
      UserError: if the weights are for another model.
    """
    if config.transfer.keep_head:
        description.check_classes(loaded, class_names, config.dataset.name)
    grid = models.build(config.model, 1).grid(config.image_size)
    _check_fields(loaded, config)
    source_grid = loaded.grid()
    description.log_assumed_grid(
        loaded, grid, 'set transfer.image_size=HEIGHT,WIDTH to the image size of the weights'
    )
    try:
        params, changes = adapt.adapt(
            loaded.params,
            target,
            grid=grid,
            source_grid=source_grid,
            resize=config.transfer.position_resize,
            resize_patches=config.transfer.resize_patches,
            keep_head=config.transfer.keep_head,
        )
    except UserError as error:
        name = variants.name_of(loaded.model)
        if name in (None, variants.name_of(config.model)):
            raise
        raise UserError(
            f'{error}\nThe weights look like {name}: choose that model, as in '
            f'--config=configs/finetune.py:{name},DATASET.',
            kind=error.kind,
            field='pretrained',
            file=error.file,
            value=config.pretrained,
        ) from error
    # Each process reads the weights and places a part of them, so all must read the same weights.
    consensus.check_equal_arrays('the pre-trained weights', params)
    log.info(
        'pre-trained weights from %s (%s layout):\n%s',
        loaded.source,
        loaded.layout,
        adapt.table(changes),
    )
    return params


def place_params(params: PyTree, loaded: PyTree) -> PyTree:
    """Replaces arrays of `params` by the arrays in `loaded`, with the same shardings.

    Args:
      params: parameters on the devices.
      loaded: arrays on the host, whole on every process. Some arrays of `params` may be missing.
    """
    arrays = traverse_util.flatten_dict(params)
    for path, x in traverse_util.flatten_dict(loaded).items():
        arrays[path] = jax.make_array_from_callback(x.shape, arrays[path].sharding, x.__getitem__)
    return traverse_util.unflatten_dict(arrays)


def _check_fields(loaded, config):
    """Raises UserError if the weights have another architecture than the config."""
    model = config.model
    if ('hidden_size' in loaded.model) != ('hidden_size' in model):
        return  # a ResNet and a transformer: adapt reports that their parameters differ
    different = [name for name in _SAME if loaded.model.get(name) != model.get(name)]
    if bool(loaded.model.get('layer_scale_init')) != bool(model.get('layer_scale_init')):
        different.append('layer_scale_init')
    if not different:
        return
    options = [f'--config.model.{name}={loaded.model[name]}' for name in different]
    advice = f'Add {" ".join(options)}'
    if 'pool' in different and config.masked.target != 'none':
        advice = (
            'Masked patch prediction needs a model that averages tokens: start from weights of '
            'such a model, or from none'
        )
    differences = [
        f'model.{name} is {loaded.model[name]!r} there and {model[name]!r} in the config'
        for name in different
    ]
    raise UserError(
        f'the pre-trained weights from {loaded.source} are of another model: '
        f'{", ".join(differences)}. {advice}.',
        kind='value',
        field=f'model.{different[0]}',
        value=model[different[0]],
    )
