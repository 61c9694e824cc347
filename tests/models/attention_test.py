import jax
import jax.numpy as jnp
import numpy as np

from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.models import attention


def test_attention_dropout_acts_on_the_weights():
    """A rate too small to drop anything gives the fused path; a larger one acts in training."""
    images = random_images(2, 8, 8, 3)
    fields = dict(position='relative', position_at='every_layer')
    params = {'params': randomised(models.build(SMALL, 5, **fields), images)}

    def logits(rate, train):
        model = models.build(SMALL, 5, attention_dropout_rate=rate, **fields)
        return apply(model, params, images, train=train, rngs={'dropout': jax.random.key(1)})

    expected = logits(0.0, False)
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(1e-9, True), expected, atol=tolerance)
    np.testing.assert_array_equal(logits(0.5, False), expected)
    assert np.abs(logits(0.5, True) - expected).max() > 100 * tolerance


def test_weights_are_those_that_the_fused_path_uses():
    query, key, value = (random_images(2, tokens, 3, 8, seed=seed)
                         for seed, tokens in enumerate((4, 5, 5)))
    key, bias = 3 * key, random_images(2, 3, 4, 5)
    weights = attention.attention_weights(query, key, bias)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(jnp.einsum('bhqk,bkhd->bqhd', weights, value),
                               jax.nn.dot_product_attention(query, key, value, bias), atol=1e-5)
