"""What a function that makes an evaluator is given: the model, its data and the devices."""

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
      source: from data.sources, with `class_names`, `multi_label` and `num_examples`.
      batches: of all its images, from the first on each time they are iterated over; the last one
        is padded, with mask 0.
      where: its name in messages.
    """

    source: Any
    batches: Iterable
    where: str


@dataclasses.dataclass(frozen=True)
class Devices:
    """How evaluators compute: over a mesh of devices, a batch in equal parts.

    Attributes:
      mesh: the devices.
      backend: of the model, see models/backends.
      accum_steps: the parts of a batch that are computed one after the other.
    """

    mesh: Mesh
    backend: Any
    accum_steps: int

    def jit(self, step: Callable[[PyTree, Batch], PyTree]) -> Callable[[PyTree, Batch], PyTree]:
        """The step, compiled when first called; what it returns is on every device."""
        jitted = self.backend.jit(step, out_shardings=sharding.replicated(self.mesh))

        def call(params, batch):
            with sharding.on_mesh(self.mesh):
                return jitted(params, batch)

        return call

    def jit_sums(self, evaluator: SumEvaluator) -> Callable[[PyTree, Batch], dict[str, Array]]:
        """The sums of an evaluator over a batch, compiled when first called."""
        return self.jit(
            functools.partial(sums_in_parts, sums=evaluator.sums, accum_steps=self.accum_steps)
        )

    def feed(self, batches: Iterable) -> Iterable:
        """The batches of this process on the devices of all, one ahead of the step."""
        return feeding.feed(batches, self.mesh)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a function that makes an evaluator is given.

    Attributes:
      name: of the evaluator, in messages: 'evals.balanced' or '--type'.
      options: its options.
      class_names: of the model.
      encoder: the model from images to representations, and to logits if it has a head.
      encoder_params: takes its parameters from those that are evaluated.
      loss: (logits, labels) -> the loss of each example, which training minimises, without
        smoothing and weights.
      devices: where it computes.
      open_test: opens the split that is scored, with labels in the order of `class_names`.
      open_pair: opens a split that frozen features learn from, and one that they are scored on,
        whose classes are their own.
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
        """How many classes the model has."""
        return len(self.class_names)

    @functools.cached_property
    def test(self) -> Split:
        """The split that is scored, opened once."""
        return self.open_test()

    def require_classes(self) -> None:
        """Raises UserError if the model has no head, and so predicts no classes."""
        if not self.encoder.num_classes:
            raise UserError(
                f'{self.name} scores predicted classes, and the model predicts none: take a type '
                'of frozen features, such as fewshot, knn or linear_probe.'
            )

    def logits(self, params: PyTree, batch: Batch) -> Float[Array, 'batch classes']:
        """The logits of the model for the images of a batch."""
        self.require_classes()
        variables = {'params': self.encoder_params(params)}
        # Without `mutable`, `apply` gives the logits alone.
        return self.encoder.apply(variables, batch['image'], train=False)  # type: ignore[return-value]

    def evaluator(self, made: Evaluator | SumEvaluator) -> Evaluator:
        """An evaluator of any kind as one that scores `test`."""
        if isinstance(made, Evaluator):
            return made
        step = self.devices.jit_sums(made)
        batches = self.test.batches

        def run(params, interrupted):
            totals = total(step, params, self.devices.feed(batches), interrupted)
            if totals is None:
                return None
            return made.finish(totals)

        return Evaluator(made.metrics, run)
