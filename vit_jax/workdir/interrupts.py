"""SIGTERM and SIGINT ask the loop to finish its step, save and stop."""

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

PATIENCE = 2.0  # seconds after a signal for which data are waited for; less than GRACE
_LOOK_EVERY = 0.25  # seconds between two looks at what is waited for
_CLOSING = 2.0  # seconds for the data to close their files
_END = object()  # of batches


class Abandoned(Exception):
    """What was waited for has not come within PATIENCE seconds after a signal."""


class Interrupts:
    """A context that remembers the first SIGTERM or SIGINT; a later SIGINT acts as usual.

    A second SIGTERM changes nothing: launchers often send it to the group and to the process. So
    does a SIGINT within REPEAT of the first signal: keys bounce, and people press them twice.
    `received` is the signal, or None; after `anywhere` was true, the same on all processes. Outside
    of the main thread, which alone is told of signals, there are none.

    The Watchdog of the process ends it when this context does not: GRACE seconds after a signal
    while there is nothing to save, see `have_steps`, and soon after two SIGINT in any case.
    """

    def __init__(self):
        self.received = None
        self._vote = None
        self._previous = {}
        self._since, self._repeated, self._at_once = 0.0, False, False
        self._has_steps = False
        self._worker = None

    def __enter__(self):
        in_main = threading.current_thread() is threading.main_thread()
        for signum in (signal.SIGTERM, signal.SIGINT) if in_main else ():
            self._previous[signum] = signal.signal(signum, self._remember)
        if consensus.count() > 1:  # all stop at the same step, or the others lose this process
            watchdog.set_patient(True)
        return self

    def __exit__(self, *_):
        watchdog.set_patient(False)
        while self._previous:
            signal.signal(*self._previous.popitem())

    def have_steps(self) -> None:
        """Says that there are steps of training to be saved, for which one signal waits."""
        self._has_steps = True
        watchdog.set_patient(True)

    def anywhere(self) -> bool:
        """Whether any process has received a signal; each call has one answer for all of them."""
        if self._at_once:  # and what that raised was lost, as in a callback of JAX
            raise KeyboardInterrupt
        if consensus.count() == 1:
            return self.received is not None
        self._vote = self._vote or consensus.SignalVote()
        signum = self._vote(self.received or 0)
        if signum:
            self.received = signal.Signals(signum)
        return bool(signum)

    def check(self) -> None:
        """Ends the command after a signal: for what comes before there is anything to save."""
        if self.received:
            log.warning(
                'stopped by %s before a step was trained: there is nothing to save. To continue, '
                'run the same command again.',
                self.received.name,
            )
            raise SystemExit(128 + self.received)

    def check_alone(self) -> None:
        """`check` where this process is the only one: several processes stop together."""
        if consensus.count() == 1:
            self.check()

    def wait_for(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        meanwhile: Callable[[float], None] = lambda seconds: None,
        gives_up: bool = True,
    ) -> Any:
        """What a function returns, while this thread can still follow signals.

        The function runs in another thread: the main thread runs no handlers while it waits for
        C++, as for a file that does not answer, or for a compilation.

        Args:
          meanwhile: called again and again, with the seconds that the function has taken.
          gives_up: whether a signal ends the wait.

        Raises Abandoned PATIENCE seconds after a signal if it `gives_up` and this is the only
        process. The function then still runs.
        """
        if self._worker is None:
            self._worker = _Worker()
        # Several processes stop at the same step: one that gave up alone would leave the others.
        gives_up = gives_up and consensus.count() == 1
        self._worker.start(function, arguments)
        begin = time.monotonic()
        while not self._worker.is_done(_LOOK_EVERY):
            now = time.monotonic()
            meanwhile(now - begin)
            if self._at_once:
                raise KeyboardInterrupt
            if gives_up and self.received and now - max(begin, self._since) >= PATIENCE:
                self._worker = None  # which is busy
                raise Abandoned
        return self._worker.result()

    def each(
        self, batches: Iterable[Any], meanwhile: Callable[[float], None] = lambda seconds: None
    ) -> Iterator[Any]:
        """The batches, for each of which it waits as `wait_for` does."""
        iterator = iter(batches)
        del batches
        try:
            while True:
                batch = self.wait_for(next, iterator, _END, meanwhile=meanwhile)
                if batch is _END:
                    return
                yield batch
        finally:
            # In another thread, because closing waits for files that are being read.
            closing = threading.Thread(target=_close, args=(iterator,), daemon=True)
            del iterator
            closing.start()
            closing.join(_CLOSING)

    def _remember(self, signum, frame):
        if not self.received:
            self.received, self._since = signal.Signals(signum), time.monotonic()
            if self._has_steps or consensus.count() > 1:
                what = 'finishing this step and saving'
            else:
                what = 'stopping before the first step'
            log.warning('%s: %s; Ctrl-C (again, later) stops at once', self.received.name, what)
        elif signum == signal.SIGINT and time.monotonic() - self._since < REPEAT:
            if not self._repeated:
                log.warning(
                    'Ctrl-C again: this step is saved if it is finished within %d seconds', GRACE
                )
            self._repeated = True
        elif signum == signal.SIGINT and callable(previous := self._previous[signal.SIGINT]):
            log.warning('Ctrl-C again: stopping at once, without saving')
            self._at_once = True
            previous(signum, frame)


def _close(iterator):
    """Closes a generator, unless a thread that waits for it still runs it."""
    close = getattr(iterator, 'close', None)
    if close is not None:
        with contextlib.suppress(ValueError):
            close()


class _Worker:
    """A thread that computes one function after the other.

    It is a daemon, so that the end of a program does not wait for what it waits for.
    """

    def __init__(self):
        self._tasks = queue.SimpleQueue()
        self._done = threading.Event()
        self._value = None
        self._error = None
        threading.Thread(target=self._work, name='waits for C++', daemon=True).start()

    def start(self, function, arguments):
        """Begins with a function. The one before must be done."""
        self._done.clear()
        self._tasks.put((function, arguments))

    def is_done(self, seconds):
        """Whether the function has ended, or does so within some seconds."""
        return self._done.wait(seconds)

    def result(self):
        """What the function has returned; raises what it has raised."""
        value, error = self._value, self._error
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
            del function, arguments  # batches may be large
            self._done.set()
