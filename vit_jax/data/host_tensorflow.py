"""TensorFlow, kept off the accelerators: it would reserve the memory that JAX needs."""

import gc
import os

# Else it loads Keras at once, for 0.1 GB and 3 s. `tf.keras` loads it when it is used.
_given, os.environ['TF_USE_LEGACY_KERAS'] = os.environ.get('TF_USE_LEGACY_KERAS', '0'), '1'
import tensorflow as tf  # noqa: E402

os.environ['TF_USE_LEGACY_KERAS'] = _given
gc.freeze()  # its modules stay: to look for garbage among them takes 0.3 s
tf.config.set_visible_devices([], 'GPU')
