import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import variants

# ViT table 1 and the sizes published since, with class token, 1000-way linear head, 224 px.
PUBLISHED = {'ti16': 5_717_416, 's16': 22_050_664, 'b16': 86_567_656, 'l16': 304_326_632,
             'h14': 632_045_800, 'g14': 1_012_611_432, 'G14': 1_844_440_680,
             'so400m14': 413_597_656}


def count(name):
    variables = jax.eval_shape(models.build(name, 1000).init, jax.random.key(0),
                               jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32))
    return sum(x.size for x in jax.tree.leaves(variables))


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_parameter_counts(name):
    assert count(name) == PUBLISHED[name]


def test_every_size_has_a_published_count():
    assert {re.match(r'so400m|\D+', n).group() for n in PUBLISHED} == set(variants.SIZES)


@pytest.mark.parametrize('name', variants.names())
def test_every_name_builds_and_counts_as_its_formula(name):
    v = variants.get(name)
    d, m, layers, (p, _) = v['hidden_size'], v['mlp_dim'], v['num_layers'], v['patch_size']
    block = 4 * (d * d + d) + (d * m + m) + (m * d + d) + 4 * d
    tokens = (224 // p) ** 2 + 1
    expected = p * p * 3 * d + d + d + tokens * d + layers * block + 2 * d + d * 1000 + 1000
    assert count(name) == expected


@pytest.mark.parametrize(('name', 'near'), [('b17', 'b16'), ('B/16', 'b16|6'), ('vit_b16', 'b16')])
def test_unknown_model_names_the_nearest(name, near):
    with pytest.raises(UserError, match=f'unknown model {name!r}. Did you mean .*({near})'):
        models.build(name, 10)


def test_g_and_G_are_two_models():
    assert variants.get('g14') != variants.get('G14')
