"""TensorFlow, kept off the accelerators: it would reserve the memory that JAX needs."""

import tensorflow as tf

tf.config.set_visible_devices([], 'GPU')

__all__ = ['tf']
