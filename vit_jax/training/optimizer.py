"""The optax chain and the learning-rate schedule of a config (ViT section 4.1, tables 3 and 4)."""

import math
import re

import jax
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax.errors import UserError


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
    last name is in `config.decay_names`. Parameters that `config.lr_factors` freezes have no part
    in the gradient norm, no optimizer state and no decay.

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

    chain = optax.chain(clip, direction,
                        optax.add_decayed_weights(config.weight_decay, mask=decays),
                        optax.scale_by_learning_rate(schedule))
    if not config.lr_factors:
        return chain

    def trained(params):
        return jax.tree.map(bool, lr_factors(params, config.lr_factors))

    def frozen(params):
        return jax.tree.map(lambda factor: not factor, lr_factors(params, config.lr_factors))

    def multiply(updates, params):
        return jax.tree.map(lambda u, factor: u * factor, updates,
                            lr_factors(params, config.lr_factors))

    return optax.chain(optax.masked(chain, trained), optax.masked(optax.set_to_zero(), frozen),
                       optax.stateless(multiply))


def lr_factors(params: PyTree, rules: str) -> PyTree:
    """What the learning rate of each parameter is multiplied with.

    Args:
      params: nested dict.
      rules: 'REGEX=FACTOR,...'; the first one whose expression is found in the path, as in
        'blocks/mlp/dense1/kernel', decides, and without one the factor is 1.

    Raises:
      UserError: a rule cannot be read or fits no parameter, or all factors are 0.
    """
    parsed = {rule: parse_rule(rule) for rule in rules.split(',')}
    names = jax.tree.map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator='/'), params)
    for rule, (pattern, _) in parsed.items():
        if not any(map(pattern.search, jax.tree.leaves(names))):
            raise UserError(f'optimizer.lr_factors {rule!r} fits no parameter. Their paths are: '
                            f'{", ".join(jax.tree.leaves(names))}.')
    factors = jax.tree.map(
        lambda name: next((factor for pattern, factor in parsed.values() if pattern.search(name)),
                          1.0), names)
    if not any(jax.tree.leaves(factors)):
        raise UserError(f'optimizer.lr_factors {rules!r} freezes all parameters: put first what is '
                        'to be trained, as in ^head/=1,.=0, which trains the head only.')
    return factors


def stop_frozen(params: PyTree, rules: str) -> PyTree:
    """The same parameters, of which those with factor 0 take no part in differentiation."""
    if not rules:
        return params
    return jax.tree.map(lambda x, factor: x if factor else jax.lax.stop_gradient(x), params,
                        lr_factors(params, rules))


def parse_rule(rule: str) -> tuple[re.Pattern, float]:
    """'^head=1' as (compiled '^head', 1.0); raises UserError when it is nothing of the kind."""
    pattern, _, factor = rule.rpartition('=')
    try:
        parsed = re.compile(pattern), float(factor)
    except (re.error, ValueError) as error:
        raise UserError(f'optimizer.lr_factors {rule!r} cannot be read ({error}): expected '
                        'REGEX=FACTOR,... as in ^head/=1,.=0, which trains the head only.'
                        ) from error
    if not pattern or not 0 <= parsed[1] < math.inf:
        raise UserError(f'optimizer.lr_factors {rule!r}: expected REGEX=FACTOR, with a factor of '
                        'at least 0.')
    return parsed
