"""Log lines: plain on the terminal, with time and level in the workdir."""

import logging
import os

import absl.logging

LOGGER = logging.getLogger('vit_jax')


def to_terminal() -> None:
    """Shows this project's log lines on stderr; those of libraries only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter('%(message)s'))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    # Read when TensorFlow is imported. Its oneDNN kernels serve no operation that we use, and
    # announce themselves whatever the log level.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
    absl.logging.set_verbosity(absl.logging.WARNING)  # Orbax says at INFO what it does


def to_file(workdir: str) -> None:
    """Adds the log lines to WORKDIR/train.log as well."""
    os.makedirs(workdir, exist_ok=True)
    handler = logging.FileHandler(os.path.join(workdir, 'train.log'), encoding='utf-8')
    handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
    LOGGER.addHandler(handler)
