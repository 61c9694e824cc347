"""The losses of classification and distillation, one value per example."""

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
    """Returns a function (logits, labels) -> loss per example in nats.

    Args:
      name: a key of LOSSES.
      label_smoothing: share of a target that is spread evenly over all classes (arXiv 1512.00567).
      class_weights: factors of the classes in the loss. A mixed or smoothed target weighs each
        class by its share, as in PyTorch's CrossEntropyLoss(weight) and
        BCEWithLogitsLoss(pos_weight). The loss is not divided by the sum of the weights. () means 1
        for all classes.
    """

    def loss(
        logits: Float[Array, 'batch classes'],
        labels: Int[Array, ' batch'] | Float[Array, 'batch classes'],
    ) -> Float[Array, ' batch']:
        """The loss per example in nats.

        Args:
          logits: the logits of all classes.
          labels: class indices, or targets that sum to one (one-hot or mixed). For the sigmoid
            loss they may have any sum, with 1 for each of several labels.
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
    """Returns a loss as make_loss does, which also accepts images with any number of labels.

    With 'softmax' the target of an image with several labels is spread evenly over them.
    """
    training_loss = make_loss(name)

    def loss(logits, labels):
        if labels.ndim == 2 and name == 'softmax':
            labels = labels / jnp.maximum(labels.sum(axis=-1, keepdims=True), 1)
        return training_loss(logits, labels)

    return loss


def distillation(
    logits: Float[Array, 'batch classes'],
    teacher_logits: Float[Array, 'batch classes'],
    temperature: float = 1.0,
) -> Float[Array, ' batch']:
    """Returns T^2 KL(softmax(teacher_logits / T) || softmax(logits / T)) in nats.

    The factor T^2 keeps the size of gradients (arXiv 1503.02531, section 2). This is the distance
    'kl' of big_vision (evaluators/proj/distill/distance.py) for arXiv 2106.05237, with one
    exception. In the teacher's entropy, big_vision counts probabilities below 1e-8 as 1e-8, which
    changes no gradient.
    """
    log_targets = jax.nn.log_softmax(teacher_logits / temperature)
    log_predictions = jax.nn.log_softmax(logits / temperature)
    return temperature**2 * optax.losses.kl_divergence_with_log_targets(
        log_predictions, log_targets
    )
