"""What a run computes, from its config and a mesh alone: state by shape, and compiled steps.

Nothing is read and nothing allocated before `initial_state`, so that the same program that trains
can be planned for devices that are not there.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PyTree
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.models import cost
from vit_jax.training import optimizer, sharding, steps
from vit_jax.training import state as train_state
from vit_jax.training.state import TrainState


class Program:
    """Model, optimizer and steps of a settled config on a mesh.

    Attributes:
      config: settled, see config.settle.
      mesh: from sharding.make_mesh.
      num_steps: updates of the whole run.
      model: flax module, images to logits.
      abstract_state: TrainState of jax.ShapeDtypeStruct with shardings.
      abstract_batch: likewise, a batch of the whole mesh.
    """

    def __init__(self, config: ConfigDict, mesh: Mesh):
        """Raises UserError when the batch or the model cannot be split over the mesh."""
        sharding.check_batch(config.batch_size, config.accum_steps, mesh)
        sharding.check_model(config.model, mesh)
        self.config, self.mesh = config, mesh
        self.num_steps = config_lib.total_steps(config)
        self.model = models.build(config.model, config.dataset.num_classes)
        self._schedule = optimizer.make_schedule(config.optimizer, self.num_steps)
        self._tx = optimizer.make_optimizer(config.optimizer, self._schedule)
        self._init = functools.partial(train_state.init_state, self.model, self._tx,
                                       (*config.image_size, 3), config.seed,
                                       bool(config.ema_decay))
        state = jax.eval_shape(self._init)
        self._shardings = sharding.state_shardings(state, mesh)
        self.abstract_state = jax.tree.map(
            lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
            state, self._shardings)
        by_example = sharding.batch_sharding(mesh)
        shape = (config.batch_size, *config.image_size, 3)
        self.abstract_batch = {
            'image': jax.ShapeDtypeStruct(shape, jnp.float32, sharding=by_example),
            'label': jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=by_example),
            'mask': jax.ShapeDtypeStruct(shape[:1], jnp.bool_, sharding=by_example)}

    def initial_state(self) -> TrainState:
        """The state before the first step, each device making its own part of it."""
        return jax.jit(self._init, out_shardings=self._shardings)()

    def lower_train_step(self, accum_steps: int) -> jax.stages.Lowered:
        """steps.train_step (state, batch) -> (state, metrics), to be compiled; donates the state.

        Args:
          accum_steps: parts that the batch is worked off in.
        """
        config = self.config
        step = functools.partial(
            steps.train_step, model=self.model, tx=self._tx, schedule=self._schedule,
            loss=config.loss, seed=config.seed, accum_steps=accum_steps,
            ema_decay=config.ema_decay, lr_factors=config.optimizer.lr_factors,
            place_grads=self._place_like_params)
        step = jax.jit(step, donate_argnums=0,
                       out_shardings=(self._shardings, sharding.replicated(self.mesh)))
        with sharding.on_mesh(self.mesh):
            return step.lower(self.abstract_state, self.abstract_batch)

    def eval_step(self, params: PyTree, batch: steps.Batch) -> dict[str, Array]:
        """steps.eval_step, compiled when first called; the sums are on every device."""
        with sharding.on_mesh(self.mesh):
            return self._eval_step(params, batch)

    def flops_per_step(self) -> int:
        """Model FLOPs: three times the forward pass, the backward pass being two of it."""
        forward = cost.of_model(self.model, self.config.image_size).flops
        return 3 * forward * self.config.batch_size

    @functools.cached_property
    def _eval_step(self):
        return jax.jit(functools.partial(steps.eval_step, model=self.model, loss=self.config.loss,
                                         accum_steps=self.config.accum_steps or 1),
                       out_shardings=sharding.replicated(self.mesh))

    def _place_like_params(self, grads):
        return jax.lax.with_sharding_constraint(grads, self._shardings.params)
