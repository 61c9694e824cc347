"""Classification losses, one value per example."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


def softmax_cross_entropy(logits: Float[Array, 'batch classes'],
                          targets: Float[Array, 'batch classes']) -> Float[Array, ' batch']:
    """-sum_k targets_k log softmax(logits)_k."""
    return optax.losses.softmax_cross_entropy(logits, targets)


def sigmoid_cross_entropy(logits: Float[Array, 'batch classes'],
                          targets: Float[Array, 'batch classes']) -> Float[Array, ' batch']:
    """Binary cross-entropy summed over classes, as for ImageNet-21k and JFT pre-training."""
    return optax.losses.sigmoid_binary_cross_entropy(logits, targets).sum(axis=-1)


LOSSES = {'softmax': softmax_cross_entropy, 'sigmoid': sigmoid_cross_entropy}


def classification_loss(
        logits: Float[Array, 'batch classes'],
        labels: Int[Array, ' batch'] | Float[Array, 'batch classes'],
        name: str, label_smoothing: float = 0.0) -> Float[Array, ' batch']:
    """Loss per example in nats.

    Args:
      logits: unnormalised scores.
      labels: class indices, or targets that sum to one (one-hot or mixed).
      name: a key of LOSSES.
      label_smoothing: share of the target spread evenly over all classes (arXiv 1512.00567).
    """
    if jnp.issubdtype(labels.dtype, jnp.integer):
        labels = jax.nn.one_hot(labels, logits.shape[-1])
    return LOSSES[name](logits, optax.losses.smooth_labels(labels, label_smoothing))
