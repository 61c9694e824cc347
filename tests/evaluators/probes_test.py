import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import NearestCentroid

from vit_jax.evaluators import probes
from vit_jax.evaluators.features import Features

CLASSES = 5


def clusters(count, dimensions=24, seed=0, spread=1.5):
    """Features of classes that overlap, with unequal scales and far from zero, float32."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, dimensions))
    labels = rng.integers(0, CLASSES, count)
    values = centres[labels] + spread * rng.normal(size=(count, dimensions))
    return Features((values * np.geomspace(0.01, 10, dimensions) + 3).astype(np.float32), labels)


def whitened(train, queries):
    """The whitening of big_vision, written independently."""
    x = train.astype(np.float64)
    q = queries.astype(np.float64)
    mean = x.mean(0)
    std = x.std(0) + 1e-5
    return (x - mean) / std, (q - mean) / std


@pytest.mark.parametrize('count', [10, 24, 25, 300])  # fewer examples than features, and more
def test_least_squares_equal_scikit_learn(count):
    train, test = clusters(count), clusters(200, seed=1)
    l2 = (1.0, 32.0, 1024.0, 32768.0)
    found = probes.least_squares(train, test.values, CLASSES, l2)
    x, q = (
        np.concatenate([a, np.full((len(a), 1), 100.0)], axis=1)
        for a in whitened(train.values, test.values)
    )
    targets = np.where(train.labels[:, None] == np.arange(CLASSES), 1.0, -1.0)
    for value, scores in zip(l2, found, strict=True):
        expected = Ridge(alpha=value, fit_intercept=False).fit(x, targets).predict(q)
        np.testing.assert_allclose(scores, expected, rtol=1e-8, atol=1e-8)
        np.testing.assert_array_equal(scores.argmax(1), expected.argmax(1))
        (alone,) = probes.least_squares(train, test.values, CLASSES, (value,))
        np.testing.assert_array_equal(scores, alone)


def test_a_constant_feature_changes_nothing():
    train, test = clusters(50), clusters(20, seed=1)
    constant = [
        Features(np.pad(f.values, ((0, 0), (0, 1)), constant_values=0.25), f.labels)
        for f in (train, test)
    ]
    for method in (lambda *given: probes.least_squares(*given, (1024.0,))[0], probes.linear_probe):
        np.testing.assert_allclose(
            method(constant[0], constant[1].values, CLASSES),
            method(train, test.values, CLASSES),
            atol=5e-4,
        )


def test_nearest_prototype_is_the_nearest_centroid_of_directions():
    train, test = clusters(60), clusters(200, seed=1)
    x, q = (f / np.linalg.norm(f, axis=1, keepdims=True) for f in (train.values, test.values))
    model = NearestCentroid().fit(x, train.labels)
    # The angle to the centroid counts, and not its length.
    centroids = model.centroids_ / np.linalg.norm(model.centroids_, axis=1, keepdims=True)
    expected = ((q[:, None] - centroids) ** 2).sum(-1).argmin(1)
    found = probes.nearest_prototype(train, test.values, CLASSES)
    np.testing.assert_array_equal(found.argmax(1), expected)


@pytest.mark.parametrize('count', [7, 300])  # fewer than the neighbours, and more
def test_neighbours_vote_by_their_similarity(count):
    train, test = clusters(count), clusters(30, seed=1)
    found = probes.nearest_neighbours(train, test.values, CLASSES)
    for query, scores in zip(test.values.astype(float), found, strict=True):
        similarity = [
            query @ x / np.linalg.norm(query) / np.linalg.norm(x)
            for x in train.values.astype(float)
        ]
        expected = np.zeros(CLASSES)
        for k in np.argsort(similarity)[::-1][:20]:
            expected[train.labels[k]] += np.exp(similarity[k] / 0.07)
        np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_the_linear_probe_equals_logistic_regression_of_scikit_learn():
    train, test = clusters(300), clusters(200, seed=1)
    found = probes.linear_probe(train, test.values, CLASSES)
    x, q = whitened(train.values, test.values)
    model = LogisticRegression(C=1 / (len(x) * probes.PROBE_L2), tol=1e-10, max_iter=10_000)
    expected = model.fit(x, train.labels).decision_function(q)
    # A constant over the classes does not matter.
    found, expected = (s - s.mean(1, keepdims=True) for s in (found, expected))
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.mean(found.argmax(1) == expected.argmax(1)) > 0.99
