"""The computation of a run, from only a config and a mesh: shapes of the state, compiled steps.

A Program reads no data and allocates nothing before `initial_state`, so that a training program can
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
from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.context import Devices
from vit_jax.models import cost
from vit_jax.objectives import registry
from vit_jax.objectives.objective import Objective
from vit_jax.parallel import feeding, microbatch, sharding
from vit_jax.training import device_defaults, optimizer, steps
from vit_jax.training import state as train_state
from vit_jax.training.state import TrainState


class Program:
    """Model, optimizer and steps of a resolved config on a mesh.

    Attributes:
      mesh: the devices.
      config: the config, unchanged. accum_steps 0 counts as 1 until accumulation.choose replaces
        it.
      num_steps: the number of steps of the run.
      objective: the objective of the config, with shapes in place of its constants.
      model: the Flax module of the objective.
      lr_factors: a factor per parameter, from optimizer.lr_factors; None if all are 1.
      abstract_state: a TrainState of jax.ShapeDtypeStruct with shardings.
      abstract_batch: a batch of the whole mesh, of jax.ShapeDtypeStruct with shardings.
      abstract_constants: the constants of the objective, as shapes with shardings; () without
        constants. They are further arguments of the training step.
      fastest_parts: number of parts of a batch that makes the training step fastest.
      eval_parts: number of parts of a batch in the evaluation step.
    """

    abstract_constants: tuple[PyTree, ...]

    def __init__(
        self,
        config: ConfigDict,
        mesh: Mesh,
        platform: str = '',
        objective: Objective | None = None,
    ):
        """Builds the model and the steps; compiles nothing.

        Args:
          config: the config from the functions of resolve.py.
          mesh: the devices.
          platform: the platform of the devices if the mesh only simulates them.
          objective: the objective of the config, from registry.of_config; None builds it. A config
            with a teacher needs it.

        Raises:
          UserError: if the batch or a model cannot be split over the mesh, or the devices lack the
            attention kernel.
        """
        self.mesh = mesh
        self._platform = platform or mesh.devices.flat[0].platform
        config = FrozenConfigDict(config)
        device_defaults.check_kernel(config.model, mesh.devices.flat[0])
        sharding.check_model(config.model, mesh)
        feeding.data_share(mesh, mesh.devices.flat[0].process_index)
        self.num_steps = config_lib.total_steps(config)
        self._set_objective(config, objective)
        self._set_optimizer(config)
        self._set_shapes(config)
        self._set_steps(config)

    def _set_objective(self, config, objective):
        """Sets the objective, its model and the shapes of its constants."""
        if objective is None:
            objective = registry.of_config(config)
        self._host_constants = objective.constants
        shapes = jax.tree.map(_shape_of, objective.constants)
        self.objective = dataclasses.replace(objective, constants=shapes)
        self.model = self.objective.module
        for name, frozen in self.objective.frozen.items():
            if 'num_heads' in frozen.fields:
                sharding.check_model(frozen.fields, self.mesh, name)
        self.abstract_constants = ()
        if jax.tree.leaves(shapes):
            self.abstract_constants = (sharding.abstract(shapes, self.mesh),)

    def _set_optimizer(self, config):
        """Sets the learning-rate schedule and the optimizer."""
        self._schedule = optimizer.make_schedule(config.optimizer, self.num_steps)
        self.lr_factors = None
        if config.optimizer.lr_factors:
            image = jax.ShapeDtypeStruct((1, *config.image_size, 3), jnp.float32)
            params = jax.eval_shape(self.model.init, jax.random.key(config.seed), image)['params']
            self.lr_factors = optimizer.lr_factors(params, config.optimizer.lr_factors)
        self._tx = optimizer.make_optimizer(config.optimizer, self._schedule, self.lr_factors)

    def _set_shapes(self, config):
        """Sets the shapes and shardings of the state and of a batch."""
        image_shape = (*config.image_size, 3)
        self._init = functools.partial(
            train_state.init_state,
            self.model,
            self._tx,
            image_shape,
            config.seed,
            bool(config.ema_decay),
        )
        self.abstract_state = sharding.abstract(jax.eval_shape(self._init), self.mesh)
        self._shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        size = config.batch_size
        label_shape = (size,)
        label_dtype = jnp.int32
        if config.dataset.multi_label:
            label_shape = (size, config.dataset.num_classes)
            label_dtype = jnp.float32
        shape_of = functools.partial(
            jax.ShapeDtypeStruct, sharding=sharding.batch_sharding(self.mesh)
        )
        self.abstract_batch = {
            'image': shape_of((size, *image_shape), jnp.float32),
            'label': shape_of(label_shape, label_dtype),
            'mask': shape_of((size,), jnp.bool_),
        }

    def with_accum_steps(self, accum_steps: int) -> 'Program':
        """This program with another number of parts of a batch; model and shapes are shared.

        Raises:
          UserError: if the parts cannot be spread evenly over the devices.
        """
        config = config_lib.changed(self.config, {'accum_steps': accum_steps})
        program = copy.copy(self)
        program._set_steps(FrozenConfigDict(config))
        return program

    def _set_steps(self, config):
        """Sets everything that depends on the number of parts of a batch."""
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
        self.eval_parts = fastest()
        if accum_steps > self.fastest_parts:  # the memory is short, and evaluation needs it too
            self.eval_parts = max(accum_steps, self.eval_parts)
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
        """Computes the state before the first step; each device computes its own part."""
        return jax.jit(self._init, out_shardings=self._shardings)()

    def placed_constants(self) -> tuple[PyTree, ...]:
        """Returns the constants as arrays on the devices; the host keeps no copy."""
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
        """The arguments of the training step, as shapes with shardings."""
        return self.abstract_state, self.abstract_batch, *self.abstract_constants

    @property
    def train_step(self) -> jax.stages.Compiled:
        """The compiled steps.train_step: (state, batch, *constants) -> (state, metrics).

        The step is compiled when first used, and donates the state. The constants are from
        `placed_constants`.
        """
        if self._compiled is None:
            self._compiled = self.trace_train_step().lower().compile()
        return self._compiled

    def trace_train_step(self) -> jax.stages.Traced:
        """The traced training step, which can be lowered and compiled."""
        with sharding.on_mesh(self.mesh):
            return self._train_step.trace(*self.arguments)

    def eval_step(self, params: PyTree, batch: Batch) -> dict[str, Array]:
        """The sums of the objective's evaluator, compiled when first called."""
        return self._eval_step(params, batch)

    def flops_per_step(self) -> int:
        """FLOPs of a step on all devices, by the usual convention.

        The convention counts three forward passes of the model, and one forward pass of each frozen
        model.
        """
        flops = 3 * cost.of_model(self.model, self.config.image_size).flops
        for frozen in self.objective.frozen.values():
            flops += cost.of_model(frozen.module, frozen.image_size).flops
        return flops * self.config.batch_size

    def flops_of_train_step(self) -> int:
        """FLOPs of a step on all devices, counted in the traced step.

        They include forward products that the backward pass repeats (model.remat_policy). Gradients
        that nothing needs, for example of the images, are not computed, except with
        model.linear_kernel=cpu, which computes both gradients of every product.
        """
        return cost.flops_of(self.trace_train_step().jaxpr.jaxpr)


def _shape_of(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
