import jax
import numpy as np
import pytest
from scipy import stats

from tests.support.steps import random_batch
from vit_jax.training import mixup


def shares(alpha, number):
    """The shares drawn with different keys, read from an image that is mixed with zeros."""
    batch = {
        'image': np.array([1.0, 0.0], np.float32)[:, None, None, None],
        'label': np.array([0, 1], np.int32),
    }
    keys = jax.random.split(jax.random.key(3), number)
    mixed = jax.jit(jax.vmap(lambda key: mixup.mix(batch, alpha, key, 2)['image'][0, 0, 0, 0]))
    return np.asarray(mixed(keys), np.float64)


@pytest.mark.parametrize('several_labels', [False, True])
@pytest.mark.parametrize('size', [6, 5])
@pytest.mark.parametrize('other', ['reversed', 'next'])
def test_mixed_with_itself(other, size, several_labels):
    """Images and labels have one share for the batch, as in plain NumPy."""
    batch, targets = random_batch(size), np.eye(3, dtype=np.float32)
    one_hot = targets[batch['label']]
    if several_labels:
        one_hot = batch['label'] = np.maximum(one_hot, targets[np.roll(batch['label'], 1)])
    key = jax.random.key(7)
    share = np.float32(jax.random.beta(key, 0.4, 0.4))
    assert 0.01 < share < 0.5
    mixed = mixup.mix(batch, 0.4, key, 3, other)
    for found, x in [(mixed['image'], batch['image']), (mixed['label'], one_hot)]:
        expected = {
            'reversed': share * x + (1 - share) * np.flip(x, axis=0),
            'next': (1 - share) * x + share * np.roll(x, 1, axis=0),
        }[other]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(mixed['mask'], batch['mask'])


@pytest.mark.parametrize('alpha', [0.1, 1.0])
def test_shares_are_of_the_beta_distribution(alpha):
    found = shares(alpha, 2000)
    assert ((found >= 0) & (found <= 1)).all()
    for value in (0.001, 0.1, 0.3, 0.5, 0.9, 0.999):
        expected = stats.beta(alpha, alpha).cdf(value)
        assert (found < value).mean() == pytest.approx(expected, abs=0.04)
