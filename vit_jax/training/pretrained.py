"""Starts a run from pre-trained weights: which config fields they decide, and the parameters."""

import logging
import math
import zlib

import jax
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import models, weights
from vit_jax.errors import UserError, nearest_names
from vit_jax.processes import hosts
from vit_jax.training import sharding
from vit_jax.weights import adapt
from vit_jax.workdir import record as workdir

log = logging.getLogger(__name__)

# What arrays do not show, or show only by being there.
_SAME = ('pool', 'position', 'position_at', 'attention')


def take_fields(config: ConfigDict, directory: str) -> tuple[ConfigDict, weights.Weights | None]:
    """Fills in the fields of `transfer.take`, and loads the weights where a run begins.

    Args:
      config: as the user gave it.
      directory: the workdir; a run that goes on takes the values that it began with.

    Returns:
      The config, and the weights, None when there are none or they are not needed any more.

    Raises:
      UserError: the weights cannot be read, or fields of `transfer.take` do not exist.
    """
    take = [field for field in config.transfer.take if field]  # --config.transfer.take= is ('',)
    if not config.pretrained:
        if take:
            raise UserError('this recipe starts from pre-trained weights: add '
                            '--config.pretrained=WEIGHTS, a file, a directory, a workdir, '
                            'hf:ORGANISATION/NAME or timm:NAME.')
        return config, None
    begun = workdir.recorded_config(directory)
    loaded = None if begun else weights.load(config.pretrained)
    known = begun or {'model': loaded.model, 'preprocess': loaded.preprocess or {}}
    config = config.copy_and_resolve_references()
    for field in take:
        if field not in config_lib.flatten(config):
            near = nearest_names(field, list(config_lib.flatten(config)))
            raise UserError(f'transfer.take names {field!r}, which is no field. {near}')
        section, _, name = field.rpartition('.')
        value = _lookup(known, field)
        if value is None:
            log.info('the weights do not say %s: it stays %s', field,
                     config_lib.get(config, field))
            continue
        holder = config_lib.get(config, section)
        value = tuple(value) if isinstance(value, list) else value
        if loaded is not None and value != holder[name]:
            log.info('%s is %r from the weights, instead of %r: to keep yours, leave it out of '
                     'transfer.take', field, value, holder[name])
        holder[name] = value
    return config, loaded


def initial_params(loaded: weights.Weights, config: ConfigDict, abstract_params: PyTree) -> PyTree:
    """The weights as parameters of the model, without its head; logs what became of each.

    Args:
      abstract_params: the model's parameters by shape, nested.

    Raises:
      UserError: the weights are of another model.
    """
    grid = models.build(config.model, 1).grid(config.image_size)
    _check_fields(loaded, config.model)
    source_grid = loaded.grid()
    if source_grid not in (None, grid) and math.prod(source_grid) == math.prod(grid) and (
            source_grid != loaded.stated_grid()):
        log.warning('%s does not say for which images its position embeddings are: they are taken '
                    'to be of %dx%d patches and resized to %dx%d. If they are of %dx%d already, '
                    'start from weights that say it: a workdir or layout vit_jax.', loaded.source,
                    *source_grid, *grid, *grid)
    params, changes = adapt.adapt(
        loaded.params, abstract_params, grid=grid, source_grid=source_grid,
        resize=config.transfer.position_resize, resize_patches=config.transfer.resize_patches)
    if hosts.count() > 1:  # every process has read them: parts of other weights would be no model
        hosts.check_equal('the pre-trained weights', {
            jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(x))
            for path, x in jax.tree.leaves_with_path(params)})
    log.info('pre-trained weights from %s (%s layout):\n%s', loaded.source, loaded.layout,
             adapt.table(changes))
    return params


def replace_params(params: PyTree, loaded: PyTree) -> PyTree:
    """`params` with the arrays of `loaded` in their places, sharded as the old ones were."""
    return {name: (replace_params(value, loaded[name]) if isinstance(value, dict) else
                   sharding.place(loaded[name], value.sharding)) if name in loaded else value
            for name, value in params.items()}


def _check_fields(loaded, model):
    if ('hidden_size' in loaded.model) != ('hidden_size' in model):
        return  # a ResNet and a transformer: their parameters have other names
    different = [name for name in _SAME if loaded.model.get(name) != model.get(name)]
    if bool(loaded.model.get('layer_scale_init')) != bool(model.get('layer_scale_init')):
        different.append('layer_scale_init')
    if different:
        raise UserError(
            f'the pre-trained weights from {loaded.source} are of another model: '
            + ', '.join(f'model.{name} is {loaded.model[name]!r} there and '
                        f'{model[name]!r} in the config' for name in different)
            + '. Add ' + ' '.join(f'--config.model.{name}={loaded.model[name]}'
                                  for name in different) + '.')


def _lookup(tree, field):
    for name in field.split('.'):
        tree = (tree or {}).get(name)
    return tree
