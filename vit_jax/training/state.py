"""The state of training: arrays only, so that it can be sharded, donated and saved."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree


@flax.struct.dataclass
class TrainState:
    """The state of training after some updates.

    Attributes:
      step: number of updates, int32.
      params: the parameters, float32.
      opt_state: the state of the optax chain.
      ema_params: Polyak average of the parameters; None if it is off.
    """

    step: Int[Array, '']
    params: PyTree
    opt_state: PyTree
    ema_params: PyTree | None


def init_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_shape: tuple[int, ...],
    seed: int,
    ema: bool,
) -> TrainState:
    """The state before the first step; a pure function, to be called under jit or eval_shape.

    Args:
      model: the model whose parameters are initialised.
      tx: the optimizer.
      image_shape: (height, width, channels).
      seed: the seed of the initial parameters.
      ema: whether the state has an average of the parameters.
    """
    params = model.init(jax.random.key(seed), jnp.zeros((1, *image_shape)))['params']
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        ema_params=params if ema else None,
    )
