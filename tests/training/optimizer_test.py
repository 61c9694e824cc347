import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from tests.support.errors import refused
from vit_jax import config as config_lib
from vit_jax.training import optimizer


def settings(**fields):
    config = config_lib.base().optimizer
    config.update(**fields)
    return config


@pytest.mark.parametrize('schedule', ['linear', 'cosine', 'constant'])
def test_schedule(schedule):
    config = settings(learning_rate=2.0, warmup_steps=10, end_learning_rate=0.5, schedule=schedule)
    lr = optimizer.make_schedule(config, 110)
    np.testing.assert_allclose([lr(k) for k in range(11)], np.arange(11) * 0.2, rtol=1e-6)
    t = (np.arange(10, 111) - 10) / 100
    expected = {
        'linear': 2 + (0.5 - 2) * t,
        'constant': np.full_like(t, 2.0),
        'cosine': 0.5 + 1.5 * (1 + np.cos(np.pi * t)) / 2,
    }[schedule]
    np.testing.assert_allclose([lr(k) for k in range(10, 111)], expected, rtol=1e-5)


@pytest.mark.parametrize('schedule', ['linear', 'cosine', 'rsqrt', 'constant'])
def test_schedules_with_cooldown_equal_big_vision(schedule):
    """utils.create_learning_rate_schedule, at every step."""
    config = settings(
        learning_rate=2.0, warmup_steps=10, schedule=schedule, cooldown_steps=40, timescale=7
    )
    step = np.arange(110)
    progress = np.clip((step - 10) / 100, 0, 1)
    expected = {
        'linear': 2 * (1 - progress),
        'cosine': 1 + np.cos(np.pi * progress),
        'rsqrt': 2 / np.sqrt(1 + np.maximum(step - 10, 0) / 7),
        'constant': 2,
    }[schedule]
    expected = expected * np.minimum(1, step / 10) * np.minimum(1, (110 - step) / 40)
    lr = optimizer.make_schedule(config, 110)
    np.testing.assert_allclose(jax.vmap(lr)(jnp.array(step)), expected, rtol=1e-5, atol=1e-7)


def test_decay_scaled_by_the_schedule_does_not_depend_on_the_peak():
    """big_vision's update: schedule * (learning rate * Adam's direction + decay * parameter)."""
    grad, x = jnp.array([0.0, 0.0]), jnp.array([2.0, -3.0])
    for peak in (0.1, 0.02):
        config = settings(learning_rate=peak, weight_decay=1e-4, decay_scaling='schedule')
        tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 10))
        params, state = {'kernel': x}, tx.init({'kernel': x})
        for step in range(10):
            updates, state = tx.update({'kernel': grad}, state, params)
            share = 0.5 * (1 + np.cos(np.pi * step / 10))
            np.testing.assert_allclose(updates['kernel'], -share * 1e-4 * x, rtol=1e-5)


@pytest.mark.parametrize(
    ('boundaries', 'supports'),
    [  # big_transfer's bit_hyperrule.py
        ((0.4, 0.6, 0.8), [100, 200, 300, 400, 500]),
        ((0.3, 0.6, 0.9), [500, 3000, 6000, 9000, 10_000]),
        ((0.3, 0.6, 0.9), [500, 6000, 12_000, 18_000, 20_000]),
    ],
)
def test_staircase_equals_bit(boundaries, supports):
    """The update at a boundary still has the rate before it."""
    warmup, *stairs, end = supports
    config = settings(
        learning_rate=0.003,
        warmup_steps=warmup,
        schedule='staircase',
        staircase_boundaries=boundaries,
    )
    lr = optimizer.make_schedule(config, end)
    steps = sorted({min(max(s + d, 0), end - 1) for s in [0, *supports] for d in range(-2, 3)})
    expected = [
        0.003 * step / warmup
        if step < warmup
        else 0.003 / 10 ** len([s for s in stairs if s < step])
        for step in steps
    ]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(lr))(jnp.array(steps)), expected, rtol=1e-6, atol=1e-9
    )  # the rounding of 0.003 - x to float32
    assert lr(stairs[-1] + 1) < lr(stairs[-1]) / 9 == pytest.approx(lr(stairs[-2] + 1) / 9)


def test_adam_with_decoupled_decay_on_kernels_by_hand():
    config = settings(learning_rate=0.1, weight_decay=0.3, schedule='constant', clip_norm=1.0)
    tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 100))
    params = {'dense': {'kernel': jnp.array([2.0, -1.0]), 'bias': jnp.array([3.0])}}
    state, m, v = tx.init(params), np.zeros(3), np.zeros(3)
    p = np.array([2.0, -1.0, 3.0])
    for t, grad in enumerate([np.array([3.0, 0.0, 4.0]), np.array([0.1, 0.2, -0.3])], 1):
        updates, state = tx.update(
            {
                'dense': {
                    'kernel': jnp.asarray(grad[:2], jnp.float32),
                    'bias': jnp.asarray(grad[2:], jnp.float32),
                }
            },
            state,
            params,
        )
        params = {'dense': {k: params['dense'][k] + updates['dense'][k] for k in updates['dense']}}
        grad = grad / max(1.0, np.linalg.norm(grad))
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p = p - 0.1 * (direction + 0.3 * p * [1, 1, 0])
        np.testing.assert_allclose(
            np.concatenate([params['dense']['kernel'], params['dense']['bias']]), p, rtol=1e-5
        )


def test_sgd_with_momentum_by_hand():
    config = settings(name='sgd', learning_rate=0.5, schedule='constant')
    tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 10))
    params = {'bias': jnp.array([1.0])}
    updates, state = tx.update({'bias': jnp.array([2.0])}, tx.init(params), params)
    np.testing.assert_allclose(updates['bias'], [-1.0])
    updates, _ = tx.update({'bias': jnp.array([4.0])}, state, params)
    np.testing.assert_allclose(updates['bias'], [-0.5 * (0.9 * 2 + 4)], rtol=1e-6)


def test_decay_in_the_gradient_by_hand():
    """SGD as in BiT: the momentum includes the decay, which applies to kernels after clipping."""
    config = settings(
        name='sgd',
        learning_rate=0.5,
        schedule='constant',
        weight_decay=0.1,
        decay_scaling='gradient',
        clip_norm=1.0,
    )
    tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 10))
    params = {'kernel': jnp.array([2.0]), 'bias': jnp.array([-3.0])}
    state, x, momentum = tx.init(params), np.array([2.0, -3.0]), 0.0
    for grad in np.array([[3.0, 4.0], [0.1, -0.2], [0.0, 0.0]]):
        updates, state = tx.update(
            {'kernel': jnp.array(grad[:1], jnp.float32), 'bias': jnp.array(grad[1:], jnp.float32)},
            state,
            params,
        )
        params = jax.tree.map(jnp.add, params, updates)
        momentum = 0.9 * momentum + grad / max(1, np.linalg.norm(grad)) + 0.1 * x * [1, 0]
        x = x - 0.5 * momentum
        np.testing.assert_allclose([*params['kernel'], *params['bias']], x, rtol=1e-5)


def test_nadam_by_hand():
    """The mean of gradients looks one step ahead (Dozat 2016, algorithm 2)."""
    config = settings(name='nadam', learning_rate=0.1, schedule='constant')
    tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 10))
    params = {'bias': jnp.array([1.0, 1.0])}
    state = tx.init(params)
    mean = 0.0
    square = 0.0
    for k, grad in enumerate(np.array([[2.0, -0.1], [-1.0, 0.3], [0.5, 0.5]]), start=1):
        updates, state = tx.update({'bias': jnp.array(grad)}, state, params)
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2
        ahead = 0.9 * mean / (1 - 0.9 ** (k + 1)) + 0.1 * grad / (1 - 0.9**k)
        step = ahead / (np.sqrt(square / (1 - 0.999**k)) + 1e-8)
        np.testing.assert_allclose(updates['bias'], -0.1 * step, rtol=5e-5)


def test_lion_by_hand():
    config = settings(name='lion', learning_rate=0.1, b2=0.99, schedule='constant')
    tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 10))
    params = {'bias': jnp.array([1.0, 1.0])}
    updates, state = tx.update({'bias': jnp.array([2.0, -0.1])}, tx.init(params), params)
    np.testing.assert_allclose(updates['bias'], [-0.1, 0.1])
    updates, _ = tx.update({'bias': jnp.array([-0.1, 0.1])}, state, params)
    np.testing.assert_allclose(updates['bias'], [-0.1, -0.1])  # 0.9 * 0.02 - 0.01, -0.0009 + 0.01


def adafactor(grads, b1, b2):
    """Updates by big_vision's definition for one parameter, step by step, in NumPy."""
    shape, result, mean, row, column = grads[0].shape, [], 0.0, 0.0, 0.0
    large = sorted(range(len(shape)), key=lambda axis: shape[axis])[-2:]
    factored = len(large) == 2 and shape[large[0]] >= 32
    for t, grad in enumerate(grads, 1):
        keep, square = min(b2, 1 - t**-0.8), grad.astype(np.float64) ** 2 + 1e-30
        if factored:
            row = keep * row + (1 - keep) * square.mean(large[0], keepdims=True)
            column = keep * column + (1 - keep) * square.mean(large[1], keepdims=True)
            moment = row * column / row.mean(large[1], keepdims=True)
        else:
            moment = row = keep * row + (1 - keep) * square
        mean = b1 * mean + (1 - b1) * grad / np.sqrt(moment)
        result.append(mean)
    return result


@pytest.mark.slow
def test_adafactor_equals_big_vision_for_each_layer():
    """Forty layers are enough for the stacked biases to look like a matrix to factor."""
    config = settings(name='adafactor', learning_rate=1.0, schedule='constant', b2=0.6)
    tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 10))
    shapes = {
        ('blocks', 'query', 'kernel'): (40, 48, 2, 33),
        ('blocks', 'query', 'bias'): (40, 64),
        ('blocks', 'dense', 'kernel'): (40, 20, 64),
        ('position', 'embedding'): (1, 50, 40),
        ('embedding', 'kernel'): (4, 4, 3, 48),
        ('head', 'bias'): (7,),
    }
    rng = np.random.default_rng(0)
    grads = [
        {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
        for _ in range(4)
    ]
    params = traverse_util.unflatten_dict(grads[0])
    state, found = tx.init(params), []
    for grad in grads:
        updates, state = tx.update(traverse_util.unflatten_dict(grad), state, params)
        found.append(traverse_util.flatten_dict(updates))
    for path in shapes:
        for layer in range(40) if path[0] == 'blocks' else [...]:
            expected = adafactor([grad[path][layer] for grad in grads], 0.9, 0.6)
            for step, update in enumerate(found):
                np.testing.assert_allclose(
                    update[path][layer], -expected[step], rtol=2e-4, atol=1e-5
                )


def test_lower_layers_have_lower_learning_rates():
    config = settings(
        name='sgd',
        learning_rate=1.0,
        schedule='constant',
        momentum=0.0,
        layer_decay=0.5,
        lr_factors='pre_logits=0',
    )
    params = {
        'embedding': {'kernel': jnp.ones(2)},
        'pre_logits': {'bias': jnp.ones(2)},
        'head': {'bias': jnp.ones(2)},
        'blocks': {'norm1': {'scale': jnp.ones((3, 2))}},
    }
    tx = optimizer.make_optimizer(
        config, optimizer.make_schedule(config, 10), optimizer.lr_factors(params, config.lr_factors)
    )
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates['embedding']['kernel'].tolist() == [-1 / 16] * 2
    assert updates['blocks']['norm1']['scale'].tolist() == [
        [-1 / 8] * 2,
        [-1 / 4] * 2,
        [-1 / 2] * 2,
    ]
    assert updates['head']['bias'].tolist() == [-1.0] * 2
    assert updates['pre_logits']['bias'].tolist() == [0.0] * 2


@pytest.mark.parametrize('name', ['sgd', 'adam', 'nadam', 'adafactor', 'lion'])
def test_learning_rates_by_parameter(name):
    """Frozen parameters have no state and do not count for clipping; others are multiplied."""
    config = settings(
        name=name,
        learning_rate=0.1,
        schedule='constant',
        clip_norm=1.0,
        weight_decay=0.2,
        lr_factors='^head/=1,norm=0.5,.=0',
    )
    plain = settings(
        name=name, learning_rate=0.1, schedule='constant', clip_norm=1.0, weight_decay=0.2
    )
    params = {
        'head': {'kernel': jnp.array([2.0, 1.0])},
        'blocks': {'kernel': jnp.array([3.0])},
        'norm': {'scale': jnp.array([1.0])},
    }
    grads = {
        'head': {'kernel': jnp.array([3.0, 0.0])},
        'blocks': {'kernel': jnp.array([100.0])},
        'norm': {'scale': jnp.array([4.0])},
    }

    def update(config, params, grads):
        tx = optimizer.make_optimizer(
            config,
            optimizer.make_schedule(config, 10),
            optimizer.lr_factors(params, config.lr_factors),
        )
        state = tx.init(params)
        return tx.update(grads, state, params)[0], state

    updates, state = update(config, params, grads)
    without = lambda tree: {n: x for n, x in tree.items() if n != 'blocks'}  # noqa: E731
    expected, small_state = update(plain, without(params), without(grads))
    np.testing.assert_array_equal(updates['blocks']['kernel'], [0.0])
    np.testing.assert_allclose(updates['head']['kernel'], expected['head']['kernel'], rtol=1e-6)
    np.testing.assert_allclose(updates['norm']['scale'], 0.5 * expected['norm']['scale'], rtol=1e-6)
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
    assert count(state) == count(small_state)


@pytest.mark.parametrize(
    ('rule', 'kind', 'message'),
    [
        ('head', 'value', "'head' cannot be read"),
        ('.=0', 'value', 'freezes all parameters'),
        ('head=nan', 'value', 'with a factor from 1e-12'),
        ('(=1', 'value', 'cannot be read'),
        ('head=-1', 'value', 'with a factor from 1e-12'),
        ('haed=1', 'unknown', 'Their paths are: head/kernel'),
    ],
)
def test_impossible_learning_rate_rules_are_refused(rule, kind, message):
    with refused(kind, field='optimizer.lr_factors', value=rule) as error:
        optimizer.lr_factors({'head': {'kernel': jnp.ones(2)}}, rule)
    assert message in str(error.value)


def test_paths_of_the_optimizer_state_match_old_checkpoints():
    """Checkpoints are restored by these names, with and without rules for learning rates."""
    params = {'head': {'kernel': jnp.ones(2)}, 'norm': {'scale': jnp.ones(3)}}

    def paths(rules):
        config = settings(name='adam', weight_decay=0.1)
        tx = optimizer.make_optimizer(
            config, optimizer.make_schedule(config, 10), optimizer.lr_factors(params, rules)
        )
        leaves = jax.tree.leaves_with_path(tx.init(params))
        return [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]

    moments = [
        '1/count',
        '1/mu/head/kernel',
        '1/mu/norm/scale',
        '1/nu/head/kernel',
        '1/nu/norm/scale',
        '3/count',
    ]
    assert paths('') == moments
    assert paths('norm=0.5') == [f'0/inner_state/{path}' for path in moments]
    assert paths('norm=0') == [f'0/inner_state/{path}' for path in moments if 'norm' not in path]


@pytest.mark.parametrize(('name', 'of_mean'), [('adam', 'mu'), ('sgd', 'trace')])
def test_the_mean_of_gradients_in_bfloat16(name, of_mean):
    """Each step rounds the mean by at most 2^-8, and nothing else; updates are float32."""
    rng = np.random.default_rng(0)
    params = {'kernel': jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)}
    found = {}
    for dtype in ('float32', 'bfloat16'):
        config = settings(name=name, learning_rate=0.1, schedule='constant', mu_dtype=dtype)
        tx = optimizer.make_optimizer(config, optimizer.make_schedule(config, 10))
        state, updates, rng = tx.init(params), None, np.random.default_rng(1)
        for _ in range(5):
            gradient = {'kernel': jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)}
            updates, state = tx.update(gradient, state, params)
        dtypes = {
            jax.tree_util.keystr(path): x.dtype
            for path, x in jax.tree.leaves_with_path(state)
            if x.ndim
        }
        assert {key: str(x) for key, x in dtypes.items()} == {
            key: dtype if of_mean in key else 'float32' for key in dtypes
        }
        found[dtype] = updates['kernel']
    assert found['bfloat16'].dtype == jnp.float32
    error = np.abs(found['bfloat16'] - found['float32'])
    assert 0 < error.max() < 5 * 2**-8 * np.abs(found['float32']).max()


def test_norm_and_clipping_equal_optax():
    rng = np.random.default_rng(0)
    tree = {
        'kernel': jnp.asarray(rng.normal(size=(3, 40, 50)), jnp.float32),
        'bias': jnp.asarray(rng.normal(size=70), jnp.float32),
        'scale': jnp.float32(0.5),
        'nothing': jnp.zeros((0, 4)),
        'mean': jnp.ones((4, 5), jnp.bfloat16),
    }
    np.testing.assert_allclose(optimizer.norm(tree), optax.tree.norm(tree), rtol=1e-6)
    assert optimizer.norm({}) == 0
    del tree['mean']  # the momentum would make it float32
    config = config_lib.base().optimizer
    config.update(name='sgd', momentum=0.0, learning_rate=1.0, weight_decay=0.0)
    for largest in (1e-3, 5.0, 1e6):
        config.clip_norm = largest
        tx = optimizer.make_optimizer(config, lambda _: 1.0)
        found, _ = tx.update(tree, tx.init(tree), tree)
        clip = optax.clip_by_global_norm(largest)
        expected, _ = clip.update(tree, clip.init(tree))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(-a, b, rtol=1e-6), found, expected)


def test_a_decay_name_without_parameters_is_refused():
    params = {'head': {'kernel': jnp.ones((2, 3)), 'bias': jnp.ones(3)}, 'cls': jnp.ones(2)}
    optimizer.check_decay_names(params, ())
    optimizer.check_decay_names(params, ('kernel', 'bias', 'cls'))
    for names in (('kernle',), ('kernel', 'kernle'), ('kernel,bias',), ('head',)):
        with refused('unknown', field='optimizer.decay_names', value=names[-1]):
            optimizer.check_decay_names(params, names)
    with refused('unknown') as error:
        optimizer.check_decay_names(params, ('kernle',))
    assert 'Did you mean kernel?' in str(error.value)
