"""MixUp: training on weighted means of two examples and of their labels (arXiv 1710.09412)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from vit_jax.evaluators.batches import Batch

# Of the keys that are folded out of that of a step; those of a batch's parts count from 0.
STREAM = 2**32 - 1


def mix(batch: Batch, alpha: float, key: Array, num_classes: int) -> Batch:
    """The batch with example i of n replaced by s x_i + (1 - s) x_(n-1-i), of image and label.

    One share s ~ Beta(alpha, alpha) is drawn for the batch, which is mixed with itself in reverse,
    as in BiT (arXiv 1912.11370, section 3.3; input_pipeline_tf2_or_jax.py of big_transfer, where
    the batch is that of one host; here it is that of all). Labels become float32 [batch, classes].

    Args:
      batch: see batches.Batch; `mask` is left as it is.
      alpha: above 0; near 0 nearly all shares are nearly 0 or 1, at 1 they are uniform.
    """
    share = jax.random.beta(key, alpha, alpha)
    labels = batch['label']
    if jnp.issubdtype(labels.dtype, jnp.integer):
        labels = jax.nn.one_hot(labels, num_classes)
    image, label = (share * x + (1 - share) * x[::-1] for x in (batch['image'], labels))
    return batch | {'image': image, 'label': label}
