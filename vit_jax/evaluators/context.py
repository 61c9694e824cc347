"""The argument of a function that makes an evaluator: the model, its data and the devices."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from vit_jax.errors import UserError
from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.evaluator import Evaluator, SumEvaluator, sums_in_parts, total
from vit_jax.options import Options
from vit_jax.parallel import feeding, sharding


class Split(NamedTuple):
    """A split of a data set.

    Attributes:
      source: a source from data.sources, with `class_names`, `multi_label` and `num_examples`.
      batches: the batches of all images of the split; every iteration starts with the first batch.
        The last batch is padded, with mask 0.
      where: the name of the split in messages.
    """

    source: Any
    batches: Iterable
    where: str


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that compute an evaluator, and the parts of a batch.

    Attributes:
      mesh: the devices.
      backend: the backend of the model, see models/backends.
      accum_steps: number of equal parts of a batch, which are computed one after the other.
    """

    mesh: Mesh
    backend: Any
    accum_steps: int

    def jit(self, step: Callable[[PyTree, Batch], PyTree]) -> Callable[[PyTree, Batch], PyTree]:
        """Jits a step; its results are replicated on every device."""
        jitted = self.backend.jit(step, out_shardings=sharding.replicated(self.mesh))

        def call(params, batch):
            with sharding.on_mesh(self.mesh):
                return jitted(params, batch)

        return call

    def jit_sums(self, evaluator: SumEvaluator) -> Callable[[PyTree, Batch], dict[str, Array]]:
        """Jits the sums of an evaluator over a batch."""
        return self.jit(
            functools.partial(sums_in_parts, sums=evaluator.sums, accum_steps=self.accum_steps)
        )

    def feed(self, batches: Iterable) -> Iterable:
        """Puts the batches of this process on the devices, one batch ahead of the step."""
        return feeding.feed(batches, self.mesh)


@dataclasses.dataclass(frozen=True)
class Context:
    """The argument of a function that makes an evaluator.

    Attributes:
      name: the name of the evaluator in messages, such as 'evals.balanced' or '--type'.
      options: the options of the evaluator.
      class_names: the class names of the model.
      encoder: the model from images to representations, and to logits if it has a head.
      encoder_params: returns the parameters of `encoder`, given the evaluated parameters.
      loss: (logits, labels) -> the training loss of each example, without smoothing and weights.
      devices: the devices that compute the evaluator.
      open_test: opens the split that is scored, with labels in the order of `class_names`.
      open_pair: opens the splits that frozen features learn from and are scored on. These splits
        have their own classes.
    """

    name: str
    options: Options
    class_names: Sequence[str]
    encoder: nn.Module
    encoder_params: Callable[[PyTree], PyTree]
    loss: Callable[..., Float[Array, ' batch']]
    devices: Devices
    open_test: Callable[[], Split]
    open_pair: Callable[[], tuple[Split, Split]]

    @property
    def num_classes(self) -> int:
        """The number of classes of the model."""
        return len(self.class_names)

    @functools.cached_property
    def test(self) -> Split:
        """The split that is scored, opened once."""
        return self.open_test()

    def require_classes(self) -> None:
        """Raises UserError if the model has no head, and so predicts no classes."""
        if not self.encoder.num_classes:
            raise UserError(
                f'{self.name} scores predicted classes, and the model predicts none: use an '
                'evaluator of frozen features, such as fewshot, knn or linear_probe.',
                kind='inapplicable',
            )

    def logits(self, params: PyTree, batch: Batch) -> Float[Array, 'batch classes']:
        """The logits of the model for the images of a batch."""
        self.require_classes()
        variables = {'params': self.encoder_params(params)}
        # Without `mutable`, `apply` returns only the logits.
        return self.encoder.apply(variables, batch['image'], train=False)  # type: ignore[return-value]

    def evaluator(self, evaluator: Evaluator | SumEvaluator) -> Evaluator:
        """The evaluator itself, or for a SumEvaluator an Evaluator that sums over `test`."""
        if isinstance(evaluator, Evaluator):
            return evaluator
        step = self.devices.jit_sums(evaluator)
        batches = self.test.batches

        def run(params, interrupted):
            totals = total(step, params, self.devices.feed(batches), interrupted)
            if totals is None:
                return None
            return evaluator.finish(totals)

        return Evaluator(evaluator.metrics, run)
