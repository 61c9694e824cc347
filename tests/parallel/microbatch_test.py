import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.support.parameters import randomised
from vit_jax import models
from vit_jax.models import masked
from vit_jax.parallel import microbatch


def test_parts_are_equal_and_take_every_nth_example():
    """So that on many devices, each with neighbouring examples, no data moves."""
    batch = microbatch.split({'label': jnp.arange(12), 'image': jnp.arange(24.0).reshape(12, 2)}, 3)
    np.testing.assert_array_equal(batch['label'], np.arange(12).reshape(4, 3).T)
    np.testing.assert_array_equal(batch['image'][1], [[2, 3], [8, 9], [14, 15], [20, 21]])


def test_joined_parts_are_the_batch():
    batch = {'label': jnp.arange(12), 'image': jnp.arange(24.0).reshape(12, 2)}
    joined = microbatch.join(microbatch.split(batch, 3))
    assert all((joined[name] == batch[name]).all() for name in batch)


@pytest.mark.parametrize(
    ('batch_size', 'devices', 'side', 'expected'),
    [
        (64, 2, 224, 8),
        (64, 1, 224, 16),
        (8, 1, 224, 2),
        (4, 1, 224, 1),  # four images at once
        (6, 1, 224, 2),
        (10, 1, 224, 5),
        (35, 1, 224, 1),
        (1, 1, 224, 1),  # 3, 2, not one alone
        (64, 2, 384, 32),
        (64, 2, 112, 2),
        (64, 1, 32, 1),
    ],
)  # 577, 50 and 5 tokens
def test_a_cpu_computes_about_as_many_tokens_at_once(batch_size, devices, side, expected):
    model = models.build('ti16', 10)
    assert microbatch.fastest(model, batch_size, (side, side), devices, 'cpu') == expected
    assert microbatch.fastest(model, batch_size, (side, side), devices, 'tpu') == 1


@pytest.mark.parametrize(
    ('name', 'side', 'expected'),
    [
        ('ti16', 224, 4),
        ('s32', 224, 1),
        ('r_ti16', 224, 4),
        ('r26_s32', 224, 4),
        ('r50x1', 224, 4),
        ('r50x1', 480, 32),
        ('r50x1', 96, 1),
    ],
)
def test_training_takes_about_eight_images_of_224_pixels_at_once(name, side, expected):
    model = models.build(name, 10)
    assert microbatch.fastest(model, 64, (side, side), 2, 'cpu', train=True) == expected
    assert microbatch.fastest(model, 64, (side, side), 2, 'tpu', train=True) == 1


@pytest.mark.parametrize('name', ['r50x1', 'r_ti16'])
def test_outputs_of_resnets_and_hybrids_are_computed_in_large_parts(name):
    model = models.build(name, 10)
    assert microbatch.fastest(model, 64, (224, 224), 1, 'cpu') == 1
    assert microbatch.fastest(model, 512, (224, 224), 2, 'cpu') == 4


def test_masked_patches_are_drawn_for_the_whole_batch():
    """What an evaluation hides must not depend on the processor."""
    preprocess = {'mean': (0.5, 0.5, 0.5), 'std': (0.5, 0.5, 0.5)}
    model = masked.build(
        models.build('ti16', 10), {'target': 'mean_color', 'rate': 0.5}, preprocess
    )
    assert microbatch.fastest(model, 64, (224, 224), 1, 'cpu') == 1


@pytest.mark.parametrize('pool', ['cls', 'gap', 'map', 'none'])
def test_outputs_do_not_depend_on_parts(pool):
    """Nor are any exchanged between two devices, each of which has half of every part."""
    model = models.build(
        'ti16', 5, patch_size=(4,), num_layers=2, hidden_size=32, mlp_dim=64, num_heads=2, pool=pool
    )
    images = jnp.asarray(np.random.default_rng(0).normal(size=(12, 16, 16, 3)), jnp.float32)
    params = randomised(model, images)
    mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    images = jax.device_put(images, NamedSharding(mesh, PartitionSpec('data')))
    compiled = {
        n: jax.jit(
            lambda p, x, n=n: microbatch.in_parts(
                functools.partial(model.apply, {'params': p}), x, n
            )
        )
        .lower(params, images)
        .compile()
        for n in (1, 3)
    }
    whole, split = (compiled[n](params, images) for n in compiled)
    np.testing.assert_allclose(split, whole, atol=1e-5 * np.abs(whole).max())
    assert split.sharding.is_equivalent_to(images.sharding, split.ndim)
    text = compiled[3].as_text()
    assert ' while(' in text
    assert not any(
        name in text for name in ('all-gather', 'all-to-all', 'collective-permute', 'all-reduce')
    )
