"""SIGTERM and SIGINT ask the loop to finish its step, save and stop."""

import logging
import signal

from vit_jax.processes import consensus

log = logging.getLogger(__name__)


class Interrupts:
    """A context that remembers the first SIGTERM or SIGINT; a second SIGINT acts as usual.

    A second SIGTERM changes nothing: launchers often send it to the group and to the process.
    `received` is the signal, or None; after `anywhere` was true, the same on all processes.
    """

    def __init__(self):
        self.received = None
        self._vote = None
        self._previous = {}

    def __enter__(self):
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(self, *_):
        while self._previous:
            signal.signal(*self._previous.popitem())

    def anywhere(self) -> bool:
        """Whether any process has received a signal; each call has one answer for all of them."""
        if consensus.count() == 1:
            return self.received is not None
        self._vote = self._vote or consensus.SignalVote()
        signum = self._vote(self.received or 0)
        if signum:
            self.received = signal.Signals(signum)
        return bool(signum)

    def _remember(self, signum, _):
        if self.received:
            return
        self.received = signal.Signals(signum)
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
        log.warning('%s: finishing this step and saving; Ctrl-C (again) stops at once',
                    self.received.name)
