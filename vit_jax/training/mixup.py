"""MixUp: training on weighted means of two examples and of their labels (arXiv 1710.09412)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from vit_jax.evaluators.batches import Batch

# Of the keys that are folded out of that of a step; those of a batch's parts count from 0.
STREAM = 2**32 - 1


def mix(batch: Batch, alpha: float, key: Array, num_classes: int, other: str = 'reversed') -> Batch:
    """The batch with example i replaced by s x_i + (1 - s) x_j, of image and label.

    One share s ~ Beta(alpha, alpha) is drawn for the batch. Labels become float32 [batch, classes].

    Args:
      batch: see batches.Batch; `mask` is left as it is.
      alpha: above 0; near 0 nearly all shares are nearly 0 or 1, at 1 they are uniform.
      other: 'reversed' has j = n-1-i of n, as in BiT (arXiv 1912.11370, section 3.3;
        input_pipeline_tf2_or_jax.py of big_transfer). 'next' has j = i-1, and s is at least half,
        as in big_vision (utils.get_mixup). There the batch is that of one host or device; here it
        is that of all.
    """
    share = jax.random.beta(key, alpha, alpha)
    if other == 'next':
        share = jnp.maximum(share, 1 - share)
    labels = batch['label']
    if jnp.issubdtype(labels.dtype, jnp.integer):
        labels = jax.nn.one_hot(labels, num_classes)
    image, label = (
        share * x + (1 - share) * (x[::-1] if other == 'reversed' else jnp.roll(x, 1, axis=0))
        for x in (batch['image'], labels)
    )
    return batch | {'image': image, 'label': label}
