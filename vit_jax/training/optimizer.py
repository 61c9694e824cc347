"""The optax chain and the learning-rate schedule of a config (ViT section 4.1, tables 3 and 4)."""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from vit_jax.errors import UserError, nearest_names

# Names of the modules after the last layer.
AFTER_LAYERS = {'norm', 'pool', 'pre_logits', 'head', 'patch_head'}


def make_schedule(config: ConfigDict, num_steps: int) -> optax.Schedule:
    """The learning rate of update k = 0, 1, ...: linear warm-up from 0, decay, cooldown.

    Cosine and linear decay reach `end_learning_rate` at `num_steps`. The staircase is from BiT's
    bit_hyperrule.py: an update at a boundary has the rate before it. The reciprocal square root and
    the cooldown are from arXiv 2106.04560, section 3.5, as in big_vision
    (utils.create_learning_rate_schedule).

    Args:
      config: `config.optimizer`.
      num_steps: the number of steps of the run.
    """
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    decay = _decay_schedule(config, num_steps)
    schedule = optax.join_schedules([warmup, decay], [config.warmup_steps])
    if not config.cooldown_steps:
        return schedule
    cooldown = optax.linear_schedule(
        1.0, 0.0, config.cooldown_steps, num_steps - config.cooldown_steps
    )
    return lambda k: schedule(k) * cooldown(k)


def _decay_schedule(config, num_steps):
    """The learning rate after the warm-up; its first step is 0."""
    peak = config.learning_rate
    end = config.end_learning_rate
    decay_steps = num_steps - config.warmup_steps

    def reciprocal_square_root(k):
        return peak / jnp.sqrt(1 + k / config.timescale)

    def staircase(k):
        passed = sum(
            k + config.warmup_steps > round(share * num_steps)
            for share in config.staircase_boundaries
        )
        return peak * config.staircase_factor**passed

    if config.schedule == 'cosine':
        return optax.cosine_decay_schedule(peak, decay_steps, alpha=end / peak)
    if config.schedule == 'linear':
        return optax.linear_schedule(peak, end, decay_steps)
    if config.schedule == 'constant':
        return optax.constant_schedule(peak)
    return {'rsqrt': reciprocal_square_root, 'staircase': staircase}[config.schedule]


def make_optimizer(
    config: ConfigDict, schedule: optax.Schedule, factors: PyTree | None = None
) -> optax.GradientTransformation:
    """Chains clipping, the algorithm, decoupled weight decay and the learning rate, in this order.

    Weight decay follows optax: it is multiplied by the learning rate. With `decay_scaling`
    'schedule' it is multiplied by the learning rate divided by its peak. With 'gradient' it is
    added to the clipped gradient. Only parameters whose last name is in `decay_names` decay.
    Parameters with factor 0 are frozen: they do not count in the gradient norm, and have no
    optimizer state and no decay.

    Args:
      config: `config.optimizer`.
      schedule: the schedule from `make_schedule`.
      factors: the factors from `lr_factors`; None for 1 everywhere.
    """

    def decays(params):
        return jax.tree.map_with_path(lambda path, _: path[-1].key in config.decay_names, params)

    decay = config.weight_decay
    if config.decay_scaling == 'schedule':
        decay /= config.learning_rate
    clipping = _clip_by_norm(config.clip_norm) if config.clip_norm else optax.identity()
    algorithm = _algorithm(config)
    weight_decay = optax.add_decayed_weights(decay, mask=decays)
    learning_rate = optax.scale_by_learning_rate(schedule)
    if config.decay_scaling == 'gradient':
        parts = [clipping, weight_decay, algorithm, learning_rate]
    else:
        parts = [clipping, algorithm, weight_decay, learning_rate]
    if config.layer_decay < 1:
        parts.append(_layer_decay(config.layer_decay))
    chain = optax.chain(*parts)
    if factors is None:
        return chain
    trained = jax.tree.map(lambda factor: factor > 0, factors)
    frozen = jax.tree.map(lambda factor: factor == 0, factors)
    multiply = optax.stateless(lambda updates, _: optax.tree.mul(updates, factors))
    return optax.chain(optax.masked(chain, trained), optax.freeze(frozen), multiply)


def _algorithm(config):
    """The transformation of `optimizer.name`, without learning rate and weight decay."""
    if config.name == 'adam':
        return optax.scale_by_adam(config.b1, config.b2, mu_dtype=config.mu_dtype)
    if config.name == 'nadam':
        return optax.scale_by_adam(config.b1, config.b2, mu_dtype=config.mu_dtype, nesterov=True)
    if config.name == 'sgd':
        return optax.trace(config.momentum, accumulator_dtype=config.mu_dtype)
    if config.name == 'lion':
        return optax.scale_by_lion(config.b1, config.b2, config.mu_dtype)
    return {'adafactor': _adafactor}[config.name](config)


def check_decay_names(params: PyTree, names: Sequence[str]) -> None:
    """Raises UserError if a name in `optimizer.decay_names` is the last name of no parameter.

    Args:
      params: nested dict of arrays or of their shapes.
      names: `optimizer.decay_names`.
    """
    last_names = {path[-1].key for path, _ in jax.tree.leaves_with_path(params)}
    for name in names:
        if name not in last_names:
            raise UserError(
                f'optimizer.decay_names has {name!r}, which is the last name of no parameter of '
                f'this model. {nearest_names(name, last_names)}The last names are '
                f'{", ".join(sorted(last_names))}. An empty list, '
                '--config.optimizer.decay_names=, lets no parameter decay.',
                kind='unknown',
                field='optimizer.decay_names',
                value=name,
            )


def norm(tree: PyTree) -> Float[Array, '']:
    """optax.tree.norm up to rounding, in a fifth of its time on a CPU.

    XLA writes the squares of a whole array to memory before it sums them. This function sums over
    the first axis first. XLA computes this sum together with the squares, so that few numbers are
    written.
    """

    def sum_of_squares(x):
        squares = jnp.square(x)
        if x.ndim > 1:
            squares = jax.lax.optimization_barrier(squares.sum(axis=0))
        return squares.sum()

    return jnp.sqrt(sum(map(sum_of_squares, jax.tree.leaves(tree))))


def _clip_by_norm(largest):
    """Clips as optax.clip_by_global_norm does, with the faster `norm`."""

    def clip(updates, _):
        total = norm(updates)

        def clipped(x):
            return jnp.where(total < largest, x, x / total.astype(x.dtype) * largest)

        return jax.tree.map(clipped, updates)

    return optax.stateless(clip)


def _adafactor(config):
    """Adafactor of arXiv 2106.04560, section 3.4, as in big_vision (optax.py).

    It has factored second moments and a mean of the updates, and does not clip updates. b1 is the
    decay of the mean, and b2 is the highest decay of the moments.
    """

    def decay_rate(step, exponent):
        return jnp.minimum(config.b2, 1 - (step + 1.0) ** -exponent)

    def is_stacked(params):
        stacked_names = {'blocks', 'rest'}
        return jax.tree.map_with_path(
            lambda path, _: not stacked_names.isdisjoint(_names(path)), params
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
    """Applies a transformation to every layer of a stacked parameter separately."""

    def init(params):
        return jax.tree.map(jax.vmap(tx.init), params)

    def update(updates, state, params=None):
        pairs = jax.tree.map(jax.vmap(tx.update), updates, state, params)
        new_updates = jax.tree.map(lambda _, pair: pair[0], updates, pairs)
        new_state = jax.tree.map(lambda _, pair: pair[1], updates, pairs)
        return new_updates, new_state

    return optax.GradientTransformation(init, update)


def _layer_decay(rate):
    """Multiplies updates by rate^(layers above), as in BEiT (arXiv 2106.08254, appendix).

    Parameters before the first layer count as one more layer, and parameters after the last layer
    as none. timm, in contrast, treats the last norm as a part of the last layer.
    """

    def multiply(updates, _):
        num_layers = 0
        for path, x in jax.tree.leaves_with_path(updates):
            if 'blocks' in _names(path):
                num_layers = max(num_layers, len(x))

        def scaled(path, update):
            names = _names(path)
            if 'blocks' in names:
                factors = rate ** jnp.arange(num_layers, 0, -1.0)
                other_axes = [1 for _ in update.shape[1:]]
                return update * factors.reshape(num_layers, *other_axes)
            if names & AFTER_LAYERS:
                return update * 1
            return update * rate ** (num_layers + 1)

        return jax.tree.map_with_path(scaled, updates)

    return optax.stateless(multiply)


def _names(path):
    return {part.key for part in path}


def lr_factors(params: PyTree, rules: str) -> PyTree | None:
    """A factor of the learning rate for each parameter; None without rules.

    Args:
      params: nested dict of arrays or of their shapes.
      rules: 'REGEX=FACTOR,...'. The first rule whose expression matches a part of the path, such as
        'blocks/mlp/dense1/kernel', decides. Without a match the factor is 1.

    Returns:
      A tree of floats like `params`.

    Raises:
      UserError: if a rule cannot be read or matches no parameter, or all factors are 0.
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
                f'{", ".join(jax.tree.leaves(names))}.',
                kind='unknown',
                field='optimizer.lr_factors',
                value=rule,
            )

    def factor_of(name):
        for pattern, factor in parsed.values():
            if pattern.search(name):
                return factor
        return 1.0

    factors = jax.tree.map(factor_of, names)
    if not any(jax.tree.leaves(factors)):
        raise UserError(
            f'optimizer.lr_factors {rules!r} freezes all parameters: write the rule for the '
            'trained ones first, as in ^head/=1,.=0, which trains the head only.',
            kind='value',
            field='optimizer.lr_factors',
            value=rules,
        )
    return factors


def _parse_rule(rule) -> tuple[re.Pattern, float]:
    """Converts '^head=1' to (compiled '^head', 1.0)."""
    expression, _, text = rule.rpartition('=')
    try:
        pattern = re.compile(expression)
        factor = float(text)
    except (re.error, ValueError) as error:
        raise UserError(
            f'optimizer.lr_factors {rule!r} cannot be read ({error}): expected '
            'REGEX=FACTOR,... as in ^head/=1,.=0, which trains the head only.',
            kind='value',
            field='optimizer.lr_factors',
            value=rule,
        ) from error
    is_possible = factor == 0 or 1e-12 <= factor <= 1e12
    if not expression or not is_possible:
        raise UserError(
            f'optimizer.lr_factors {rule!r}: expected REGEX=FACTOR, with a factor from 1e-12 to '
            '1e12, or 0.',
            kind='value',
            field='optimizer.lr_factors',
            value=rule,
        )
    return pattern, factor
