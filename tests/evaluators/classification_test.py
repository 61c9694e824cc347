import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from tests.support.errors import refused
from tests.support.steps import assert_close, random_batch, setup
from vit_jax.evaluators import classification, evaluator
from vit_jax.objectives import losses


def batches():
    for count, correct, top, loss in [(4, 1, 3, 8.0), (4, 2, 4, 4.0), (1, 1, 1, 0.5)]:
        yield {'count': count, 'correct': correct, 'correct_top5': top, 'loss': loss}


def step(params, batch):
    del params
    return {name: jnp.float32(value) for name, value in batch.items()}


def test_every_example_weighs_the_same():
    values = classification.metrics(evaluator.total(step, None, batches()))
    assert values == pytest.approx(
        {
            'accuracy': 4 / 9,
            'accuracy_top5': 8 / 9,
            'loss': 12.5 / 9,
            'num_examples': 9,
        }
    )


def test_an_interruption_gives_none():
    answers = iter([False, True])
    assert evaluator.total(step, None, batches(), lambda: next(answers)) is None


def by_logits(model, loss):
    """A function (params, batch) -> sums."""

    def sums(params, batch):
        return classification.logit_sums(
            model.apply({'params': params}, batch['image']), batch, loss
        )

    return sums


def test_eval_step_counts_examples_of_the_mask():
    state, _, model, config = setup()
    params = jax.tree.map(lambda x: x + 0.2, state.params)
    params['head']['kernel'] = jax.random.normal(jax.random.key(1), (16, 3))
    batch = random_batch(8) | {'mask': np.array([1, 1, 0, 1, 0, 0, 1, 1], bool)}
    batch['image'][2] = np.nan  # masked examples must not matter
    step = functools.partial(
        evaluator.sums_in_parts, sums=by_logits(model, losses.make_loss(**config.loss))
    )
    sums = jax.jit(step)(params, batch)
    assert_close(jax.jit(functools.partial(step, accum_steps=4))(params, batch), sums)
    logits = np.asarray(jax.jit(model.apply)({'params': params}, batch['image']))[batch['mask']]
    labels = batch['label'][batch['mask']]
    loss = -np.asarray(jax.nn.log_softmax(logits))[np.arange(5), labels]
    assert float(sums['count']) == 5
    assert float(sums['correct']) == (logits.argmax(-1) == labels).sum()
    assert float(sums['correct_top5']) == 5  # of three classes every label is among the first five
    np.testing.assert_allclose(sums['loss'], loss.sum(), rtol=1e-5)
    counts = np.bincount(labels, minlength=3)
    correct = np.bincount(labels[logits.argmax(-1) == labels], minlength=3)
    np.testing.assert_array_equal(sums['class_count'], counts)
    np.testing.assert_array_equal(sums['class_correct'], correct)


@pytest.mark.parametrize('accum_steps', [1, 4])
def test_any_of_several_labels_is_right_and_images_without_labels_do_not_count(accum_steps):
    state, _, model, _ = setup()
    params = jax.tree.map(lambda x: x + 0.2, state.params)
    params['head']['kernel'] = jax.random.normal(jax.random.key(1), (16, 3))
    labels = np.array(
        [[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 0, 0], [0, 1, 1]],
        np.float32,
    )
    batch = random_batch(8) | {'label': labels, 'mask': np.arange(8) != 2}
    batch['image'][2] = np.nan
    step = jax.jit(
        functools.partial(
            evaluator.sums_in_parts,
            sums=by_logits(model, losses.make_loss('sigmoid')),
            accum_steps=accum_steps,
        )
    )
    totals = evaluator.total(step, params, [batch, batch])
    values = classification.metrics(totals)
    logits = np.asarray(jax.jit(model.apply)({'params': params}, batch['image']), np.float64)
    kept = [0, 1, 4, 5, 6, 7]
    logits, labels = logits[kept], labels[kept]
    np.testing.assert_allclose(totals['rows']['logits'], np.tile(logits, (2, 1)), rtol=1e-5)
    np.testing.assert_array_equal(totals['rows']['label'], np.tile(labels, (2, 1)) > 0)
    p = 1 / (1 + np.exp(-logits))
    loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).sum(-1).mean()
    assert values == pytest.approx(
        {
            'accuracy': labels[range(6), logits.argmax(-1)].mean(),
            'accuracy_top5': 1,
            'loss': loss,
            'num_examples': 12,
            'mean_average_precision': average_precision_score(labels, logits, average='macro'),
        },
        rel=1e-5,
    )


def test_a_split_without_labels_is_refused():
    with refused('content'):
        classification.metrics({'count': np.float64(0)})
