"""Batches in parts: the number of parts, and equal results."""

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


def test_parts_are_equal_and_have_every_nth_example():
    """Each device has neighbouring examples, so no data moves between devices."""
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
        (4, 1, 224, 1),  # four images together
        (6, 1, 224, 2),
        (10, 1, 224, 5),
        (35, 1, 224, 1),
        (1, 1, 224, 1),
        (64, 2, 384, 32),  # 577 tokens per image
        (64, 2, 112, 2),  # 50
        (64, 1, 32, 1),  # 5
    ],
)
def test_outputs_on_a_cpu_are_computed_in_parts_of_similar_numbers_of_tokens(
    batch_size, devices, side, expected
):
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
def test_training_on_a_cpu_has_parts_of_about_eight_images_of_224_pixels(name, side, expected):
    model = models.build(name, 10)
    assert microbatch.fastest(model, 64, (side, side), 2, 'cpu', train=True) == expected
    assert microbatch.fastest(model, 64, (side, side), 2, 'tpu', train=True) == 1


@pytest.mark.parametrize('name', ['r50x1', 'r_ti16'])
def test_outputs_of_resnets_and_hybrids_are_computed_in_large_parts(name):
    model = models.build(name, 10)
    assert microbatch.fastest(model, 64, (224, 224), 1, 'cpu') == 1
    assert microbatch.fastest(model, 512, (224, 224), 2, 'cpu') == 4


def test_masked_patches_are_drawn_for_the_whole_batch():
    """The patches that an evaluation masks must not depend on the platform."""
    preprocess = {'mean': (0.5, 0.5, 0.5), 'std': (0.5, 0.5, 0.5)}
    model = masked.build(
        models.build('ti16', 10), {'target': 'mean_color', 'rate': 0.5}, preprocess
    )
    assert microbatch.fastest(model, 64, (224, 224), 1, 'cpu') == 1


@pytest.mark.parametrize('pool', ['cls', 'gap', 'map', 'none'])
def test_outputs_do_not_depend_on_parts(pool):
    """Two devices, each with half of every part, exchange no data."""
    model = models.build(
        'ti16', 5, patch_size=(4,), num_layers=2, hidden_size=32, mlp_dim=64, num_heads=2, pool=pool
    )
    images = jnp.asarray(np.random.default_rng(0).normal(size=(12, 16, 16, 3)), jnp.float32)
    params = randomised(model, images)
    mesh = jax.make_mesh((2,), ('data',), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    images = jax.device_put(images, NamedSharding(mesh, PartitionSpec('data')))

    def compiled(parts):
        def apply(params, images):
            function = functools.partial(model.apply, {'params': params})
            return microbatch.in_parts(function, images, parts)

        return jax.jit(apply).lower(params, images).compile()

    in_three_parts = compiled(3)
    whole = compiled(1)(params, images)
    split = in_three_parts(params, images)
    np.testing.assert_allclose(split, whole, atol=1e-5 * np.abs(whole).max())
    assert split.sharding.is_equivalent_to(images.sharding, split.ndim)
    text = in_three_parts.as_text()
    assert ' while(' in text
    assert not any(
        name in text for name in ('all-gather', 'all-to-all', 'collective-permute', 'all-reduce')
    )
