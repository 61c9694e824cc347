"""The progress of a run in the last line of a terminal."""

import os
import sys

from tqdm import tqdm

from vit_jax.errors import one_line
from vit_jax.processes import consensus


class LiveLine:
    """The last line of a terminal, which is rewritten again and again.

    Attributes:
      shown: whether this is process 0 and stderr is a terminal; otherwise nothing is drawn.
    """

    def __init__(self):
        if consensus.is_main():
            self.shown = sys.stderr.isatty()
        else:
            self.shown = False
        # The pseudo-terminal of `script` reports a size of 0 x 0, and tqdm would draw nothing. So
        # ncols and nrows are set, and `show` cuts the text. `delay` keeps tqdm from drawing an
        # empty line.
        self._bar = tqdm(
            bar_format='{desc}',
            delay=1e-9,
            miniters=0,
            disable=not self.shown,
            ncols=1000,
            nrows=20,
            leave=False,
        )
        self._text = ''

    def show(self, text: str, at_once: bool = False) -> None:
        """Replaces the line.

        Args:
          text: the new line, cut to the width of the terminal.
          at_once: whether to redraw even if the last redraw was a moment ago.
        """
        if not self._bar.disable and text != self._text:
            self._text = text
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            text = one_line(text)
            self._bar.set_description_str(text[: width - 1], refresh=at_once)
            self._bar.update(0)

    def close(self) -> None:
        """Removes the live line, so that log lines can follow."""
        self._bar.close()
