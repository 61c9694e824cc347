"""Makes the training loop finish its step, save and stop after SIGTERM or SIGINT."""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vit_jax.processes import consensus, watchdog
from vit_jax.processes.watchdog import GRACE, REPEAT

log = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds to wait for data after a signal; less than GRACE
_POLL_INTERVAL = 0.25  # seconds between two checks for a signal during a wait
_CLOSING = 2.0  # seconds to wait until the data source has closed its files
_END = object()  # the end of the batches


class Abandoned(Exception):
    """A result did not arrive within PATIENCE seconds after a signal."""


class Interrupts:
    """A context that records the first SIGTERM or SIGINT; a later SIGINT acts as usual.

    A second SIGTERM changes nothing, because launchers often send it to the group and to the
    process. A SIGINT within REPEAT seconds of the first signal changes nothing either, because
    keys bounce. Python delivers signals only to the main thread, so other threads receive none.

    The Watchdog ends the process if this context does not: GRACE seconds after a signal while there
    is nothing to save (see `have_steps`), and soon after two SIGINT signals in any case.

    Attributes:
      received: the signal, or None. When `anywhere` has returned True, it is equal on all
        processes.
    """

    def __init__(self):
        self.received = None
        self._received_time = 0.0
        self._has_warned_of_repeat = False
        self._stops_immediately = False
        self._has_steps = False
        self._vote = None
        self._previous = {}
        self._worker = None

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._remember)
        # Several processes must stop at the same step: if one ended earlier, the others would fail.
        if consensus.count() > 1:
            watchdog.set_patient(True)
        return self

    def __exit__(self, *_):
        watchdog.set_patient(False)
        while self._previous:
            signal.signal(*self._previous.popitem())

    def have_steps(self) -> None:
        """Declares that there are trained steps, so that a signal saves them first."""
        self._has_steps = True
        watchdog.set_patient(True)

    def anywhere(self) -> bool:
        """Whether any process has received a signal; the result is the same on all processes."""
        if self._stops_immediately:  # the KeyboardInterrupt was lost, as in a callback of JAX
            raise KeyboardInterrupt
        if consensus.count() == 1:
            return self.received is not None
        if self._vote is None:
            self._vote = consensus.SignalVote()
        signum = self._vote(self.received or 0)
        if signum:
            self.received = signal.Signals(signum)
        return bool(signum)

    def check(self) -> None:
        """Ends the command after a signal. Call it while there is nothing to save."""
        if self.received:
            log.warning(
                'stopped by %s before the first step: there is nothing to save. To continue, '
                'run the same command again.',
                self.received.name,
            )
            raise SystemExit(128 + self.received)

    def check_alone(self) -> None:
        """Calls `check` in a run of one process; several processes stop together."""
        if consensus.count() == 1:
            self.check()

    def wait_for(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        meanwhile: Callable[[float], None] = lambda seconds: None,
        gives_up: bool = True,
    ) -> Any:
        """Calls a function in another thread, so that this thread reacts to signals.

        The main thread runs no signal handlers while it waits in C++, for example for a slow file
        or a compilation.

        Args:
          function: the function.
          *arguments: its arguments.
          meanwhile: called repeatedly with the seconds since the start.
          gives_up: whether to stop waiting after a signal, in a run of one process.

        Returns:
          The result of the function.

        Raises:
          Abandoned: PATIENCE seconds after a signal, with `gives_up`. The function continues to
            run.
        """
        if self._worker is None:
            self._worker = _Worker()
        # If one of several processes gave up, the others would wait for it.
        if consensus.count() > 1:
            gives_up = False
        self._worker.start(function, arguments)
        start = time.monotonic()
        while not self._worker.is_done(_POLL_INTERVAL):
            now = time.monotonic()
            meanwhile(now - start)
            if self._stops_immediately:
                raise KeyboardInterrupt
            if gives_up and self.received and now - max(start, self._received_time) >= PATIENCE:
                self._worker = None  # this worker is busy, so the next call needs a new one
                raise Abandoned
        return self._worker.result()

    def each(
        self, batches: Iterable[Any], meanwhile: Callable[[float], None] = lambda seconds: None
    ) -> Iterator[Any]:
        """Yields the batches; waits for each batch with `wait_for`."""
        iterator = iter(batches)
        del batches
        try:
            while True:
                batch = self.wait_for(next, iterator, _END, meanwhile=meanwhile)
                if batch is _END:
                    return
                yield batch
        finally:
            # Closing waits for files that are being read, so it runs in another thread.
            closing = threading.Thread(target=_close, args=(iterator,), daemon=True)
            del iterator
            closing.start()
            closing.join(_CLOSING)

    def _remember(self, signum, frame):
        if not self.received:
            self.received = signal.Signals(signum)
            self._received_time = time.monotonic()
            if self._has_steps or consensus.count() > 1:
                action = 'finishing this step and saving'
            else:
                action = 'stopping before the first step'
            log.warning(
                '%s: %s; Ctrl-C (again, later) stops immediately', self.received.name, action
            )
        elif signum == signal.SIGINT:
            if time.monotonic() - self._received_time < REPEAT:
                self._warn_of_repeat()
            else:
                self._stop_immediately(signum, frame)

    def _warn_of_repeat(self):
        if not self._has_warned_of_repeat:
            log.warning('Ctrl-C again: this step is saved if it ends within %d seconds', GRACE)
        self._has_warned_of_repeat = True

    def _stop_immediately(self, signum, frame):
        previous = self._previous[signal.SIGINT]
        if callable(previous):
            log.warning('Ctrl-C again: stopping immediately, without saving')
            self._stops_immediately = True
            previous(signum, frame)


def _close(iterator):
    """Closes a generator, unless another thread still runs it."""
    close = getattr(iterator, 'close', None)
    if close is not None:
        with contextlib.suppress(ValueError):
            close()


class _Worker:
    """A thread that runs one function after another.

    It is a daemon thread, so the end of the program does not wait for a blocked function.
    """

    def __init__(self):
        self._tasks = queue.SimpleQueue()
        self._done = threading.Event()
        self._value = None
        self._error = None
        threading.Thread(target=self._work, name='waits for C++', daemon=True).start()

    def start(self, function, arguments):
        """Starts a function. The previous function must be done."""
        self._done.clear()
        self._tasks.put((function, arguments))

    def is_done(self, seconds):
        """Waits for the function for some seconds and returns whether it has ended."""
        return self._done.wait(seconds)

    def result(self):
        """Returns the result of the function or raises its error; the worker then forgets both."""
        value = self._value
        error = self._error
        self._value = None
        self._error = None
        if error is not None:
            raise error
        return value

    def _work(self):
        while True:
            function, arguments = self._tasks.get()
            try:
                self._value = function(*arguments)
            except BaseException as error:
                self._error = error
            del function, arguments  # a batch may be large
            self._done.set()
