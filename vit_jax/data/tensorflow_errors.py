"""Errors of TensorFlow: the classes that are caused by the storage, and readable messages."""

import re

from vit_jax.data.host_tensorflow import tf

# The file may be good: skipping an example because of such an error would change the run.
STORAGE_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.ResourceExhaustedError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)


def reason(error: tf.errors.OpError) -> str:
    """The message in one line, without the names of graph nodes and the Python stack."""
    cause = re.search(r'^(?:\w+\.)*\w*Error: (.+)$', error.message, re.MULTILINE)
    if cause:
        return cause[1]
    additions = r'\[?\[?\{\{.*?\}\}(\]\])? ?|\[Op:.*|name: *$'
    return ' '.join(re.sub(additions, '', error.message, flags=re.DOTALL).split())
