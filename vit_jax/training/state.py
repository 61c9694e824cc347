"""What a training step changes: arrays only, so that it can be sharded, donated and saved."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree


@flax.struct.dataclass
class TrainState:
    """The state of training after some updates."""

    step: Int[Array, '']  # updates done, int32
    params: PyTree  # float32
    opt_state: PyTree  # of the optax chain
    ema_params: PyTree | None  # Polyak average of the parameters, None when off


def init_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    image_shape: tuple[int, ...],
    seed: int,
    ema: bool,
) -> TrainState:
    """State before the first step; a pure function, to be called under jit or eval_shape.

    `image_shape` is (height, width, channels); `ema`: whether to keep an average of the parameters.
    """
    params = model.init(jax.random.key(seed), jnp.zeros((1, *image_shape)))['params']
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        ema_params=params if ema else None,
    )
