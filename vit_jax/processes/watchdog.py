"""Ends this process when it does not follow a signal within some seconds.

Python runs the handler of a signal in the main thread, between two of its instructions. While the
main thread compiles a program, or reads from a pipe, in C++, no handler runs. Python's own part in
C notes every signal at once, and writes its number to a file descriptor. A thread reads it here.
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
AFTER_TWO = 2.0  # seconds from a second Ctrl-C, which asks for nothing more
REPEAT = 1.0  # a second Ctrl-C within these seconds may be a key that bounces
_LAST_MESSAGE = 1.0  # seconds for the message, whose reader may be blocked itself
# What is written to the file descriptor beside the numbers of signals.
_STOP, _LOOK_AGAIN = 0, 255


class Watchdog:
    """A thread that ends the process GRACE seconds after SIGTERM or SIGINT, AFTER_TWO after two.

    While the main thread has something to save (`set_patient`), one signal alone does not end the
    process. Two Ctrl-C always do.
    """

    def __init__(self):
        """Begins to watch. Only the main thread may do that.

        Raises RuntimeError if no thread can be started.
        """
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._is_patient = False
        self._first, self._first_time = None, 0.0
        self._not_before = 0.0  # the end of patience, plus GRACE
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
        """Stops watching."""
        signal.set_wakeup_fd(self._previous)
        self._write(_STOP)
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def set_patient(self, is_patient: bool) -> None:
        """Sets whether the main thread has something to save, for which one signal waits."""
        if self._is_patient and not is_patient:
            self._not_before = time.monotonic() + GRACE
        self._is_patient = is_patient
        self._write(_LOOK_AGAIN)

    def _write(self, number):
        with contextlib.suppress(BlockingIOError):  # full: the thread has enough to read
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
            self._first, self._first_time = signum, now
        elif signum == signal.SIGINT and self._second_deadline is None:
            is_bounce = self._first == signal.SIGINT and now - self._first_time < REPEAT
            self._second_deadline = now + (GRACE if is_bounce else AFTER_TWO)
        elif signum == signal.SIGINT:
            self._second_deadline = min(self._second_deadline, now + AFTER_TWO)

    def _deadline(self):
        """When the process is to end; None as long as it may go on."""
        deadlines = []
        if self._second_deadline is not None:
            deadlines.append(self._second_deadline)
        if self._first is not None and not self._is_patient:
            deadlines.append(max(self._first_time + GRACE, self._not_before))
        return min(deadlines, default=None)

    def _end(self):
        """Ends the process as the signal asks, whatever its other threads do."""
        signum = signal.SIGINT if self._second_deadline is not None else self._first
        # In a thread, because a terminal that nobody reads would block this one.
        speaker = threading.Thread(target=self._say_why, args=(signum,), daemon=True)
        speaker.start()
        speaker.join(_LAST_MESSAGE)
        os._exit(128 + signum)

    def _say_why(self, signum):
        log.warning(
            'stopped by %s in the middle of what it did: what is not saved yet is lost. To '
            'continue a run, start the same command again.',
            signum.name,
        )
        launch.say_nothing_more()


_current: Watchdog | None = None


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """A context in which this process has a Watchdog. For the main thread of a command.

    Where no thread can be started, for lack of memory, there is none: the command itself reports
    what it lacks.
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
    """Watchdog.set_patient of this process, without effect where it has none."""
    if _current is not None:
        _current.set_patient(is_patient)
