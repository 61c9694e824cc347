"""Features of files are those of prediction, in the order of the files."""

import numpy as np

from tests.support import small
from tests.support.datasets import write_images
from vit_jax import predict
from vit_jax.fitting.extraction import Extractor, logits_of


def test_features_and_logits_are_those_of_predict(tmp_path):
    write_images(tmp_path, ['a', 'b'], 4)
    files = sorted(map(str, tmp_path.rglob('*.png')))
    weights = small.make('vit')
    features = Extractor(weights, 3)(files)
    _, representations, probabilities = predict.run(weights, files, 8)
    np.testing.assert_allclose(features, representations, atol=1e-5)
    logits = logits_of(weights, features)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
