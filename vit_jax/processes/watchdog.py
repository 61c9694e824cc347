"""Ends this process if it does not react to a signal within some seconds.

Python runs the handler of a signal in the main thread, between two of its instructions. While the
main thread compiles a program or reads from a pipe in C++, no handler runs. The C part of Python
receives every signal immediately and writes its number to a file descriptor, which a thread of this
module reads.
"""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator

from vit_jax.processes import launch

log = logging.getLogger(__name__)

GRACE = 6.0  # seconds from a signal to the end of the process
AFTER_TWO = 2.0  # seconds from a second Ctrl-C to the end of the process, whatever is unsaved
REPEAT = 1.0  # seconds within which a second Ctrl-C may be a bouncing key
_LAST_MESSAGE = 1.0  # seconds to wait for the message, because the terminal may be blocked
# Written to the file descriptor, like the numbers of signals.
_STOP = 0
_DEADLINE_CHANGED = 255


class Watchdog:
    """A thread that ends the process after a signal: GRACE seconds after SIGTERM or SIGINT.

    A second SIGINT shortens the time to AFTER_TWO seconds. While the main thread has something to
    save (`set_patient`), a single signal does not end the process, but two SIGINT signals always
    do.
    """

    def __init__(self):
        """Starts the thread. Only the main thread may create a Watchdog.

        Raises:
          RuntimeError: no thread can be started.
        """
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._is_patient = False
        self._first = None
        self._first_time = 0.0
        self._not_before = 0.0  # time that is GRACE seconds after the main thread has saved
        self._second_deadline = None
        self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            signal.set_wakeup_fd(self._previous)
            os.close(self._writer)
            os.close(self._reader)
            raise

    def close(self) -> None:
        """Stops the thread."""
        signal.set_wakeup_fd(self._previous)
        self._write(_STOP)
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def set_patient(self, is_patient: bool) -> None:
        """Sets whether the main thread has something to save before a signal ends it."""
        if self._is_patient and not is_patient:
            self._not_before = time.monotonic() + GRACE
        self._is_patient = is_patient
        self._write(_DEADLINE_CHANGED)

    def _write(self, number):
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread is awake anyway
            os.write(self._writer, bytes([number]))

    def _watch(self):
        while True:
            deadline = self._deadline()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._reader], [], [], timeout)
            if not readable:
                self._end()
            for number in os.read(self._reader, 64):
                if number == _STOP:
                    return
                if number in (signal.SIGINT, signal.SIGTERM):
                    self._note(signal.Signals(number))

    def _note(self, signum):
        now = time.monotonic()
        if self._first is None:
            self._first = signum
            self._first_time = now
        elif signum == signal.SIGINT and self._second_deadline is None:
            is_bounce = self._first == signal.SIGINT and now - self._first_time < REPEAT
            self._second_deadline = now + (GRACE if is_bounce else AFTER_TWO)
        elif signum == signal.SIGINT:
            self._second_deadline = min(self._second_deadline, now + AFTER_TWO)

    def _deadline(self):
        """The time at which the process must end, or None."""
        deadlines = []
        if self._second_deadline is not None:
            deadlines.append(self._second_deadline)
        if self._first is not None and not self._is_patient:
            deadlines.append(max(self._first_time + GRACE, self._not_before))
        return min(deadlines, default=None)

    def _end(self):
        """Ends the process with the exit code of the signal."""
        signum = self._first
        if self._second_deadline is not None:
            signum = signal.SIGINT
        # A terminal that nobody reads would block this thread.
        message = threading.Thread(target=self._log_reason, args=(signum,), daemon=True)
        message.start()
        message.join(_LAST_MESSAGE)
        os._exit(128 + signum)

    def _log_reason(self, signum):
        log.warning(
            'stopped by %s before the current work was finished: unsaved work is lost. To '
            'continue a run, start the same command again.',
            signum.name,
        )
        launch.drop_last_line()


_current: Watchdog | None = None


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Runs a Watchdog in this context. Only the main thread of a command may call this function.

    If no thread can be started, for lack of memory, the context has no Watchdog, and the command
    itself reports the missing memory.
    """
    global _current
    try:
        _current = Watchdog()
    except RuntimeError as error:
        log.debug('no watchdog: %s', error)
    try:
        yield
    finally:
        if _current is not None:
            _current.close()
        _current = None


def set_patient(is_patient: bool) -> None:
    """Calls `set_patient` of the Watchdog of this process, if there is one."""
    if _current is not None:
        _current.set_patient(is_patient)
