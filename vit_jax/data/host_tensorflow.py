"""TensorFlow, kept off the accelerator, which is for JAX: it would reserve all the memory."""

import tensorflow as tf

tf.config.set_visible_devices([], 'GPU')

__all__ = ['tf']
