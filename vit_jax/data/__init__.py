"""Where the pixels come from and in which order; the only part of vit_jax that uses TensorFlow."""

import tensorflow as tf

# JAX owns the accelerator; TensorFlow would reserve all its memory on first use.
tf.config.set_visible_devices([], 'GPU')

from vit_jax.data.pipeline import BATCHES_IN_MEMORY, eval_batches, train_batches  # noqa: E402
from vit_jax.data.preprocess import preprocess_eval  # noqa: E402
from vit_jax.data.sources import open_source  # noqa: E402

__all__ = ['BATCHES_IN_MEMORY', 'eval_batches', 'open_source', 'preprocess_eval', 'train_batches']
