import functools

import jax
import numpy as np

from tests.support.errors import refused
from tests.support.steps import random_batch, setup
from vit_jax.evaluators import features


def batches(masks):
    for seed, mask in enumerate(masks):
        yield random_batch(4, seed) | {'mask': np.array(mask, bool)}


def step(params, batch):
    del params
    return {
        'rows': {
            'features': batch['image'].reshape(4, -1),
            'label': batch['label'],
            'mask': batch['mask'],
        }
    }


def test_every_unmasked_image_has_features_once_and_in_order():
    masks = [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 0, 0), (1, 0, 0, 0)]
    extracted = features.extract(step, None, batches(masks))
    kept = [
        (batch['image'][i].ravel(), batch['label'][i])
        for batch in batches(masks)
        for i in np.flatnonzero(batch['mask'])
    ]
    np.testing.assert_array_equal(extracted.values, [values for values, _ in kept])
    np.testing.assert_array_equal(extracted.labels, [label for _, label in kept])


def test_an_interruption_gives_none():
    answers = iter([False, True])
    assert features.extract(step, None, batches([(1,) * 4] * 3), lambda: next(answers)) is None


def test_features_that_are_not_finite_are_refused():
    def diverged(params, batch):
        out = step(params, batch)
        out['rows']['features'][1, 3] = np.nan
        return out

    with refused('content') as error:
        features.extract(diverged, None, batches([(1, 1, 1, 1), (0, 1, 1, 1)]))
    assert 'features of 2 of 7 images are not finite' in str(error.value)


def test_parts_of_a_batch_keep_their_places():
    state, _, model, _ = setup()
    batch = random_batch(8)
    whole, parts = (
        jax.jit(
            functools.partial(features.step, model=model, name='pre_logits', accum_steps=steps)
        )(state.params, batch)['rows']
        for steps in (1, 4)
    )
    largest = np.abs(whole['features']).max()
    np.testing.assert_allclose(parts['features'] / largest, whole['features'] / largest, atol=1e-6)
    for name in ('label', 'mask'):
        np.testing.assert_array_equal(parts[name], batch[name])
