"""Prints the last line of a process that JAX ends from C++, where Python can no longer run.

A companion process reads the line from a pipe, which the kernel closes when the process ends,
however it ends. It needs only the standard library and starts in milliseconds.
"""

import contextlib
import signal
import subprocess
import sys


class LastWords:
    """The line that is printed on stderr when this process ends."""

    def __init__(self):
        # In a session of its own, so that signals to the process's group do not reach it.
        self._companion = subprocess.Popen(
            [sys.executable, '-I', '-S', __file__],
            stdin=subprocess.PIPE,
            encoding='utf-8',
            errors='backslashreplace',
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def will_be(self, words: str) -> None:
        """Sets the line; '' for none."""
        # The companion is gone, or a thread has closed its input: nothing can be printed.
        with contextlib.suppress(OSError, ValueError):
            self._companion.stdin.write(words + '\n')
            self._companion.stdin.flush()

    def say(self) -> None:
        """Prints the line now, and returns when it has been printed."""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self._companion.communicate(timeout=5)

    def drop(self) -> None:
        """Ends the companion; nothing will be printed."""
        self.will_be('')
        self.say()


def main() -> None:
    """Waits for the end of the pipe and prints its last line."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    words = sys.stdin.read().splitlines()
    if words and words[-1]:
        print(words[-1], file=sys.stderr)


if __name__ == '__main__':
    main()
