"""Filters and position embeddings, beside what scikit-learn and SciPy make of them."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA

from tests.support import small
from tests.support.parameters import randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.errors import Inapplicable
from vit_jax.inspection import parameters
from vit_jax.models.position import sincos_2d

IMAGES = random_images(1, 8, 12, 3)


def similarity(**fields):
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, IMAGES)
    return params, parameters.position_similarity(model, params, (8, 12))


def test_filters_of_a_known_analysis_come_back():
    """Orthonormal patterns with spreads of 4, 2 and 1, in this order, one of them each."""
    rng = np.random.default_rng(0)
    patterns = np.linalg.qr(rng.normal(size=(4 * 4 * 3, 3)))[0].T
    factors = np.linalg.qr(rng.normal(size=(40, 3)) - 0.0)[0]
    factors = np.linalg.qr(factors - factors.mean(0))[0] * [4, 2, 1]
    kernel = (factors @ patterns + rng.normal(size=48)).T.reshape(4, 4, 3, 40)
    found, variance = parameters.filters({'embedding': {'kernel': kernel}}, 3)
    np.testing.assert_allclose(variance, np.array([16, 4, 1]) / 21, atol=1e-6)
    for one, pattern in zip(found, patterns, strict=True):
        sign = np.sign(pattern[np.abs(pattern).argmax()])
        np.testing.assert_allclose(one.reshape(-1), sign * pattern, atol=1e-6)


@pytest.mark.parametrize(
    ('name', 'shape'), [('vit', (8, 8, 3)), ('hybrid', (7, 7, 3)), ('bit', (7, 7, 3))]
)
def test_filters_are_those_on_pixels(name, shape):
    params = small.make(name).params
    kernel = (params['embedding'] if name == 'vit' else params['resnet']['root_conv'])['kernel']
    found, variance = parameters.filters(params, 5)
    expected = PCA(5).fit(np.reshape(kernel, (-1, kernel.shape[-1])).T)
    np.testing.assert_allclose(
        np.abs(found.reshape(5, -1)), np.abs(expected.components_), atol=1e-4
    )
    np.testing.assert_allclose(variance, expected.explained_variance_ratio_, rtol=1e-4)
    assert found.shape == (5, *shape)


@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        dict(pool='gap', num_registers=2),
        dict(position_at='every_layer'),
        dict(position='learned_2d', num_registers=1),
        dict(position='sincos_2d', position_at='every_layer'),
    ],
    ids=str,
)
def test_similarity_of_what_is_added(fields):
    """Of each patch with itself it is one; the class token is no patch."""
    params, found = similarity(**fields)
    own = fields.get('position_at') == 'every_layer' and 'position' not in fields
    assert found.shape == (3 if own else 1, 2, 3, 2, 3)
    np.testing.assert_allclose(np.einsum('lrcrc->lrc', found), 1, atol=1e-6)
    if 'position' not in fields:
        table = (params['blocks'] if own else params)['position']['embedding']
        table = np.reshape(table, (len(found), -1, 32))[:, -6:]
    elif fields['position'] == 'learned_2d':
        row, column = (np.asarray(params['position'][name]) for name in ('row', 'column'))
        table = [[np.concatenate([row[r, 0], column[0, c]]) for r in range(2) for c in range(3)]]
    else:
        table = sincos_2d((2, 3), 32).reshape(1, 6, 32)
    for one, vectors in zip(found.reshape(-1, 6, 6), table, strict=True):
        np.testing.assert_allclose(one, 1 - cdist(vectors, vectors, 'cosine'), atol=1e-6)


@pytest.mark.parametrize(
    'fields', [dict(position_at='shared'), dict(position_at='every_layer', pool='gap')], ids=str
)
def test_similarity_of_relative_positions(fields):
    """The embedding of the offset from patch to patch, beside that of a patch to itself."""
    params, found = similarity(position='relative', **fields)
    tables = (params['blocks'] if 'pool' in fields else params)['position']['relative']
    tables = np.asarray(tables).reshape(len(found), -1, 32)
    middle = tables.shape[1] // 2
    for one, table in zip(found.reshape(-1, 6, 6), tables, strict=True):
        for query in range(6):
            for key in range(6):
                expected = 1 - cdist(table[[middle]], table[[middle + key - query]], 'cosine')
                np.testing.assert_allclose(one[query, key], expected[0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (dict(position='none'), 'model.position is none'),
        (
            dict(position='relative', position_at='every_layer', attention='axial', pool='gap'),
            'model.position is relative within rows and columns',
        ),
    ],
)
def test_models_without_such_positions(fields, message):
    with pytest.raises(Inapplicable, match=message):
        similarity(**fields)
    resnet = small.make('bit')
    with pytest.raises(Inapplicable, match='a ResNet has no position embedding of patches'):
        parameters.position_similarity(models.build(resnet.model, 7), resnet.params, (24, 24))
