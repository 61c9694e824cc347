"""Attribution equals finite differences of the NumPy model, for every attention weight."""

import itertools

import jax
import numpy as np
import pytest
import scipy.special

from tests.support import reference
from tests.support.errors import refused
from tests.support.parameters import randomised
from tests.support.vit import DEFAULTS, random_images
from vit_jax import models
from vit_jax.inspection import attribution

TINY = dict(patch_size=(4, 4), hidden_size=8, num_layers=2, mlp_dim=6, num_heads=2)
CLASS = 1
STEP = 1e-5
REAL = scipy.special.softmax


class Softmax:
    """scipy.special.softmax, with a number added to one weight of one of its calls."""

    def __init__(self, call=-1, entry=None, added=0.0):
        self.calls = 0
        self.weights = []  # of each call
        self.call = call
        self.entry = entry
        self.added = added

    def __call__(self, x, axis):
        weights = REAL(x, axis=axis)
        if self.calls == self.call:
            weights[self.entry] += self.added
        self.calls += 1
        self.weights.append(weights)
        return weights


def by_differences(params, image, fields, monkeypatch):
    """Returns weights and their gradients, for every call of softmax, in float64."""

    def logit(softmax):
        monkeypatch.setattr(scipy.special, 'softmax', softmax)
        return reference.vit(params, image, {**DEFAULTS, **TINY, **fields})[0][CLASS]

    plain = Softmax()
    logit(plain)
    gradients = [np.zeros_like(x) for x in plain.weights]
    for call, gradient in enumerate(gradients):
        for entry in itertools.product(*map(range, gradient.shape)):
            higher = logit(Softmax(call, entry, STEP))
            lower = logit(Softmax(call, entry, -STEP))
            gradient[entry] = (higher - lower) / (2 * STEP)
    return plain.weights, gradients


def gradients(model, *args):
    return jax.jit(lambda *args: attribution.gradients(model, *args))(*args)


@pytest.mark.parametrize(
    'fields',
    [
        dict(pool='map', num_registers=1),
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                dict(),
                dict(pool='map'),
                dict(pool='gap', layer_scale_init=0.1),
                dict(num_registers=2),
                dict(pool='gap', num_registers=2),
            )
        ),
    ],
    ids=str,
)
def test_relevance_equals_finite_differences(fields, monkeypatch):
    image = random_images(1, 8, 8, 3)
    model = models.build(TINY, 3, **fields)
    params = randomised(model, image)
    observed, gradient = gradients(model, params, image, np.array([CLASS]))
    weights, differences = by_differences(params, image[0], fields, monkeypatch)
    prefix = observed.prefix
    tokens = 4 + prefix
    np.testing.assert_allclose(
        observed.weights[:, 0], np.reshape(weights[:4], (2, 2, tokens, tokens)), atol=1e-5
    )
    expected = np.reshape(differences[:4], (2, 2, tokens, tokens))
    np.testing.assert_allclose(gradient.weights[:, 0], expected, atol=1e-4 * np.abs(expected).max())
    relevance = np.eye(tokens)
    for layer in (0, 1):
        positive = np.maximum(expected[layer] * weights[2 * layer : 2 * layer + 2], 0).mean(0)
        relevance = relevance + positive @ relevance
    if 'pool' not in fields:
        relevance = relevance[0, prefix:]
    elif fields['pool'] == 'gap':
        relevance = relevance[prefix:, prefix:].mean(0) - 1 / 4
    else:
        np.testing.assert_allclose(
            gradient.pooling[0, :, prefix:],
            np.reshape(differences[4:], (2, 4)),
            atol=1e-4 * np.abs(differences[4:]).max(),
        )
        last = np.maximum(np.multiply(differences[4:], weights[4:]), 0).mean(0)
        relevance = (last @ relevance[prefix:, prefix:])[0]
    attribute = attribution.attributor(model)
    np.testing.assert_allclose(
        attribute(params, image, np.array([CLASS])).reshape(-1),
        relevance,
        atol=1e-4 * np.abs(relevance).max(),
    )


@pytest.mark.slow
def test_axial_gradients_are_zero_exactly_between_patches_without_attention():
    image = random_images(2, 8, 12, 3)
    model = models.build(TINY, 3, attention='axial', pool='gap')
    params = randomised(model, image)
    classes = np.array([2, 0])
    observed, gradient = gradients(model, params, image, classes)
    assert gradient.weights.shape == observed.weights.shape == (4, 2, 2, 6, 6)
    assert attribution.attributor(model)(params, image, classes).shape == (2, 2, 3)
    zero = np.asarray(observed.weights) == 0
    np.testing.assert_array_equal(np.asarray(gradient.weights)[zero], 0)
    assert np.abs(np.asarray(gradient.weights)[~zero]).min() > 0


@pytest.mark.parametrize(
    ('model', 'classes'),
    [(TINY | dict(pool='none'), 3), (TINY, 0), ('r50x1', 3)],
    ids=['no-pool', 'no-classes', 'resnet'],
)
def test_models_without_attribution_are_refused(model, classes):
    with refused(kind='inapplicable'):
        attribution.attributor(models.build(model, classes))
