"""The position embeddings of the paper's table 8 and appendix D.4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, assert_equals_reference, random_images
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import position
from vit_jax.models.position import PLACES

POSITIONS = [(kind, place) for kind, places in PLACES.items() for place in places]


@pytest.mark.parametrize(('kind', 'place'), POSITIONS)
@pytest.mark.parametrize('pool', ['cls', pytest.param('gap', marks=pytest.mark.nightly)])
def test_every_cell_of_table_8(kind, place, pool):
    """With fixed sines and cosines beside the table's nine."""
    assert_equals_reference(dict(position=kind, position_at=place, pool=pool))


@pytest.mark.parametrize('attention', ['full', 'axial'])
def test_permuting_patches_permutes_tokens_without_position(attention):
    """Axial attention sees rows and columns, so there whole rows are permuted."""
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
    query, table = (
        random_images(*shape).astype(jnp.bfloat16) for shape in [(2, 9, 2, 16), (17, 2, 16)]
    )
    exact = position.relative_logits(query.astype(jnp.float32), table.astype(jnp.float32))
    found = position.relative_logits(query, table)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_relative_logits_are_translation_invariant():
    """Moved along the sequence, the same contents give each other the same logits."""
    tokens, window = 11, 5
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


def test_image_of_another_size_than_trained():
    model = models.build(SMALL, 5)
    params = {'params': randomised(model, jnp.ones((1, 8, 8, 3)))}
    message = r'made with shape \(1, 5, 32\) and these 3x3 patches need \(1, 10, 32\)'
    with pytest.raises(UserError, match=message):
        jax.eval_shape(model.apply, params, jnp.ones((1, 12, 12, 3)))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (dict(position='relativ'), "model.position is 'relativ'. Did you mean relative"),
        (dict(position_at='every-layer'), 'Did you mean every_layer'),
        (
            dict(position='relative'),
            'relative cannot act at model.position_at stem: set '
            'model.position_at to every_layer or shared',
        ),
        (dict(position='none', position_at='shared'), 'set model.position_at to stem'),
        (dict(hidden_size=30, num_heads=3, position='sincos_2d'), '30 is not divisible by 4'),
    ],
    ids=str,
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(UserError, match=message):
        models.build(SMALL, 5, **fields)
