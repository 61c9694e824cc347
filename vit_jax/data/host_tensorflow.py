"""TensorFlow for the input pipeline only: it must not claim device memory that JAX needs."""

import os

# TensorFlow would otherwise load Keras on import, which costs 0.1 GB and 3 s. `tf.keras` still
# loads Keras on first use.
_keras_setting = os.environ.get('TF_USE_LEGACY_KERAS', '0')
os.environ['TF_USE_LEGACY_KERAS'] = '1'
# TensorFlow reads its log level on import, and JAX reads the same variable later. A command sets 2,
# for errors alone. The errors of TensorFlow are lines about broken images that name no file, in the
# middle of the progress line. TensorFlow also raises each important error, and this project logs it
# with the name of the file.
_log_level = os.environ.get('TF_CPP_MIN_LOG_LEVEL')
if _log_level == '2':
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
import tensorflow as tf  # noqa: E402

os.environ['TF_USE_LEGACY_KERAS'] = _keras_setting
if _log_level == '2':
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = _log_level
tf.config.set_visible_devices([], 'GPU')
