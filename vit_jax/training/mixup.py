"""MixUp: training on weighted means of two examples and of their labels (arXiv 1710.09412)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from vit_jax.evaluators.batches import Batch

# This number is folded into the key of a step for the MixUp share. The parts of a batch fold in 0,
# 1, 2, ...
STREAM = 2**32 - 1


def mix(batch: Batch, alpha: float, key: Array, num_classes: int, other: str = 'reversed') -> Batch:
    """Replaces example i of a batch by s x_i + (1 - s) x_j, both image and label.

    One share s ~ Beta(alpha, alpha) is drawn for the whole batch.

    Args:
      batch: a batches.Batch; its `mask` does not change.
      alpha: the parameter of the distribution, above 0. Near 0 most shares are close to 0 or 1; at
        1 they are uniform.
      key: the key of the random share.
      num_classes: the number of classes.
      other: 'reversed' has j = n-1-i of n, as in BiT (arXiv 1912.11370, section 3.3;
        input_pipeline_tf2_or_jax.py of big_transfer). 'next' has j = i-1 and s of at least one
        half, as in big_vision (utils.get_mixup). Both projects mix the examples of one host or
        device; this function mixes the examples of all devices.

    Returns:
      The batch with mixed images and labels, float32 [batch, classes].
    """
    share = jax.random.beta(key, alpha, alpha)
    if other == 'next':
        share = jnp.maximum(share, 1 - share)
    labels = batch['label']
    if jnp.issubdtype(labels.dtype, jnp.integer):
        labels = jax.nn.one_hot(labels, num_classes)

    def mixed(x):
        partner = x[::-1] if other == 'reversed' else jnp.roll(x, 1, axis=0)
        return share * x + (1 - share) * partner

    return batch | {'image': mixed(batch['image']), 'label': mixed(labels)}
