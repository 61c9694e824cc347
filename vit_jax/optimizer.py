"""The optax chain and the learning-rate schedule of a config (ViT section 4.1, tables 3 and 4)."""

import jax
import optax
from ml_collections import ConfigDict


def make_schedule(config: ConfigDict, num_steps: int) -> optax.Schedule:
    """Learning rate of update k = 0, 1, ...: linear warm-up from 0, then the decay.

    Args:
      config: `config.optimizer`.
      num_steps: length of the run; the decay reaches `end_learning_rate` there.
    """
    peak, end = config.learning_rate, config.end_learning_rate
    decay_steps = num_steps - config.warmup_steps
    decay = {
        'cosine': optax.cosine_decay_schedule(peak, decay_steps, alpha=end / peak),
        'linear': optax.linear_schedule(peak, end, decay_steps),
        'constant': optax.constant_schedule(peak),
    }[config.schedule]
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(config: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping, then Adam or SGD, then decoupled weight decay, then the learning rate.

    Weight decay is optax's: multiplied by the learning rate, and here only on parameters whose
    last name is in `config.decay_names`.

    Args:
      config: `config.optimizer`.
      schedule: learning rate of every step.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    direction = {
        'adam': optax.scale_by_adam(config.b1, config.b2),
        'sgd': optax.trace(config.momentum),
    }[config.name]

    def decays(params):
        return jax.tree.map_with_path(lambda path, _: path[-1].key in config.decay_names, params)

    return optax.chain(clip, direction,
                       optax.add_decayed_weights(config.weight_decay, mask=decays),
                       optax.scale_by_learning_rate(schedule))
