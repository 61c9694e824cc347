"""A temperature in the head is in every probability of the model."""

import numpy as np

from tests.support import small
from vit_jax import weights as weights_lib
from vit_jax.fitting import calibrated, probe
from vit_jax.fitting.extraction import logits_of

RNG = np.random.default_rng(0)


def test_weights_with_the_head_have_its_probabilities(tmp_path):
    given = small.make('vit')
    forward = weights_lib.predictor(given)
    batch = small.images(given, 8)
    features, _ = forward(batch)
    head = probe.Head(RNG.normal(size=(features.shape[1], 3)), RNG.normal(size=3))
    model = probe.with_head(given, head, ['a', 'b', 'c'], multi_label=False)
    model = calibrated.with_temperature(model, 2.5)
    path = str(tmp_path / 'model.safetensors')
    weights_lib.save(model, path, 'vit_jax')
    loaded = weights_lib.load(path)
    _, values = weights_lib.predictor(loaded)(batch)
    expected = probe.probabilities(head.logits(features) / 2.5, False)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_allclose(logits_of(loaded, features), head.logits(features) / 2.5, atol=1e-5)
    assert (list(loaded.classes), loaded.loss) == (['a', 'b', 'c'], 'softmax')
