"""The type of an objective, and what a function that makes one is given."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.evaluator import SumEvaluator
from vit_jax.options import Options

# (params, constants, batch, rngs) -> (value, metrics). `value` is the mean over the batch, which
# is minimised; `metrics` are further float32 scalars, logged as train/NAME. `rngs` are PRNG keys by
# name ('dropout', 'corruption'), as module.apply takes them.
Loss = Callable[
    [PyTree, PyTree, Batch, Mapping[str, Array]], tuple[Float[Array, ''], dict[str, Array]]
]


class FrozenModel(NamedTuple):
    """A model whose parameters are constants of an objective, such as a teacher."""

    module: nn.Module
    fields: Mapping[str, Any]  # of the module, as `config.model` has them
    image_size: tuple[int, int]  # (height, width) of the images that it sees


def all_parameters(params: PyTree) -> PyTree:
    """The parameters themselves."""
    return params


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a run minimises, and how it is scored.

    Attributes:
      module: the Flax module whose parameters are trained.
      loss: see Loss; it calls module.apply with train=True.
      evaluator: scores the parameters on the evaluation split. Its first metric tells in a word
        how good they are; it has `loss` and `num_examples`, too.
      encoder: the model from images to representations, for few-shot evaluation and export.
      encoder_params: takes its parameters from those of `module`.
      constants: arrays that are not trained, or their shapes, one argument of `loss`.
      frozen: the models of which `constants` has parameters, by the names in messages.
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
    """What a function that makes an objective is given.

    Attributes:
      config: the complete config of the run.
      model: from models.build, with a head for the classes of the data.
      options: `config.objective.options`.
      teacher: of `config.teacher`, None without one.
    """

    config: ConfigDict
    model: nn.Module
    options: Options
    teacher: Any = None
