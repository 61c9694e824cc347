"""What a training step changes: arrays only, so that it can be sharded, donated and saved."""

import flax.linen as nn
import flax.struct
import jax
import optax
from jaxtyping import Array, Int, PyTree


@flax.struct.dataclass
class TrainState:
    """Attributes:
      step: int32 scalar, updates done.
      params: parameters, float32.
      opt_state: state of the optax chain.
      ema_params: Polyak average of the parameters, None when off.
    """

    step: Int[Array, '']
    params: PyTree
    opt_state: PyTree
    ema_params: PyTree | None


def init_state(model: nn.Module, tx: optax.GradientTransformation, image_shape: tuple[int, ...],
               seed: int, ema: bool) -> TrainState:
    """State before the first step; a pure function, to be called under jit or eval_shape.

    Args:
      image_shape: (height, width, channels) of a training image.
      seed: decides the initial parameters.
      ema: whether an average of the parameters is kept.
    """
    images = jax.numpy.zeros((1, *image_shape))
    params = model.init(jax.random.key(seed), images)['params']
    return TrainState(step=jax.numpy.zeros((), 'int32'), params=params, opt_state=tx.init(params),
                      ema_params=params if ema else None)
