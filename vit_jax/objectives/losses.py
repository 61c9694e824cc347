"""Classification losses and that of distillation, one value per example."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

LOSSES = {
    'softmax': optax.losses.softmax_cross_entropy,
    # Binary cross-entropy summed over classes, as for ImageNet-21k and JFT pre-training.
    'sigmoid': lambda *args: optax.losses.sigmoid_binary_cross_entropy(*args).sum(axis=-1),
}


def make_loss(
    name: str, label_smoothing: float = 0.0, class_weights: Sequence[float] = ()
) -> Callable:
    """Returns a function (logits, labels) -> loss per example in nats, by a name of LOSSES.

    `label_smoothing` is the share of a target spread evenly over all classes (arXiv 1512.00567).
    `class_weights` multiply what each class, as a label, adds to the loss: those of a mixed or
    smoothed target in its shares, as PyTorch's CrossEntropyLoss(weight) and
    BCEWithLogitsLoss(pos_weight). Nothing is divided by the sum of weights.
    """

    def loss(
        logits: Float[Array, 'batch classes'],
        labels: Int[Array, ' batch'] | Float[Array, 'batch classes'],
    ) -> Float[Array, ' batch']:
        """Labels are class indices, or targets that sum to one (one-hot or mixed).

        For the sigmoid loss they may sum to anything: 1 for each of several labels.
        """
        if jnp.issubdtype(labels.dtype, jnp.integer):
            labels = jax.nn.one_hot(labels, logits.shape[-1])
        targets = optax.losses.smooth_labels(labels, label_smoothing)
        if not class_weights:
            return LOSSES[name](logits, targets)
        weighted = targets * jnp.asarray(class_weights, jnp.float32)
        if name == 'softmax':
            return LOSSES[name](logits, weighted)
        terms = weighted * jax.nn.log_sigmoid(logits) + (1 - targets) * jax.nn.log_sigmoid(-logits)
        return -terms.sum(axis=-1)

    return loss


def make_evaluation_loss(name: str) -> Callable:
    """As make_loss, also of images with any number of labels.

    With 'softmax', the target of such an image is spread evenly over its labels.
    """
    given_loss = make_loss(name)

    def loss(logits, labels):
        if labels.ndim == 2 and name == 'softmax':
            labels = labels / jnp.maximum(labels.sum(axis=-1, keepdims=True), 1)
        return given_loss(logits, labels)

    return loss


def distillation(
    logits: Float[Array, 'batch classes'],
    wanted: Float[Array, 'batch classes'],
    temperature: float = 1.0,
) -> Float[Array, ' batch']:
    """T^2 KL(softmax(wanted / T) || softmax(logits / T)) in nats; `wanted` are a teacher's logits.

    The distance 'kl' of big_vision (evaluators/proj/distill/distance.py) for arXiv 2106.05237; T^2
    keeps gradients of one size (arXiv 1503.02531, section 2). There a probability of the teacher
    below 1e-8 counts as 1e-8 in its entropy, which no gradient depends on; here it does not.
    """
    log_wanted, log_found = (jax.nn.log_softmax(x / temperature) for x in (wanted, logits))
    return temperature**2 * optax.losses.kl_divergence_with_log_targets(log_found, log_wanted)
