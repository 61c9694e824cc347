"""Attribution equals finite differences of the NumPy model, entry by entry."""

import itertools

import jax
import numpy as np
import pytest
import scipy.special

from tests.support import reference
from tests.support.parameters import randomised
from tests.support.vit import DEFAULTS, random_images
from vit_jax import models
from vit_jax.errors import Inapplicable
from vit_jax.inspection import attribution

TINY = dict(patch_size=(4, 4), hidden_size=8, num_layers=2, mlp_dim=6, num_heads=2)
CLASS, STEP = 1, 1e-5
REAL = scipy.special.softmax


class Softmax:
    """scipy.special.softmax, which adds a number to one weight of one of its calls."""

    def __init__(self, call=-1, entry=None, added=0.0):
        self.calls, self.found = 0, []
        self.call, self.entry, self.added = call, entry, added

    def __call__(self, x, axis):
        weights = REAL(x, axis=axis)
        if self.calls == self.call:
            weights[self.entry] += self.added
        self.calls += 1
        self.found.append(weights)
        return weights


def by_differences(params, image, fields, monkeypatch):
    """Weights and their gradients, a matrix for every call of softmax, in float64."""

    def logit(softmax):
        monkeypatch.setattr(scipy.special, 'softmax', softmax)
        return reference.vit(params, image, {**DEFAULTS, **TINY, **fields})[0][CLASS]

    plain = Softmax()
    logit(plain)
    gradients = [np.zeros_like(x) for x in plain.found]
    for call, gradient in enumerate(gradients):
        for entry in itertools.product(*map(range, gradient.shape)):
            up, down = Softmax(call, entry, STEP), Softmax(call, entry, -STEP)
            gradient[entry] = (logit(up) - logit(down)) / (2 * STEP)
    return plain.found, gradients


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
def test_equals_finite_differences(fields, monkeypatch):
    image = random_images(1, 8, 8, 3)
    model = models.build(TINY, 3, **fields)
    params = randomised(model, image)
    found, gradient = gradients(model, params, image, np.array([CLASS]))
    weights, differences = by_differences(params, image[0], fields, monkeypatch)
    prefix = found.prefix
    tokens = 4 + prefix
    np.testing.assert_allclose(
        found.weights[:, 0], np.reshape(weights[:4], (2, 2, tokens, tokens)), atol=1e-5
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
def test_axial_gradients_are_those_of_each_line():
    """Zero between patches that do not attend to one another, and only there."""
    image = random_images(2, 8, 12, 3)
    model = models.build(TINY, 3, attention='axial', pool='gap')
    params = randomised(model, image)
    classes = np.array([2, 0])
    found, gradient = gradients(model, params, image, classes)
    assert gradient.weights.shape == found.weights.shape == (4, 2, 2, 6, 6)
    assert attribution.attributor(model)(params, image, classes).shape == (2, 2, 3)
    zero = np.asarray(found.weights) == 0
    np.testing.assert_array_equal(np.asarray(gradient.weights)[zero], 0)
    assert np.abs(np.asarray(gradient.weights)[~zero]).min() > 0


@pytest.mark.parametrize(
    ('fields', 'classes', 'message'),
    [
        (dict(pool='none'), 3, 'model.pool is none: every token has logits of its own'),
        (dict(), 0, 'the weights have no head and so no classes'),
        ('r50x1', 3, 'a ResNet has no attention between patches'),
    ],
    ids=str,
)
def test_models_without_it(fields, classes, message):
    model = models.build(*(['r50x1'] if fields == 'r50x1' else [TINY | fields]), classes)
    with pytest.raises(Inapplicable, match=message):
        attribution.attributor(model)
