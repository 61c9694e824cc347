"""The objective that a config names."""

import flax.linen as nn
from ml_collections import ConfigDict

from vit_jax import models, plugins
from vit_jax.errors import UserError
from vit_jax.objectives.distillation import distillation
from vit_jax.objectives.labels import labels
from vit_jax.objectives.masked_patches import masked_patches
from vit_jax.objectives.objective import Context, Objective
from vit_jax.objectives.teacher import Teacher
from vit_jax.options import Options

OBJECTIVES = {
    'labels': labels,
    'distillation': distillation,
    'masked_patches': masked_patches,
}


def name_of(config: ConfigDict) -> str:
    """`objective.name`, or the objective that `masked.target` and `teacher.weights` imply."""
    if config.objective.name:
        return config.objective.name
    if config.masked.target != 'none':
        return 'masked_patches'
    if config.teacher.weights:
        return 'distillation'
    return 'labels'


def of_config(config: ConfigDict, teacher: Teacher | None = None) -> Objective:
    """The objective of a complete config, with the model that the config describes.

    See `build` for the arguments and errors.
    """
    model = models.build(config.model, config.dataset.num_classes)
    return build(config, model, teacher)


def build(config: ConfigDict, model: nn.Module, teacher: Teacher | None = None) -> Objective:
    """The objective of a complete config.

    Args:
      config: the config; `objective.name` is a key of OBJECTIVES or PACKAGE.MODULE:FUNCTION.
      model: a model from models.build.
      teacher: the teacher of `config.teacher`.

    Raises:
      UserError: if the function cannot be imported, does not return an Objective, or does not read
        one of `objective.options`.
    """
    name = name_of(config)
    make = OBJECTIVES.get(name)
    if make is None:
        make = plugins.imported(name, 'objective.name', OBJECTIVES)
    options = Options('objective.options', config.objective.options)
    objective = make(Context(config, model, options, teacher))
    if not isinstance(objective, Objective):
        raise UserError(
            f'objective.name is {name!r}, which returned {type(objective).__name__}: expected an '
            'Objective of vit_jax.objectives.objective.',
            kind='value',
            field='objective.name',
            value=name,
        )
    options.require_all_known()
    return objective
