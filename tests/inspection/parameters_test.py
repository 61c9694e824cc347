"""Filters and position embeddings, compared with scikit-learn and SciPy."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA

from tests.support import small
from tests.support.errors import refused
from tests.support.parameters import randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.inspection import parameters
from vit_jax.models.position import sincos_2d

IMAGES = random_images(1, 8, 12, 3)


def similarity(**fields):
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, IMAGES)
    return params, parameters.position_similarity(model, params, (8, 12))


def test_filters_recover_known_components():
    """The filters are sums of orthonormal patterns with standard deviations of 4, 2 and 1."""
    rng = np.random.default_rng(0)
    patterns = np.linalg.qr(rng.normal(size=(4 * 4 * 3, 3)))[0].T
    factors = np.linalg.qr(rng.normal(size=(40, 3)) - 0.0)[0]
    factors = np.linalg.qr(factors - factors.mean(0))[0] * [4, 2, 1]
    kernel = (factors @ patterns + rng.normal(size=48)).T.reshape(4, 4, 3, 40)
    components, variance = parameters.filters({'embedding': {'kernel': kernel}}, 3)
    np.testing.assert_allclose(variance, np.array([16, 4, 1]) / 21, atol=1e-6)
    for component, pattern in zip(components, patterns, strict=True):
        sign = np.sign(pattern[np.abs(pattern).argmax()])
        np.testing.assert_allclose(component.reshape(-1), sign * pattern, atol=1e-6)


@pytest.mark.parametrize(
    ('name', 'shape'), [('vit', (8, 8, 3)), ('hybrid', (7, 7, 3)), ('bit', (7, 7, 3))]
)
def test_filters_are_components_of_the_kernel_on_pixels(name, shape):
    params = small.make(name).params
    layer = params['embedding'] if name == 'vit' else params['resnet']['root_conv']
    kernel = layer['kernel']
    components, variance = parameters.filters(params, 5)
    expected = PCA(5).fit(np.reshape(kernel, (-1, kernel.shape[-1])).T)
    np.testing.assert_allclose(
        np.abs(components.reshape(5, -1)), np.abs(expected.components_), atol=1e-4
    )
    np.testing.assert_allclose(variance, expected.explained_variance_ratio_, rtol=1e-4)
    assert components.shape == (5, *shape)


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
def test_similarity_equals_cosines_of_the_added_embeddings(fields):
    """The similarity of a patch with itself is one. The class token is excluded."""
    params, similarities = similarity(**fields)
    own = fields.get('position_at') == 'every_layer' and 'position' not in fields
    assert similarities.shape == (3 if own else 1, 2, 3, 2, 3)
    np.testing.assert_allclose(np.einsum('lrcrc->lrc', similarities), 1, atol=1e-6)
    if 'position' not in fields:
        table = (params['blocks'] if own else params)['position']['embedding']
        table = np.reshape(table, (len(similarities), -1, 32))[:, -6:]
    elif fields['position'] == 'learned_2d':
        row, column = (np.asarray(params['position'][name]) for name in ('row', 'column'))
        table = [[np.concatenate([row[r, 0], column[0, c]]) for r in range(2) for c in range(3)]]
    else:
        table = sincos_2d((2, 3), 32).reshape(1, 6, 32)
    for matrix, vectors in zip(similarities.reshape(-1, 6, 6), table, strict=True):
        np.testing.assert_allclose(matrix, 1 - cdist(vectors, vectors, 'cosine'), atol=1e-6)


@pytest.mark.parametrize(
    'fields', [dict(position_at='shared'), dict(position_at='every_layer', pool='gap')], ids=str
)
def test_similarity_of_relative_positions(fields):
    """The embedding of an offset between patches is compared with offset zero."""
    params, similarities = similarity(position='relative', **fields)
    tables = (params['blocks'] if 'pool' in fields else params)['position']['relative']
    tables = np.asarray(tables).reshape(len(similarities), -1, 32)
    middle = tables.shape[1] // 2
    for matrix, table in zip(similarities.reshape(-1, 6, 6), tables, strict=True):
        for query in range(6):
            for key in range(6):
                expected = 1 - cdist(table[[middle]], table[[middle + key - query]], 'cosine')
                np.testing.assert_allclose(matrix[query, key], expected[0, 0], atol=1e-6)


@pytest.mark.parametrize(
    'fields',
    [
        dict(position='none'),
        dict(position='relative', position_at='every_layer', attention='axial', pool='gap'),
    ],
)
def test_models_without_position_embeddings_of_patches_are_refused(fields):
    with refused(kind='inapplicable'):
        similarity(**fields)


def test_a_resnet_without_position_embeddings_is_refused():
    resnet = small.make('bit')
    with refused(kind='inapplicable'):
        parameters.position_similarity(models.build(resnet.model, 7), resnet.params, (24, 24))
