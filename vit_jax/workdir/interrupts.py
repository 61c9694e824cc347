"""SIGTERM and SIGINT ask the loop to finish its step, save and leave."""

import logging
import signal

from vit_jax.processes import hosts

log = logging.getLogger(__name__)


class Interrupts:
    """Remembers the first SIGTERM or SIGINT while it is entered; a second SIGINT acts as usual.

    A second SIGTERM changes nothing: launchers often send it to the group and to the process.

    Attributes:
      received: the signal, None so far. After `anywhere` was true it is the same on all processes.
    """

    def __init__(self):
        self.received = None
        self._ballot = None
        self._previous = {}

    def __enter__(self):
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(self, *_):
        self._restore()

    def __bool__(self) -> bool:
        return self.received is not None

    def anywhere(self) -> bool:
        """Whether a process has received a signal: on all of them the same at the same call."""
        if hosts.count() == 1:
            return bool(self)
        self._ballot = self._ballot or hosts.Ballot()
        signum = self._ballot(self.received or 0)
        if signum:
            self.received = signal.Signals(signum)
        return bool(signum)

    def _remember(self, signum, frame):
        del frame
        if self.received:
            return
        self.received = signal.Signals(signum)
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
        log.warning('%s: finishing this step and saving; Ctrl-C (again) stops at once',
                    self.received.name)

    def _restore(self):
        while self._previous:
            signal.signal(*self._previous.popitem())
