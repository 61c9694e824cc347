"""Log lines: plain on the terminal, with time and level in the workdir."""

import logging
import os

import absl.logging
import jax

from vit_jax.errors import UserError

LOGGER = logging.getLogger('vit_jax')


def to_terminal() -> None:
    """Shows this project's log lines on stderr; those of libraries only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter('%(message)s'))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    # Read when TensorFlow is imported: no warnings, which would be Python stacks for every broken
    # image, several times. 1 is what JAX sets where nobody did. TensorFlow's oneDNN kernels serve
    # no operation that we use, and announce themselves whatever the log level.
    if os.environ.get('TF_CPP_MIN_LOG_LEVEL', '1') == '1':
        os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'
    os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
    absl.logging.set_verbosity(absl.logging.WARNING)  # Orbax says at INFO what it does


def of_process(process: int, count: int) -> None:
    """Marks the terminal's lines of all processes but the first, which alone says how it goes."""
    if process:
        LOGGER.setLevel(logging.WARNING)
        for handler in LOGGER.handlers:
            handler.setFormatter(logging.Formatter(f'[process {process} of {count}] %(message)s'))


def report(error: BaseException) -> None:
    """Logs what ends the program: as one message if a user can mend it."""
    if isinstance(error, UserError):
        LOGGER.error('error: %s', error)
    elif isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' in str(error):
        LOGGER.error('error: out of memory: %s\nLower batch_size or image_size, or add '
                     '--config.accum_steps=0, which cuts the batch into parts that fit.',
                     str(error).partition('\n')[0].removeprefix('RESOURCE_EXHAUSTED: '))
    else:
        LOGGER.error('stopped by an unexpected error', exc_info=error)


def to_file(workdir: str) -> None:
    """Adds the log lines to WORKDIR/train.log as well; the directory must be there."""
    handler = logging.FileHandler(os.path.join(workdir, 'train.log'), encoding='utf-8')
    handler.setFormatter(logging.Formatter('%(asctime)s %(levelname)s %(message)s'))
    LOGGER.addHandler(handler)
