"""The terminal output of a command: its log lines and results, with few messages of libraries.

In: log records and results. Out: text on stderr and stdout. Imports errors and processes.
"""

import contextlib
import inspect
import io
import logging
import os
import re
import sys

import absl.logging
import jax

from vit_jax import errors
from vit_jax.errors import UserError
from vit_jax.processes import consensus

LOGGER = logging.getLogger('vit_jax')


def log_to_terminal() -> None:
    """Shows this project's log lines on stderr, and the warnings of libraries."""
    _prepare_streams()
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(errors.Formatter('%(message)s'))
        # While a live line is shown, tqdm replaces the handler and keeps its filters.
        handler.addFilter(_is_news)
        LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)  # train.log contains all lines
    LOGGER.propagate = False
    _mute_libraries()
    sys.unraisablehook = _report_unraisable


def _prepare_streams():
    """Makes stdout and stderr accept any character, even if the parent has closed them."""
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:  # closed, as for a daemon
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), 'w'))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # the stream of a notebook accepts any character
            with contextlib.suppress(OSError):  # a closed pipe: the next write reports it
                stream.reconfigure(errors='backslashreplace')


def _mute_libraries():
    # TensorFlow reads both variables when it is imported. Its warnings are Python stacks, several
    # for every broken image. JAX sets level 1 unless the user has set a level.
    if os.environ.get('TF_CPP_MIN_LOG_LEVEL', '1') == '1':
        os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'
    # No operation here uses the oneDNN kernels, which announce themselves at every log level.
    os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
    # Orbax and asyncio log errors as tracebacks before they raise them.
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger('asyncio').setLevel(logging.CRITICAL)


def write(text: str) -> None:
    """Prints a result on stdout and flushes it; escapes control characters.

    Raises:
      UserError: stdout cannot be written.
      BrokenPipeError: the reader of stdout has closed it.
    """
    with _stdout_named():
        print(errors.printable(text), flush=True)


def flush() -> None:
    """Writes text that others have printed on stdout, such as --help; raises like `write`."""
    with _stdout_named():
        sys.stdout.flush()


@contextlib.contextmanager
def _stdout_named():
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            f'stdout cannot be written ({error.strerror}): send it to another file or device.',
            kind='unwritable',
            file='stdout',
        ) from error


def show_details() -> None:
    """Shows details on the terminal that would otherwise only be in train.log."""
    for handler in LOGGER.handlers:
        handler.removeFilter(_is_news)


def _is_news(record):
    return record.levelno >= logging.INFO


def _report_unraisable(unraisable, report=sys.unraisablehook):
    """Reports an exception that Python cannot raise, except for two expected kinds.

    The coroutines and event loops of Orbax leave errors behind after a failure. A Ctrl-C may arrive
    while Python collects garbage; the watchdog then ends the process.
    """
    is_interrupt = issubclass(unraisable.exc_type, KeyboardInterrupt)
    is_coroutine = inspect.iscoroutine(unraisable.object)
    text = str(unraisable.exc_value)
    is_event_loop = re.search("Event loop is closed|EventLoop' object has", text) is not None
    if not (is_interrupt or is_coroutine or is_event_loop):
        report(unraisable)


def log_as_process() -> None:
    """Limits all processes except process 0 to warnings, which start with the process number."""
    if not consensus.is_main():
        LOGGER.setLevel(logging.WARNING)
        prefix = f'[process {jax.process_index()} of {consensus.count()}]'
        for handler in LOGGER.handlers:
            handler.setFormatter(errors.Formatter(f'{prefix} %(message)s'))
