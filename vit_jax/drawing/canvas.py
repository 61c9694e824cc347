"""A new figure, and what all figures share. Names are shown as they are, not as mathematics."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
WIDTH = 9  # inches


def new(height: float, title: str) -> Any:
    """An empty Matplotlib Figure of so many inches, with its title; pictures are side by side."""
    from matplotlib.figure import Figure  # here, so that --help need not wait for it

    figure = Figure(figsize=(WIDTH, height), layout='compressed')
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def bare(axes: Any, title: str = '') -> Any:
    """Axes of a picture, without a frame and numbers."""
    axes.set_axis_off()
    axes.set_title(title, fontsize=9, parse_math=False)
    return axes


def charts(count: int, title: str) -> tuple[Any, list[Any]]:
    """A figure with so many charts side by side, on which lines are drawn."""
    figure = new(4.4, title)
    figure.set_layout_engine('constrained')
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[['top', 'right']].set_visible(False)
    return figure, axes


def legend(figure: Any, axes: Any) -> None:
    """One legend for all charts, below them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            [label.replace('$', r'\$') for label in labels],
            loc='outside lower center',
            fontsize=8,
            frameon=False,
            ncols=max(1, min(len(labels), 140 // (6 + max(map(len, labels))))),
        )
