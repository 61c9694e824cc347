"""What a run is doing, in one line of a terminal; planning does not need what draws it."""

import os
import sys

from tqdm import tqdm

from vit_jax.errors import one_line
from vit_jax.processes import consensus


class LiveLine:
    """One line at the bottom of a terminal that is written over and over; nothing elsewhere."""

    def __init__(self):
        shown = consensus.is_main() and sys.stderr.isatty()
        # It is drawn by `show` alone. A terminal that does not say its size, as that of `script`,
        # is 0 wide and high, in which tqdm would draw nothing.
        self._bar = tqdm(
            bar_format='{desc}',
            delay=1e-9,
            miniters=0,
            disable=not shown,
            ncols=1000,
            nrows=20,
            leave=False,
        )
        self.shown = shown
        self._text = ''

    def show(self, text: str, at_once: bool = False) -> None:
        """Replaces the line, unless it has just been: then only if it must be `at_once`."""
        if not self._bar.disable and text != self._text:
            self._text = text
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            text = one_line(text)
            self._bar.set_description_str(text[: width - 1], refresh=at_once)
            self._bar.update(0)

    def close(self) -> None:
        """Removes the line; what the log says follows."""
        self._bar.close()
