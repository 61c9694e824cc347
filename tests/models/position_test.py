"""The position embeddings of the paper's table 8 and appendix D.4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, assert_equals_reference, random_images
from vit_jax import models
from vit_jax.models import position
from vit_jax.models.position import PLACES

POSITIONS = [(kind, place) for kind, places in PLACES.items() for place in places]


@pytest.mark.parametrize(('kind', 'place'), POSITIONS)
@pytest.mark.parametrize('pool', ['cls', pytest.param('gap', marks=pytest.mark.nightly)])
def test_every_cell_of_table_8(kind, place, pool):
    """The nine cells of the table, and fixed sines and cosines."""
    assert_equals_reference(dict(position=kind, position_at=place, pool=pool))


@pytest.mark.parametrize('attention', ['full', 'axial'])
def test_permuting_patches_permutes_tokens_without_position(attention):
    """Whole rows are permuted, because axial attention depends on rows and columns."""
    images = random_images(1, 12, 8, 3)
    rows = images.reshape(3, 4, 8, 3)
    model = models.build(SMALL, 5, position='none', pool='none', attention=attention)
    params = {'params': randomised(model, images)}
    tokens = apply(model, params, images).reshape(3, 2, 5)
    order = np.array([2, 0, 1])
    permuted = apply(model, params, rows[order].reshape(images.shape)).reshape(3, 2, 5)
    np.testing.assert_allclose(permuted, tokens[order], atol=1e-5 * np.abs(tokens).max())
    assert np.abs(permuted - tokens).max() > 1e-3 * np.abs(tokens).max()


def test_relative_logits_of_bfloat16_are_summed_in_float32():
    query = random_images(2, 9, 2, 16).astype(jnp.bfloat16)
    table = random_images(17, 2, 16).astype(jnp.bfloat16)
    exact = position.relative_logits(query.astype(jnp.float32), table.astype(jnp.float32))
    logits = position.relative_logits(query, table)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, atol=1e-5)


def test_relative_logits_are_translation_invariant():
    """The logits among some contents do not depend on their place in the sequence."""
    tokens = 11
    window = 5
    contents = random_images(1, window, 2, 8)
    table = random_images(2 * tokens - 1, 2, 8, seed=2)

    def within_window(start):
        query = random_images(1, tokens, 2, 8, seed=3 + start)
        query = query.at[:, start : start + window].set(contents)
        logits = position.relative_logits(query, table)
        return logits[:, :, start : start + window, start : start + window]

    expected = within_window(0)
    for start in range(1, tokens - window + 1):
        np.testing.assert_allclose(within_window(start), expected, atol=1e-5)


def test_an_image_of_another_size_is_refused():
    model = models.build(SMALL, 5)
    params = {'params': randomised(model, jnp.ones((1, 8, 8, 3)))}
    with refused(kind='value', field='images', value=(3, 3)) as error:
        jax.eval_shape(model.apply, params, jnp.ones((1, 12, 12, 3)))
    assert str(error.value) == (
        'the position embedding (learned_1d, embedding) was made with shape (1, 5, 32) and these '
        '3x3 patches need (1, 10, 32). Use images of the size that the parameters were trained on, '
        'or resize the embedding first.'
    )


@pytest.mark.parametrize(
    ('fields', 'kind', 'field', 'value'),
    [
        (dict(position='relativ'), 'choice', 'model.position', 'relativ'),
        (dict(position_at='every-layer'), 'choice', 'model.position_at', 'every-layer'),
        (dict(position='relative'), 'value', 'model.position_at', 'stem'),
        (dict(position='none', position_at='shared'), 'value', 'model.position_at', 'shared'),
        (
            dict(hidden_size=30, num_heads=3, position='sincos_2d'),
            'value',
            'model.hidden_size',
            30,
        ),
    ],
    ids=str,
)
def test_impossible_fields_are_refused(fields, kind, field, value):
    with refused(kind=kind, field=field, value=value):
        models.build(SMALL, 5, **fields)
