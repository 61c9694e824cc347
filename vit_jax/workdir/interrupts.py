"""SIGTERM and SIGINT ask the loop to finish its step, save and stop."""

import logging
import signal
import threading
import time

from vit_jax.processes import consensus

log = logging.getLogger(__name__)

REPEAT = 1.0  # seconds in which another Ctrl-C is taken for the same wish


class Interrupts:
    """A context that remembers the first SIGTERM or SIGINT; a later SIGINT acts as usual.

    A second SIGTERM changes nothing: launchers often send it to the group and to the process. So
    does a SIGINT within REPEAT of the first signal: keys bounce, and people press them twice.
    `received` is the signal, or None; after `anywhere` was true, the same on all processes. Outside
    of the main thread, which alone is told of signals, there are none.
    """

    def __init__(self):
        self.received = None
        self._vote = None
        self._previous = {}
        self._since, self._repeated, self._at_once = 0.0, False, False

    def __enter__(self):
        in_main = threading.current_thread() is threading.main_thread()
        for signum in (signal.SIGTERM, signal.SIGINT) if in_main else ():
            self._previous[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(self, *_):
        while self._previous:
            signal.signal(*self._previous.popitem())

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
            log.warning('stopped before a step was begun: there is nothing to save')
            raise SystemExit(128 + self.received)

    def _remember(self, signum, frame):
        if not self.received:
            self.received, self._since = signal.Signals(signum), time.monotonic()
            log.warning(
                '%s: finishing this step and saving; Ctrl-C (again, later) stops at once',
                self.received.name,
            )
        elif signum == signal.SIGINT and time.monotonic() - self._since < REPEAT:
            if not self._repeated:
                log.warning('Ctrl-C again: this step is still finished and saved, please wait')
            self._repeated = True
        elif signum == signal.SIGINT and callable(previous := self._previous[signal.SIGINT]):
            log.warning('Ctrl-C again: stopping at once, without saving')
            self._at_once = True
            previous(signum, frame)
