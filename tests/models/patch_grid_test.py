"""The number of patches of an image, and the sizes that fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.vit import SMALL
from vit_jax import models
from vit_jax.models import patch_grid


@pytest.mark.parametrize(('size', 'pair'), [(224, (224, 224)), ((8,), (8, 8)), ([6, 4], (6, 4))])
def test_a_side_or_two_are_a_pair(size, pair):
    assert patch_grid.as_pair(size) == pair


@pytest.mark.parametrize('size', [0, (1, 2, 3), (2.5, 1), ()])
def test_other_sizes_are_refused(size):
    with refused(kind='value', field='image_size', value=size):
        patch_grid.as_pair(size, 'image_size')


def test_an_image_that_is_not_divisible_by_patches_is_refused():
    model = models.build('ti14', 10)
    with refused(kind='value', field='image_size', value=(384, 384)) as error:
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 384, 384, 3)))
    assert str(error.value) == (
        'image_size 384x384 is not divisible by patch_size 14x14. The nearest image sizes are '
        '378x378 and 392x392; model.partial_patches=drop ignores the rest of the image.'
    )


@pytest.mark.parametrize(
    ('size', 'nearest'),
    [
        ((40, 32), 's are 32x32 and 48x32'),
        ((16, 15), ' is 16x16'),
        ((33, 15), 's are 32x16 and 48x16'),
        ((30, 20), 's are 16x16 and 32x32'),
    ],
)
def test_the_nearest_sizes_keep_a_side_that_fits(size, nearest):
    with refused(kind='value', field='image_size', value=size) as error:
        patch_grid.whole_patches(size, (16, 16))
    assert f'The nearest image size{nearest}' in str(error.value)


@pytest.mark.parametrize('drop_partial', [False, True])
def test_an_image_smaller_than_a_patch_is_refused(drop_partial):
    with refused(kind='value', field='image_size', value=(8, 8)) as error:
        patch_grid.whole_patches((8, 8), (16, 16), drop_partial=drop_partial)
    assert str(error.value).endswith('The nearest image size is 16x16.')


def test_partial_patches_can_be_dropped():
    model = models.build(SMALL, 5, partial_patches='drop')
    patch, _ = SMALL['patch_size']
    images = jax.random.normal(jax.random.key(1), (2, 3 * patch + 1, 3 * patch - 1, 3))
    params = jax.jit(model.init)(jax.random.key(0), images)
    assert model.grid(images.shape[1:3]) == (3, 2)
    cropped = images[:, : 3 * patch, : 2 * patch]
    expected = jax.jit(models.build(SMALL, 5).apply)(params, cropped)
    np.testing.assert_array_equal(jax.jit(model.apply)(params, images), expected)
