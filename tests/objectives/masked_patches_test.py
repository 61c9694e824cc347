import numpy as np
import pytest
from scipy.special import log_softmax

from vit_jax.objectives import masked_patches


def outputs(parts=4):
    rng = np.random.default_rng(0)
    return {
        'predictions': rng.normal(size=(3, 5, parts, 512)).astype(np.float32),
        'targets': rng.integers(0, 512, (3, 5, parts)).astype(np.int32),
        'corrupted': np.array([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], bool),
    }


def test_loss_is_the_mean_over_the_corrupted_patches():
    values = outputs()
    log_p = np.take_along_axis(
        log_softmax(values['predictions'], -1), values['targets'][..., None], -1
    )[..., 0]
    expected = [-log_p[i][values['corrupted'][i]].mean() for i in range(3)]
    np.testing.assert_allclose(masked_patches.loss(values), expected, rtol=1e-5)


def test_loss_of_pixels_is_the_squared_error():
    values = outputs(1) | {
        'predictions': np.ones((3, 5, 12), np.float32),
        'targets': np.full((3, 5, 12), -0.5, np.float32),
    }
    np.testing.assert_allclose(masked_patches.loss(values), [2.25] * 3)


def test_sums_count_images_of_the_mask_and_right_colours():
    values = outputs(1)
    right = np.zeros((3, 5), bool)
    right[1, 1] = right[2, 0] = right[2, 3] = True
    values['predictions'][right] = np.eye(512, dtype=np.float32)[values['targets'][right]] * 50
    batch = {'label': np.zeros(3, np.int32), 'mask': np.array([1, 1, 0], bool)}
    sums = masked_patches.sums(values, batch)
    assert float(sums['count']) == 2
    assert float(sums['correct']) == pytest.approx(1 / 3)
    assert float(sums['correct_top5']) >= float(sums['correct'])
    assert float(sums['loss']) == pytest.approx(float(masked_patches.loss(values)[:2].sum()))
