import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.steps import assert_close, random_batch, setup
from vit_jax.evaluators import classification
from vit_jax.training import losses


def batches():
    for count, correct, top, loss in [(4, 1, 3, 8.0), (4, 2, 4, 4.0), (1, 1, 1, 0.5)]:
        yield {'count': count, 'correct': correct, 'correct_top5': top, 'loss': loss}


def step(params, batch):
    del params
    return {name: jnp.float32(value) for name, value in batch.items()}


def test_every_example_weighs_the_same():
    values = classification.metrics(classification.total(step, None, batches()))
    assert values == pytest.approx({'eval/accuracy': 4 / 9, 'eval/accuracy_top5': 8 / 9,
                                    'eval/loss': 12.5 / 9, 'eval/num_examples': 9})


def test_interrupted_in_the_middle_gives_nothing():
    answers = iter([False, True])
    assert classification.total(step, None, batches(), lambda: next(answers)) is None


def test_eval_step_counts_what_the_mask_leaves():
    state, _, model, config = setup()
    params = jax.tree.map(lambda x: x + 0.2, state.params)
    params['head']['kernel'] = jax.random.normal(jax.random.key(1), (16, 3))
    batch = random_batch(8) | {'mask': np.array([1, 1, 0, 1, 0, 0, 1, 1], bool)}
    batch['image'][2] = np.nan  # what is masked must not be looked at
    step = functools.partial(classification.eval_step, model=model,
                             loss=losses.make_loss(**config.loss))
    sums = jax.jit(step)(params, batch)
    assert_close(jax.jit(functools.partial(step, accum_steps=4))(params, batch), sums)
    logits = np.asarray(jax.jit(model.apply)({'params': params}, batch['image']))[batch['mask']]
    labels = batch['label'][batch['mask']]
    loss = -np.asarray(jax.nn.log_softmax(logits))[np.arange(5), labels]
    assert float(sums['count']) == 5
    assert float(sums['correct']) == (logits.argmax(-1) == labels).sum()
    assert float(sums['correct_top5']) == 5  # of three classes every label is among the first five
    np.testing.assert_allclose(sums['loss'], loss.sum(), rtol=1e-5)
