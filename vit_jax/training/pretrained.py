"""Starts a run from pre-trained weights: which config fields they decide, and the parameters."""

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

# What the shapes of arrays do not show, or not as clearly.
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
FROM_WEIGHTS = ('model', 'preprocess')  # the sections of a config that weights may decide


def take_fields(
    config: ConfigDict, begun: Mapping | None
) -> tuple[dict[str, Any], weights.Weights | None]:
    """Values by dotted field of `transfer.take`, and the weights from which a run begins.

    Without weights, or with `begun`, the config of a continued run, which keeps the values that it
    began with, none are loaded and None is returned for them. Raises UserError when the weights
    cannot be read, or fields of `transfer.take` do not exist.
    """
    take = config.transfer.take
    if not config.pretrained:
        if take:
            raise UserError(
                'this recipe starts from pre-trained weights: add '
                '--config.pretrained=WEIGHTS, a file, a directory, a workdir, '
                'hf:ORGANISATION/NAME, timm:NAME or gs://BUCKET/FILE.'
            )
        return {}, None
    given = config_lib.flatten(config)
    _check_taken_names(take, given)
    if begun:
        return _taken(take, given, begun), None
    try:
        loaded = _load(config)
    except UserError as error:
        raise UserError(f'pretrained: {error}') from error
    stated = {'model': loaded.model, 'preprocess': loaded.preprocess or {}}
    taken = _taken(take, given, stated)
    for field, value in taken.items():
        if value != given[field]:
            log.info(
                '%s is %r from the weights, instead of %r: to keep yours, leave it out of '
                'transfer.take',
                field,
                value,
                given[field],
            )
    return taken, loaded


def _check_taken_names(take, given):
    """Raises UserError unless transfer.take names fields of the config that weights may decide."""
    for field in take:
        if field not in given:
            raise UserError(
                f'transfer.take names {field!r}, which the config does not have. '
                f'{nearest_names(field, given)}'
            )
    for field in take:
        if field.partition('.')[0] not in FROM_WEIGHTS:
            raise UserError(
                f'transfer.take names {field!r}, which weights do not say: expected fields of '
                f'{" and ".join(FROM_WEIGHTS)}, as in preprocess.mean.'
            )


def _load(config):
    """The weights from which a run begins."""
    loaded = weights.load(config.pretrained)
    description.check_rgb(loaded)
    if config.transfer.image_size:
        loaded = description.with_image_size(
            loaded, config.transfer.image_size, 'transfer.image_size'
        )
    return loaded


def _taken(take, given, stated):
    """The values that weights, or the config of a run, state of the fields to take."""
    stated = config_lib.flatten(stated)
    taken = {}
    for field in take:
        value = stated.get(field)
        if value is None:
            log.info('the weights do not say %s: it stays %s', field, given[field])
        elif isinstance(value, list):
            taken[field] = tuple(value)
        else:
            taken[field] = value
    return taken


def absolute_paths(config: ConfigDict, recorded: Mapping | None) -> dict[str, str]:
    """Absolute paths of weights, by dotted field, where the config names files of this machine.

    A run that resumes keeps the path that it began from, while that is there.

    Args:
      config: checked.
      recorded: the config of a run that has begun, else None.
    """
    paths = {}
    for field, given in (
        ('pretrained', config.pretrained),
        ('teacher.weights', config.teacher.weights),
    ):
        if os.path.exists(given) and not re.match(r'(hf|timm):|\w+://', given):
            paths[field] = os.path.abspath(given)
    before = (recorded or {}).get('pretrained', '')
    is_there = os.path.isabs(before) and os.path.exists(before)
    if is_there and config_lib.may_have_moved(before, config.pretrained):
        paths['pretrained'] = before
    return paths


def initial_params(
    loaded: weights.Weights, config: ConfigDict, target: PyTree, class_names: Sequence[str]
) -> PyTree:
    """The weights as parameters of the model; logs what became of each.

    The head stays if `transfer.keep_head` says so; otherwise the result is without it.

    `target` are the model's parameters, or their shapes. Raises UserError for another model's.
    """
    if config.transfer.keep_head:
        description.check_classes(loaded, class_names, config.dataset.name)
    grid = models.build(config.model, 1).grid(config.image_size)
    _check_fields(loaded, config)
    source_grid = loaded.grid()
    description.log_assumed_grid(
        loaded, grid, 'set transfer.image_size=HEIGHT,WIDTH to the images that they are for'
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
            f'--config=configs/finetune.py:{name},DATASET.'
        ) from error
    # Each process has read its own, and places only a part of them.
    consensus.check_equal_arrays('the pre-trained weights', params)
    log.info(
        'pre-trained weights from %s (%s layout):\n%s',
        loaded.source,
        loaded.layout,
        adapt.table(changes),
    )
    return params


def place_params(params: PyTree, loaded: PyTree) -> PyTree:
    """`params` with the arrays of `loaded`, whole on every process, split as the old ones."""
    flat = traverse_util.flatten_dict(params)
    flat |= {
        path: jax.make_array_from_callback(x.shape, flat[path].sharding, x.__getitem__)
        for path, x in traverse_util.flatten_dict(loaded).items()
    }
    return traverse_util.unflatten_dict(flat)


def _check_fields(loaded, config):
    model = config.model
    if ('hidden_size' in loaded.model) != ('hidden_size' in model):
        return  # a ResNet and a transformer: adapt reports that their parameters differ
    different = [name for name in _SAME if loaded.model.get(name) != model.get(name)]
    if bool(loaded.model.get('layer_scale_init')) != bool(model.get('layer_scale_init')):
        different.append('layer_scale_init')
    if different:
        advice = 'Add ' + ' '.join(
            f'--config.model.{name}={loaded.model[name]}' for name in different
        )
        if 'pool' in different and config.masked.target != 'none':
            advice = (
                'Patches are predicted by models that average tokens: start from weights '
                'of such, or from none'
            )
        raise UserError(
            f'the pre-trained weights from {loaded.source} are of another model: '
            + ', '.join(
                f'model.{name} is {loaded.model[name]!r} there and {model[name]!r} in the config'
                for name in different
            )
            + f'. {advice}.'
        )
