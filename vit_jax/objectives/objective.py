"""The type of an objective, and the argument of a function that makes one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.evaluator import SumEvaluator
from vit_jax.options import Options

# (params, constants, batch, rngs) -> (value, metrics). Training minimises `value`, a mean over the
# batch. `metrics` are further float32 scalars, which are logged as train/NAME. `rngs` are PRNG keys
# by name ('dropout', 'corruption') for module.apply.
Loss = Callable[
    [PyTree, PyTree, Batch, Mapping[str, Array]], tuple[Float[Array, ''], dict[str, Array]]
]


class FrozenModel(NamedTuple):
    """A model whose parameters are constants of an objective, such as a teacher.

    Attributes:
      module: the Flax module.
      fields: the fields of the module, with the names in `config.model`.
      image_size: (height, width) of its images.
    """

    module: nn.Module
    fields: Mapping[str, Any]
    image_size: tuple[int, int]


def all_parameters(params: PyTree) -> PyTree:
    """The parameters themselves."""
    return params


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a run and its main evaluator.

    Attributes:
      module: the Flax module whose parameters are trained.
      loss: the loss, see Loss; it calls module.apply with train=True.
      evaluator: scores the parameters on the evaluation split. Its first metric is shown wherever
        there is room for one number; its metrics include `loss` and `num_examples`.
      encoder: the model from images to representations, for few-shot evaluation and export.
      encoder_params: returns the parameters of `encoder`, given the parameters of `module`.
      constants: arrays that are not trained, or their shapes; they are an argument of `loss`.
      frozen: the models whose parameters are in `constants`, by their names in messages.
      uses_labels: whether the loss depends on the labels of a batch.
    """

    module: nn.Module
    loss: Loss
    evaluator: SumEvaluator
    encoder: nn.Module
    encoder_params: Callable[[PyTree], PyTree] = all_parameters
    constants: PyTree = ()
    frozen: Mapping[str, FrozenModel] = dataclasses.field(default_factory=dict)
    uses_labels: bool = True


class Context(NamedTuple):
    """The argument of a function that makes an objective.

    Attributes:
      config: the complete config of the run.
      model: a model from models.build, with a head for the classes of the data.
      options: `config.objective.options`.
      teacher: the Teacher of `config.teacher`; None without one.
    """

    config: ConfigDict
    model: nn.Module
    options: Options
    teacher: Any = None
