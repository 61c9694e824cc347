import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.support import interop
from vit_jax.objectives import losses


def numpy_loss(logits, targets, name):
    logits = np.asarray(logits, np.float64)
    if name == 'softmax':
        return -(targets * scipy.special.log_softmax(logits, -1)).sum(-1)
    p = scipy.special.expit(logits)
    return -(targets * np.log(p) + (1 - targets) * np.log1p(-p)).sum(-1)


@pytest.mark.parametrize('name', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_values(name, smoothing):
    logits = jax.random.normal(jax.random.key(0), (6, 5)) * 3
    labels = jnp.array([0, 1, 2, 3, 4, 0])
    one_hot = np.eye(5)[labels]
    targets = one_hot * (1 - smoothing) + smoothing / 5
    expected = numpy_loss(logits, targets, name)
    loss = losses.make_loss(name, smoothing)
    np.testing.assert_allclose(loss(logits, labels), expected, rtol=1e-5)
    np.testing.assert_allclose(loss(logits, jnp.asarray(one_hot)), expected, rtol=1e-5)


@pytest.mark.parametrize('temperature', [1.0, 4.0])
def test_distillation(temperature):
    """Equals big_vision, apart from its limit of 1e-8 on probabilities."""
    logits = np.random.default_rng(0).normal(0, 3, (6, 5))
    teacher_logits = np.random.default_rng(1).normal(0, 3, (6, 5))
    p = scipy.special.softmax(teacher_logits / temperature, -1)
    log_q = scipy.special.log_softmax(logits / temperature, -1)
    expected = temperature**2 * (p * (np.log(np.maximum(p, 1e-8)) - log_q)).sum(-1)
    logits = jnp.float32(logits)
    teacher_logits = jnp.float32(teacher_logits)
    np.testing.assert_allclose(
        losses.distillation(logits, teacher_logits, temperature), expected, rtol=1e-5
    )
    np.testing.assert_allclose(losses.distillation(logits, logits, temperature), 0)


def test_large_logits_stay_finite():
    logits = jnp.array([[-1e4, 1e4]])
    assert losses.distillation(logits, teacher_logits=-logits) == 2e4
    for name in losses.LOSSES:
        loss = losses.make_loss(name)
        value, grad = jax.value_and_grad(lambda x, loss=loss: loss(x, jnp.array([1])).sum())(
            jnp.array([[1e4, -1e4]])
        )
        assert np.isfinite(value)
        assert np.isfinite(grad).all()


WEIGHTS = (0.0, 0.3, 2.5, 1.0, 7.0)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('kind', ['classes', 'mixed'])
def test_class_weights_equal_pytorch(kind, smoothing):
    """Examples are compared; PyTorch's mean divides by the sum of the weights of the labels."""
    torch = interop.require('torch')
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (6, 5)).astype(np.float32)
    labels = np.array([0, 1, 2, 3, 4, 2])
    if kind == 'mixed':
        labels = (0.7 * np.eye(5)[labels] + 0.3 * np.eye(5)[labels[::-1]]).astype(np.float32)
    given = [torch.from_numpy(x) for x in (logits, labels)]
    settings = dict(weight=torch.tensor(WEIGHTS), label_smoothing=smoothing)
    expected = torch.nn.CrossEntropyLoss(reduction='none', **settings)(*given).numpy()
    ours = losses.make_loss('softmax', smoothing, WEIGHTS)(jnp.asarray(logits), jnp.asarray(labels))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    if kind == 'classes':
        mean = torch.nn.CrossEntropyLoss(**settings)(*given).numpy()
        np.testing.assert_allclose(ours.sum() / np.take(WEIGHTS, labels).sum(), mean, rtol=1e-5)


def test_class_weights_of_several_labels_equal_pytorch():
    torch = interop.require('torch')
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (6, 5)).astype(np.float32)
    labels = rng.integers(0, 2, (6, 5)).astype(np.float32)
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(WEIGHTS), reduction='none')(
        torch.from_numpy(logits), torch.from_numpy(labels)
    ).sum(-1)
    ours = losses.make_loss('sigmoid', class_weights=WEIGHTS)(jnp.asarray(logits), labels)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize('name', ['softmax', 'sigmoid'])
def test_equal_weights_change_nothing(name):
    logits, labels = jax.random.normal(jax.random.key(0), (6, 5)) * 3, jnp.arange(6) % 5
    np.testing.assert_allclose(
        losses.make_loss(name, 0.1, (1,) * 5)(logits, labels),
        losses.make_loss(name, 0.1)(logits, labels),
        rtol=1e-6,
    )
