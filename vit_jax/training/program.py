"""What a run computes, from its config and a mesh alone: state by shape, and compiled steps.

Nothing is read and nothing allocated before `initial_state`, so that the program that trains can
also be planned for devices that this machine does not have.
"""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PyTree
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.context import Devices
from vit_jax.models import cost
from vit_jax.objectives import registry
from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import feeding, microbatch, sharding
from vit_jax.training import device_defaults, optimizer, steps
from vit_jax.training import state as train_state
from vit_jax.training.state import TrainState


class Program:
    """Model, optimizer and steps of a resolved config on a mesh.

    `config` is that config, with what it leaves open chosen for the devices, see resolve.py.

    The training step splits the batch into `config.accum_steps` equal parts, into one where that is
    open, and is fastest in `fastest_parts`; steps that evaluate split it into `eval_parts`.
    `abstract_state` and `abstract_batch` are a TrainState and a batch of the whole mesh, of
    jax.ShapeDtypeStruct with shardings; so is `abstract_constants`, the one further argument of the
    step that has the constants of the objective, or () if it has none.
    `lr_factors` are from optimizer.lr_factors. `model` is the module of the objective.
    """

    def __init__(
        self, config: ConfigDict, mesh: Mesh, platform: str = '', teacher: Teacher | None = None
    ):
        """Raises UserError when the batch or a model cannot be split over the mesh, or computed.

        `platform` is that of devices which the mesh only simulates; `teacher` is the config's.
        """
        self.mesh = mesh
        self._platform = platform or mesh.devices.flat[0].platform
        config = FrozenConfigDict(config)
        device_defaults.check_kernel(config.model, mesh.devices.flat[0])
        sharding.check_model(config.model, mesh)
        feeding.data_share(mesh, mesh.devices.flat[0].process_index)
        self.num_steps = config_lib.total_steps(config)
        model = models.build(config.model, config.dataset.num_classes)
        objective = registry.build(config, model, teacher)
        self._host_constants = objective.constants
        shapes = jax.tree.map(_shape_of, objective.constants)
        self.objective = dataclasses.replace(objective, constants=shapes)
        self.model = self.objective.module
        for name, frozen in self.objective.frozen.items():
            if 'num_heads' in frozen.fields:
                sharding.check_model(frozen.fields, mesh, name)
        self.abstract_constants: tuple[PyTree, ...] = ()
        if jax.tree.leaves(shapes):
            self.abstract_constants = (sharding.abstract(shapes, mesh),)
        self._schedule = optimizer.make_schedule(config.optimizer, self.num_steps)
        image_shape = (*config.image_size, 3)
        self.lr_factors = None
        if config.optimizer.lr_factors:
            image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
            params = jax.eval_shape(self.model.init, jax.random.key(config.seed), image)['params']
            self.lr_factors = optimizer.lr_factors(params, config.optimizer.lr_factors)
        self._tx = optimizer.make_optimizer(config.optimizer, self._schedule, self.lr_factors)
        self._init = functools.partial(
            train_state.init_state,
            self.model,
            self._tx,
            image_shape,
            config.seed,
            bool(config.ema_decay),
        )
        self.abstract_state = sharding.abstract(jax.eval_shape(self._init), mesh)
        self._shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        size, placed = config.batch_size, sharding.batch_sharding(mesh)
        label = (
            ((size, config.dataset.num_classes), jnp.float32)
            if config.dataset.multi_label
            else ((size,), jnp.int32)
        )
        self.abstract_batch = {
            'image': jax.ShapeDtypeStruct((size, *image_shape), jnp.float32, sharding=placed),
            'label': jax.ShapeDtypeStruct(*label, sharding=placed),
            'mask': jax.ShapeDtypeStruct((size,), jnp.bool_, sharding=placed),
        }
        self._set_steps(config)

    def with_accum_steps(self, accum_steps: int) -> 'Program':
        """This program with another split of the batch; model and shapes are shared.

        Raises UserError when the parts cannot be spread evenly over the devices.
        """
        config = config_lib.changed(self.config, {'accum_steps': accum_steps})
        program = copy.copy(self)
        program._set_steps(FrozenConfigDict(config))
        return program

    def _set_steps(self, config):
        """Everything that depends on the split of the batch."""
        sharding.check_batch(config.batch_size, config.accum_steps, self.mesh)
        fastest = functools.partial(
            microbatch.fastest,
            self.model,
            config.batch_size,
            config.image_size,
            sharding.batch_parts(self.mesh),
            self._platform,
        )
        self.fastest_parts = fastest(train=True)
        self.config = config
        accum_steps = max(config.accum_steps, 1)
        # More than the fastest are for want of memory, which evaluation would lack, too.
        self.eval_parts = max(accum_steps if accum_steps > self.fastest_parts else 1, fastest())
        everywhere = sharding.replicated(self.mesh)
        options = steps.StepOptions(
            accum_steps=accum_steps,
            ema_decay=config.ema_decay,
            mixup=config.augment.mixup,
            mixup_with=config.augment.mixup_with,
            num_classes=config.dataset.num_classes,
            factors=self.lr_factors,
            place_grads=functools.partial(
                jax.lax.with_sharding_constraint, shardings=self._shardings.params
            ),
        )
        train_step = functools.partial(
            steps.train_step,
            objective=self.objective,
            tx=self._tx,
            schedule=self._schedule,
            seed=config.seed,
            options=options,
        )
        self._train_step = self.model.backend.jit(
            train_step, donate_argnums=0, out_shardings=(self._shardings, everywhere)
        )
        devices = Devices(self.mesh, self.model.backend, self.eval_parts)
        self._eval_step = devices.jit_sums(self.objective.evaluator)
        self._compiled = None

    def initial_state(self) -> TrainState:
        """The state before the first step, each device making its own part of it."""
        return jax.jit(self._init, out_shardings=self._shardings)()

    def placed_constants(self) -> tuple[PyTree, ...]:
        """Arrays on the devices for `abstract_constants`. The host keeps no copy of them."""
        constants = self._host_constants
        self._host_constants = None
        return tuple(
            jax.tree.map(
                lambda shape, array: jax.make_array_from_callback(
                    shape.shape, shape.sharding, array.__getitem__
                ),
                shapes,
                constants,
            )
            for shapes in self.abstract_constants
        )

    @property
    def arguments(self) -> tuple[PyTree, ...]:
        """Those of the training step, as shapes with shardings."""
        return self.abstract_state, self.abstract_batch, *self.abstract_constants

    @property
    def train_step(self) -> jax.stages.Compiled:
        """(state, batch, *constants) -> (state, metrics) of steps.train_step, compiled once.

        The state is donated; `constants` are arrays for `abstract_constants`.
        """
        if self._compiled is None:
            self._compiled = self.trace_train_step().lower().compile()
        return self._compiled

    def trace_train_step(self) -> jax.stages.Traced:
        """The training step before it is lowered and compiled."""
        with sharding.on_mesh(self.mesh):
            return self._train_step.trace(*self.arguments)

    def eval_step(self, params: PyTree, batch: Batch) -> dict[str, Array]:
        """The sums of the objective's evaluator, compiled when first called."""
        return self._eval_step(params, batch)

    def flops_per_step(self) -> int:
        """FLOPs of a step, all devices, as usually counted.

        These are 3 forward passes of the model, and one of each frozen model of the objective.
        """
        flops = 3 * cost.of_model(self.model, self.config.image_size).flops
        for frozen in self.objective.frozen.values():
            flops += cost.of_model(frozen.module, frozen.image_size).flops
        return flops * self.config.batch_size

    def flops_of_train_step(self) -> int:
        """FLOPs of a step on all devices, as it is traced.

        The backward pass computes forward products again where the config says so, and computes
        no gradient that nothing needs, such as that of the images, except with
        model.linear_kernel=cpu, by which every product has both.
        """
        return cost.flops_of(self.trace_train_step().jaxpr.jaxpr)


def _shape_of(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
