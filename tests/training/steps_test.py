import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.steps import assert_close, random_batch, setup
from vit_jax import config as config_lib
from vit_jax.objectives import registry
from vit_jax.training import mixup


def randomised(state):
    """Random values for all parameters: a head of zeros would hide the dropout from the loss."""
    rng = np.random.default_rng(1)
    return state.replace(
        params=jax.tree.map(
            lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), state.params
        )
    )


@functools.cache
def one_step():
    """A step of the plain model, of a batch of 6: (state, batch) -> (state, metrics)."""
    return jax.jit(setup()[1])


def test_one_sgd_step_by_hand():
    state, _, model, _ = setup()
    batch = random_batch(6)

    def loss(params):
        logits = model.apply({'params': params}, batch['image'])
        return -jax.nn.log_softmax(logits)[jnp.arange(6), batch['label']].mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(state.params)
    new, metrics = one_step()(state, batch)
    assert_close(new.params, jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads))
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics['loss'], value, rtol=1e-6)
    np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics['update_norm'], 0.1 * norm, rtol=1e-5)
    np.testing.assert_allclose(metrics['learning_rate'], 0.1)
    assert int(new.step) == 1


def test_an_update_that_is_not_finite_leaves_the_parameters():
    state, step, _, _ = setup(optimizer_name='adam', ema=True)
    batch = random_batch(6)
    batch['image'][0, 0, 0, 0] = np.nan
    new, metrics = jax.jit(functools.partial(step, ema_decay=0.9))(state, batch)
    assert np.isnan(metrics['update_norm'])
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    assert_close(new.ema_params, state.ema_params)


@pytest.mark.slow
def test_the_compiled_step_updates_stacked_kernels_in_place():
    """The norm of the update reads the kernels before they change."""
    state, step, _, _ = setup(optimizer_name='adam')
    text = jax.jit(step, donate_argnums=0).lower(state, random_batch(4)).compile().as_text()
    blocks = state.params['blocks']
    for dense in (*blocks['attention'].values(), *blocks['mlp'].values()):
        written = rf'= f32\[{",".join(map(str, dense["kernel"].shape))}\]\S* '
        assert re.search(written, text)
        assert not re.search(f'{written}copy\\(', text)


@pytest.mark.parametrize('accum_steps', [3, pytest.param(6, marks=pytest.mark.slow)])
def test_accumulation_equals_the_whole_batch(accum_steps):
    state, step, _, _ = setup()
    batch = random_batch(6)
    whole, expected = one_step()(state, batch)
    parts, metrics = jax.jit(functools.partial(step, accum_steps=accum_steps))(state, batch)
    assert_close(parts.params, whole.params)
    assert_close(metrics, expected)


@pytest.mark.slow
def test_accumulation_draws_new_dropout_for_every_part():
    state, step, _, _ = setup(dropout_rate=0.5)
    state = randomised(state)
    one = jax.tree.map(lambda x: np.repeat(x[:1], 4, axis=0), random_batch(1))
    losses = {
        float(jax.jit(functools.partial(step, accum_steps=n))(state, one)[1]['loss'])
        for n in (1, 4)
    }
    assert len(losses) == 2


@pytest.mark.slow
def test_mixup_mixes_the_whole_batch_before_it_is_split():
    """The step equals a step on a batch that was mixed before. Another step draws another share."""
    state, step, model, _ = setup()
    state, batch = randomised(state), random_batch(12)
    in_parts = [jax.jit(functools.partial(step, mixup=0.4, accum_steps=parts)) for parts in (1, 3)]
    step = jax.jit(step)
    for k in (0, 5):
        state = state.replace(step=jnp.int32(k))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), k), mixup.STREAM)
        mixed = mixup.mix(batch, 0.4, key, model.num_classes)
        expected = step(state, mixed)
        for whole_batch in in_parts:
            found = whole_batch(state, batch)
            assert_close((found[0].params, found[1]), (expected[0].params, expected[1]))
    assert abs(expected[1]['loss'] - step(state, batch)[1]['loss']) > 1e-4


@pytest.mark.slow
def test_weighted_loss_is_divided_by_the_batch_size():
    """The loss equals NumPy with MixUp and parts: the weights in a part do not matter."""
    state, step, model, _ = setup()
    state, batch, weights = randomised(state), random_batch(12), np.array([0.1, 4.0, 1.0])
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), mixup.STREAM)
    mixed = mixup.mix(batch, 0.4, key, 3)
    logits = np.asarray(jax.jit(model.apply)({'params': state.params}, mixed['image']), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -(weights * mixed['label'] * log_p).sum() / 12
    config = config_lib.base()
    config.loss.class_weights = tuple(weights)
    objective = registry.build(config, model)
    step = functools.partial(step, objective=objective, mixup=0.4)
    whole, metrics = jax.jit(step)(state, batch)
    np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-5)
    for parts in (3, 12):
        found = jax.jit(functools.partial(step, accum_steps=parts))(state, batch)
        assert_close((found[0].params, found[1]), (whole.params, metrics))


def test_step_without_mixup():
    state, step, _, _ = setup()
    texts = {
        jax.jit(functools.partial(step, **fields)).lower(state, random_batch(4)).as_text()
        for fields in ({}, {'mixup': 0.0})
    }
    assert len(texts) == 1


def test_randomness_is_a_function_of_seed_and_step():
    state, step, _, _ = setup(dropout_rate=0.5)
    state = randomised(state)
    batch, step = random_batch(4), jax.jit(step)
    loss = lambda k: float(step(state.replace(step=jnp.int32(k)), batch)[1]['loss'])  # noqa: E731
    assert loss(5) == loss(5)
    assert loss(5) != loss(6)


def test_ema_is_the_running_average():
    state, step, _, _ = setup(ema=True)
    batch, average = random_batch(4), state.params
    step = jax.jit(functools.partial(step, ema_decay=0.9))
    for _ in range(3):
        state, _ = step(state, batch)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, state.params)
    assert_close(state.ema_params, average)


def test_frozen_parameters_do_not_change_and_have_no_gradient():
    """With these rules, the step trains the head only."""
    state, step, _, config = setup(lr_factors='^head/=1,.=0')
    state = randomised(state)
    head, new = state.params['head'], jax.jit(step)(state, random_batch(6))
    whole = one_step()(randomised(setup()[0]), random_batch(6))
    np.testing.assert_array_equal(
        new[0].params['embedding']['kernel'], state.params['embedding']['kernel']
    )
    assert_close(new[0].params['head'], whole[0].params['head'])
    assert np.abs(new[0].params['head']['kernel'] - head['kernel']).max() > 0
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, new[0].params['head'], head))
    np.testing.assert_allclose(
        new[1]['grad_norm'], moved / config.optimizer.learning_rate, rtol=1e-5
    )
    assert len(jax.tree.leaves(new[0].opt_state)) < len(jax.tree.leaves(whole[0].opt_state))
