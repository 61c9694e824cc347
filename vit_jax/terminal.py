"""What a command shows on the terminal: its own log lines, and little of libraries'."""

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
    """Shows the log lines of this project on stderr, and only warnings of libraries."""
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:  # as of a daemon, which has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), 'w'))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # else a notebook's, which takes all characters
            with contextlib.suppress(OSError):  # of a pipe that nobody reads; writing reports it
                stream.reconfigure(errors='backslashreplace')
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(errors.Formatter('%(message)s'))
        handler.addFilter(_is_news)  # which tqdm's handler keeps, in its place while a line is live
        LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)  # for train.log, which has all lines
    LOGGER.propagate = False
    # TensorFlow reads these when it is imported. Its warnings would be Python stacks, several for
    # every broken image; level 1 is what JAX sets if the user has set none. Its oneDNN kernels
    # serve no operation that is used here, and announce themselves at every log level.
    if os.environ.get('TF_CPP_MIN_LOG_LEVEL', '1') == '1':
        os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'
    os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
    # Orbax reports every action, and what it raises also as a traceback; so does asyncio for it.
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger('asyncio').setLevel(logging.CRITICAL)
    sys.unraisablehook = _report_unraisable


def write(text: str) -> None:
    """Prints a result on stdout at once, with control characters escaped.

    Raises UserError if stdout cannot be written; BrokenPipeError if nothing reads it any more.
    """
    with _stdout_named():
        print(errors.printable(text), flush=True)


def flush() -> None:
    """Writes what others have printed on stdout, such as --help; raises as `write`."""
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
            f'stdout cannot be written ({error.strerror}): send it to another file or device.'
        ) from error


def show_details() -> None:
    """Shows also what otherwise stands in train.log alone."""
    for handler in LOGGER.handlers:
        handler.removeFilter(_is_news)


def _is_news(record):
    return record.levelno >= logging.INFO


def _report_unraisable(unraisable, report=sys.unraisablehook):
    """Reports an exception that Python cannot raise, but for two kinds that are no news.

    One is what Orbax's coroutines and their loops leave behind after a failure. The other is a
    Ctrl-C that comes while Python collects garbage; the watchdog then ends the process.
    """
    of_a_loop = re.search("Event loop is closed|EventLoop' object has", str(unraisable.exc_value))
    is_interrupt = issubclass(unraisable.exc_type, KeyboardInterrupt)
    if not (of_a_loop or is_interrupt or inspect.iscoroutine(unraisable.object)):
        report(unraisable)


def log_as_process() -> None:
    """Lets process 0 alone report progress; warnings of the others begin with their number."""
    if not consensus.is_main():
        LOGGER.setLevel(logging.WARNING)
        mark = f'[process {jax.process_index()} of {consensus.count()}]'
        for handler in LOGGER.handlers:
            handler.setFormatter(errors.Formatter(f'{mark} %(message)s'))
