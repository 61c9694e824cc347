"""The optax chain and the learning-rate schedule of a config (ViT section 4.1, tables 3 and 4)."""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from vit_jax.errors import UserError, nearest_names

AFTER_LAYERS = {'norm', 'pool', 'pre_logits', 'head', 'patch_head'}  # names of parameters there


def make_schedule(config: ConfigDict, num_steps: int) -> optax.Schedule:
    """Learning rate of update k = 0, 1, ...: linear warm-up from 0, the decay, the cooldown.

    `config` is `config.optimizer`; cosine and linear decay reach its `end_learning_rate` at
    `num_steps`. The staircase is that of BiT's bit_hyperrule.py: an update at a boundary has the
    rate before it. The reciprocal square root and the cooldown are those of arXiv 2106.04560,
    section 3.5, as in big_vision (utils.create_learning_rate_schedule).
    """
    peak, end = config.learning_rate, config.end_learning_rate
    decay_steps = num_steps - config.warmup_steps

    def staircase(k):
        passed = sum(
            k + config.warmup_steps > round(share * num_steps)
            for share in config.staircase_boundaries
        )
        return peak * config.staircase_factor**passed

    decay = {
        'cosine': optax.cosine_decay_schedule(peak, decay_steps, alpha=end / peak),
        'linear': optax.linear_schedule(peak, end, decay_steps),
        'rsqrt': lambda k: peak / jnp.sqrt(1 + k / config.timescale),
        'constant': optax.constant_schedule(peak),
        'staircase': staircase,
    }[config.schedule]
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    schedule = optax.join_schedules([warmup, decay], [config.warmup_steps])
    if not config.cooldown_steps:
        return schedule
    cooldown = optax.linear_schedule(
        1.0, 0.0, config.cooldown_steps, num_steps - config.cooldown_steps
    )
    return lambda k: schedule(k) * cooldown(k)


def make_optimizer(
    config: ConfigDict, schedule: optax.Schedule, factors: PyTree | None = None
) -> optax.GradientTransformation:
    """Clipping, then the algorithm, then decoupled weight decay, then the learning rate.

    Weight decay is optax's: multiplied by the learning rate (`decay_scaling` may leave out its
    peak, or add the decay to the clipped gradient), and here only for parameters whose last name is
    in `config.decay_names`. Parameters with factor 0 are frozen: they have no part in the gradient
    norm, no optimizer state and no decay.

    `config` is `config.optimizer`; `factors` are from lr_factors, None being 1 for all parameters.
    """

    def decays(params):
        return jax.tree.map_with_path(lambda path, _: path[-1].key in config.decay_names, params)

    decay = config.weight_decay
    if config.decay_scaling == 'schedule':
        decay /= config.learning_rate
    parts = [
        _clip_by_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        {
            'adam': optax.scale_by_adam(config.b1, config.b2, mu_dtype=config.mu_dtype),
            'nadam': optax.scale_by_adam(
                config.b1, config.b2, mu_dtype=config.mu_dtype, nesterov=True
            ),
            'sgd': optax.trace(config.momentum, accumulator_dtype=config.mu_dtype),
            'lion': optax.scale_by_lion(config.b1, config.b2, config.mu_dtype),
            'adafactor': _adafactor(config),
        }[config.name],
        optax.add_decayed_weights(decay, mask=decays),
        optax.scale_by_learning_rate(schedule),
    ]
    if config.decay_scaling == 'gradient':
        parts[1:3] = reversed(parts[1:3])
    if config.layer_decay < 1:
        parts.append(_layer_decay(config.layer_decay))
    chain = optax.chain(*parts)
    if factors is None:
        return chain
    trained = jax.tree.map(lambda factor: factor > 0, factors)
    frozen = jax.tree.map(lambda factor: factor == 0, factors)
    multiply = optax.stateless(lambda updates, _: optax.tree.mul(updates, factors))
    return optax.chain(optax.masked(chain, trained), optax.freeze(frozen), multiply)


def check_decay_names(params: PyTree, names: Sequence[str]) -> None:
    """Raises UserError if one of `optimizer.decay_names` is the last name of no parameter.

    `params` is a nested dict of arrays, or of their shapes.
    """
    last_names = {path[-1].key for path, _ in jax.tree.leaves_with_path(params)}
    for name in names:
        if name not in last_names:
            raise UserError(
                f'optimizer.decay_names has {name!r}, which is the last name of no parameter of '
                f'this model. {nearest_names(name, last_names)}The last names are '
                f'{", ".join(sorted(last_names))}. An empty list, '
                '--config.optimizer.decay_names=, lets no parameter decay.'
            )


def norm(tree: PyTree) -> Float[Array, '']:
    """optax.tree.norm, in a fifth of the time on a CPU; up to rounding the same.

    XLA writes all squares to memory before it adds those of a whole array; over the first axis it
    adds them as it makes them, and few are left.
    """

    def sum_of_squares(x):
        squares = jnp.square(x)
        return (jax.lax.optimization_barrier(squares.sum(axis=0)) if x.ndim > 1 else squares).sum()

    return jnp.sqrt(sum(map(sum_of_squares, jax.tree.leaves(tree))))


def _clip_by_norm(largest):
    """As optax.clip_by_global_norm."""

    def clip(updates, _):
        found = norm(updates)
        return jax.tree.map(
            lambda x: jnp.where(found < largest, x, x / found.astype(x.dtype) * largest), updates
        )

    return optax.stateless(clip)


def _adafactor(config):
    """That of arXiv 2106.04560, section 3.4, as big_vision has it (optax.py).

    Factored second moments without an update clipping, and a mean of the updates; b1 is the decay
    of the mean, b2 the highest decay of the moments.
    """

    def decay_rate(step, exponent):
        return jnp.minimum(config.b2, 1 - (step + 1.0) ** -exponent)

    def is_stacked(params):
        return jax.tree.map_with_path(
            lambda path, _: bool({'blocks', 'rest'} & _names(path)), params
        )

    def is_single(params):
        return jax.tree.map(lambda stacked: not stacked, is_stacked(params))

    rms = optax.scale_by_factored_rms(
        decay_rate=0.8, decay_rate_fn=decay_rate, min_dim_size_to_factor=32, epsilon=1e-30
    )
    return optax.chain(
        optax.masked(rms, is_single),
        optax.masked(_of_each_layer(rms), is_stacked),
        optax.ema(config.b1, debias=False, accumulator_dtype=config.mu_dtype),
    )


def _of_each_layer(tx):
    """A transformation applied to each layer of each stacked parameter by itself."""

    def update(updates, state, params=None):
        pairs = jax.tree.map(jax.vmap(tx.update), updates, state, params)
        return tuple(jax.tree.map(lambda _, pair, i=i: pair[i], updates, pairs) for i in (0, 1))

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.vmap(tx.init), params), update
    )


def _layer_decay(rate):
    """Updates times rate^(layers above), as in BEiT (arXiv 2106.08254, appendix).

    What is before the first layer counts as one more layer, what is after the last as none; timm
    counts the last norm to the last layer.
    """

    def multiply(updates, _):
        layers = max(
            (len(x) for path, x in jax.tree.leaves_with_path(updates) if 'blocks' in _names(path)),
            default=0,
        )

        def scaled(path, update):
            names = _names(path)
            if 'blocks' in names:
                factors = rate ** jnp.arange(layers, 0, -1.0)
                return update * factors.reshape(-1, *[1] * (update.ndim - 1))
            return update * (1 if AFTER_LAYERS & names else rate ** (layers + 1))

        return jax.tree.map_with_path(scaled, updates)

    return optax.stateless(multiply)


def _names(path):
    return {part.key for part in path}


def lr_factors(params: PyTree, rules: str) -> PyTree | None:
    """What the learning rate of each parameter is multiplied by, a float; None without rules.

    `params` is a nested dict of arrays, or of their shapes. The first of `rules`,
    'REGEX=FACTOR,...', whose expression is found in the path, for example
    'blocks/mlp/dense1/kernel', decides; where none is, the factor is 1.

    Raises UserError when a rule cannot be read or fits no parameter, or all factors are 0.
    """
    if not rules:
        return None
    parsed = {rule: _parse_rule(rule) for rule in rules.split(',')}
    names = jax.tree.map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator='/'), params
    )
    for rule, (pattern, _) in parsed.items():
        if not any(map(pattern.search, jax.tree.leaves(names))):
            raise UserError(
                f'optimizer.lr_factors {rule!r} matches no parameter. Their paths are: '
                f'{", ".join(jax.tree.leaves(names))}.'
            )
    factors = jax.tree.map(
        lambda name: next(
            (factor for pattern, factor in parsed.values() if pattern.search(name)), 1.0
        ),
        names,
    )
    if not any(jax.tree.leaves(factors)):
        raise UserError(
            f'optimizer.lr_factors {rules!r} freezes all parameters: put first what is '
            'to be trained, as in ^head/=1,.=0, which trains the head only.'
        )
    return factors


def _parse_rule(rule) -> tuple[re.Pattern, float]:
    """'^head=1' as (compiled '^head', 1.0)."""
    pattern, _, factor = rule.rpartition('=')
    try:
        parsed = re.compile(pattern), float(factor)
    except (re.error, ValueError) as error:
        raise UserError(
            f'optimizer.lr_factors {rule!r} cannot be read ({error}): expected '
            'REGEX=FACTOR,... as in ^head/=1,.=0, which trains the head only.'
        ) from error
    is_possible = parsed[1] == 0 or 1e-12 <= parsed[1] <= 1e12
    if not pattern or not is_possible:
        raise UserError(
            f'optimizer.lr_factors {rule!r}: expected REGEX=FACTOR, with a factor from 1e-12 to '
            '1e12, or 0.'
        )
    return parsed
