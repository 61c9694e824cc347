"""TensorFlow, kept off the accelerators: it would reserve the memory that JAX needs."""

import os

# Else it loads Keras at once, for 0.1 GB and 3 s. `tf.keras` loads it when it is used.
_given, os.environ['TF_USE_LEGACY_KERAS'] = os.environ.get('TF_USE_LEGACY_KERAS', '0'), '1'
# TensorFlow reads its log level now, and JAX the same variable later. A command sets 2, for errors
# alone. TensorFlow's are lines on broken images that name no file, in the middle of the progress
# line; it raises what matters, and this project logs it with the name of the file.
_level = os.environ.get('TF_CPP_MIN_LOG_LEVEL')
if _level == '2':
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
import tensorflow as tf  # noqa: E402

os.environ['TF_USE_LEGACY_KERAS'] = _given
if _level == '2':
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = _level
tf.config.set_visible_devices([], 'GPU')
