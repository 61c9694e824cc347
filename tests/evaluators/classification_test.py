import jax.numpy as jnp
import pytest

from vit_jax.evaluators import classification


def batches():
    for count, correct, top, loss in [(4, 1, 3, 8.0), (4, 2, 4, 4.0), (1, 1, 1, 0.5)]:
        yield {'count': count, 'correct': correct, 'correct_top5': top, 'loss': loss}


def step(params, batch):
    del params
    return {name: jnp.float32(value) for name, value in batch.items()}


def test_every_example_weighs_the_same():
    values = classification.evaluate(step, None, batches())
    assert values == pytest.approx({'eval/accuracy': 4 / 9, 'eval/accuracy_top5': 8 / 9,
                                    'eval/loss': 12.5 / 9, 'eval/num_examples': 9})


def test_interrupted_in_the_middle_gives_nothing():
    answers = iter([False, True])
    assert classification.evaluate(step, None, batches(), lambda: next(answers)) is None
