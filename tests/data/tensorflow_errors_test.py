"""Readable messages of errors of TensorFlow."""

from vit_jax.data import tensorflow_errors
from vit_jax.data.host_tensorflow import tf


def test_the_reason_is_one_line_without_the_names_of_graph_nodes():
    message = (
        'Graph execution error:\n\nInput is empty.\n\t [[{{node DecodePng}}]] '
        '[Op:__inference_decode_7]'
    )
    error = tf.errors.InvalidArgumentError(None, None, message)
    assert tensorflow_errors.reason(error) == 'Graph execution error: Input is empty.'


def test_the_reason_of_a_python_error_is_its_message():
    message = 'ValueError: the file is empty\nTraceback (most recent call last):\n  File "x"'
    error = tf.errors.UnknownError(None, None, message)
    assert tensorflow_errors.reason(error) == 'the file is empty'
