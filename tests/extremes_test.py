"""Results are finite at the smallest and largest accepted value of every float field."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.data import preprocess, randaugment
from vit_jax.data.host_tensorflow import tf
from vit_jax.evaluators import probes
from vit_jax.evaluators.features import Features
from vit_jax.models import masked
from vit_jax.objectives import losses
from vit_jax.training import mixup, optimizer

CONFIG = config_lib.changed(config_lib.base('ti16'), {'num_steps': 100, 'image_size': (16, 16)})
FIELDS = {
    name: field
    for name, field in config_lib.all_fields().items()
    if isinstance(field.default, float)
}
# Include the smallest, the smallest normal and the largest float32, and values beyond float32.
SIZES = [5e-324, 1e-300, 1e-46, 1.4e-45, 1.2e-38, *(10.0**k for k in range(-37, 39)), 3.4e38, 1e308]
NEAR_LIMITS = [0.0, 0.5, 0.9999999, 1 - 1e-16, 1.0, 22.4999, 22.5, 1000.0, 65536.0, 65537.0]
CANDIDATES = sorted({*NEAR_LIMITS, *SIZES, *(-x for x in SIZES)})


def extremes(values):
    """The smallest and largest numbers that a field accepts, and its numbers nearest to 0."""
    accepted = [x for x in CANDIDATES if values.fit(x)]
    nearest = min((x for x in accepted if x), key=abs)
    return sorted({accepted[0], accepted[-1], nearest, -nearest} & set(accepted))


EXTREMES = [(name, x) for name, field in FIELDS.items() for x in extremes(field.values)]


def of(section):
    return [(name, x) for name, x in EXTREMES if name.startswith(f'{section}.')]


def at(name, value):
    return config_lib.changed(CONFIG, {name: value})


def is_finite(tree):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize('name', FIELDS)
def test_numbers_out_of_the_range_of_float32_are_refused(name):
    values = FIELDS[name].values
    impossible = (1e-300, 1.4e-45, -1e-300, 1e308, 3.4e38, -1e308, math.inf, 10**400, True)
    assert not any(map(values.fit, (*impossible, math.nan)))
    for value in impossible[:-2]:
        if name in config_lib.flatten(CONFIG):
            with refused('value', field=name, value=value):
                config_lib.checked(at(name, value))


def test_excessive_integers_are_refused():
    for name, value in (('evals.fewshot.seeds', 2**31 - 1), ('augment.randaugment.num_ops', 17)):
        with refused('value', field=name, value=value):
            config_lib.checked(at(name, value))


@pytest.mark.parametrize(('name', 'value'), of('optimizer'))
def test_rates_and_updates_are_finite(name, value):
    params = {'blocks': {'kernel': jnp.ones((2, 40, 40))}, 'head': {'kernel': jnp.ones((40, 3))}}
    grads = jax.tree.map(lambda x: 1e-3 * x, params)
    for changes in (
        {'name': 'adam', 'schedule': 'cosine'},
        {'name': 'sgd', 'schedule': 'linear', 'decay_scaling': 'gradient', 'weight_decay': 0.1},
        {'name': 'lion', 'schedule': 'rsqrt'},
        {'name': 'adafactor', 'schedule': 'staircase', 'clip_norm': 1.0},
    ):
        config = config_lib.changed(
            CONFIG, {f'optimizer.{field}': x for field, x in changes.items()} | {name: value}
        )
        if config.optimizer.end_learning_rate > config.optimizer.learning_rate * 1e30:
            continue  # refused
        schedule = optimizer.make_schedule(config.optimizer, 100)
        assert is_finite([schedule(k) for k in (0, 1, 50, 99)])
        tx = optimizer.make_optimizer(config.optimizer, schedule)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        assert is_finite((updates, state)), changes


def test_excessive_ratio_of_learning_rates_is_refused():
    rates = {'optimizer.learning_rate': 1e-30, 'optimizer.end_learning_rate': 1e10}
    with refused('value', field='optimizer.end_learning_rate', value=1e10):
        config_lib.checked(config_lib.changed(CONFIG, rates))


@pytest.mark.slow
@pytest.mark.parametrize('value', extremes(FIELDS['augment.mixup'].values)[1:])
def test_mixed_images_are_finite(value):
    batch = {'image': jnp.ones((4, 2, 2, 3)), 'label': jnp.arange(4)}
    for other in ('reversed', 'next'):
        mix = jax.jit(functools.partial(mixup.mix, alpha=value, num_classes=4, other=other))
        assert is_finite([mix(batch, key=jax.random.key(k)) for k in range(20)])


@pytest.mark.parametrize(
    ('name', 'value'), [*of('loss'), ('loss.class_weights', 1e-9), ('loss.class_weights', 1e9)]
)
def test_losses_are_finite(name, value):
    field = name.partition('.')[2]
    for loss in losses.LOSSES:
        option = (value, value, value) if field == 'class_weights' else value
        function = losses.make_loss(loss, **{field: option})
        logits = jnp.array([[30.0, -20, 0], [-100, 0, 100]])
        assert is_finite(
            jax.value_and_grad(lambda x, f=function: f(x, jnp.arange(2)).sum())(logits)
        )


@pytest.mark.parametrize('value', extremes(FIELDS['teacher.temperature'].values))
def test_distillation_is_finite(value):
    logits = jnp.array([[30.0, -20, 0], [-100, 0, 100]])
    loss, gradient = jax.value_and_grad(
        lambda x: losses.distillation(x, logits[::-1], value).sum()
    )(logits)
    assert is_finite((loss, gradient))
    assert float(jnp.abs(gradient).max()) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'value'), [*of('augment'), *of('preprocess')])
def test_pixels_are_finite(name, value):
    config = at(name, value)
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    encoded = tf.io.encode_png(image)
    pixels = preprocess.eval_image(encoded, (16, 16), config.preprocess)
    assert np.isfinite(preprocess.normalise(pixels, config.preprocess)).all()
    crops = {'augment.min_area': 'inception', 'augment.crop_ratio': 'resize'}
    augment = config.augment.to_dict() | {'crop': crops.get(name, 'none')}
    keys = tf.constant(np.arange(8).reshape(4, 2))
    train_image = tf.function(
        lambda keys: preprocess.train_image(
            encoded, keys, (16, 16), augment, config.preprocess, tf.constant(False)
        )[0]
    )
    pixels = train_image(keys)
    assert np.isfinite(pixels).all()
    if name.startswith('augment.randaugment'):
        for operation in randaugment.OPERATIONS.values():
            (draw,) = randaugment.draws(keys[0], 1)
            distorted = operation(tf.constant(image), augment['randaugment'], draw)
            assert distorted.shape[2] == 3
            assert distorted.dtype == tf.uint8


@pytest.mark.parametrize('value', extremes(FIELDS['evals.fewshot.l2'].values))
def test_few_shot_scores_are_finite(value):
    features = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
    features[:, 3] = 1.0
    train = Features(features, np.arange(12) % 3)
    assert np.isfinite(probes.least_squares(train, features, 3, (value,))[0]).all()


@pytest.mark.parametrize('value', extremes(FIELDS['masked.rate'].values))
def test_patches_are_hidden(value):
    corruption = masked.draw(jax.random.key(0), 2, 9, value)
    assert int(jnp.asarray(corruption.corrupted).sum()) >= 2


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'value'), [(name, x) for name, x in of('model') if name in config_lib.flatten(CONFIG)]
)
def test_logits_and_gradients_are_finite(name, value):
    sizes = {'hidden_size': 8, 'num_layers': 2, 'mlp_dim': 8, 'num_heads': 2, 'patch_size': (8, 8)}
    config = config_lib.changed(CONFIG, {f'model.{k}': v for k, v in sizes.items()} | {name: value})
    model = models.build(config.model, 3)
    image = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
    params = model.init(jax.random.key(1), image)['params']

    def loss(params):
        logits = model.apply(
            {'params': params}, image, train=True, rngs={'dropout': jax.random.key(2)}
        )
        return losses.make_loss('softmax')(logits, jnp.arange(2)).sum()

    assert is_finite(jax.value_and_grad(loss)(params))
