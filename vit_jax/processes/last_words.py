"""Prints the last line of a process that JAX ends from C++, when Python can no longer run.

A companion process reads the line from a pipe. The kernel closes the pipe whenever the process
ends. The companion needs only the standard library and starts in milliseconds.
"""

import contextlib
import signal
import subprocess
import sys


class LastWords:
    """The line that the companion prints on stderr when this process ends."""

    def __init__(self):
        # Its own session keeps signals to the process group away from it.
        self._companion = subprocess.Popen(
            [sys.executable, '-I', '-S', __file__],
            stdin=subprocess.PIPE,
            encoding='utf-8',
            errors='backslashreplace',
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def set_line(self, words: str) -> None:
        """Sets the line; '' prints nothing."""
        # Nothing can be printed if the companion has ended or a thread has closed its input.
        with contextlib.suppress(OSError, ValueError):
            self._companion.stdin.write(words + '\n')
            self._companion.stdin.flush()

    def print_now(self) -> None:
        """Prints the line now and waits until it is printed."""
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self._companion.communicate(timeout=5)

    def drop(self) -> None:
        """Ends the companion without printing a line."""
        self.set_line('')
        self.print_now()


def main() -> None:
    """Reads the pipe until it is closed and prints its last line."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    words = sys.stdin.read().splitlines()
    if words and words[-1]:
        print(words[-1], file=sys.stderr)


if __name__ == '__main__':
    main()
