"""Parts that all figures share. Names are shown literally, not as Matplotlib's mathematics."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
WIDTH = 9  # inches


def new(height: float, title: str) -> Any:
    """Returns an empty Matplotlib Figure, `height` inches high, for pictures side by side."""
    from matplotlib.figure import Figure  # slow to import, and --help does not need it

    figure = Figure(figsize=(WIDTH, height), layout='compressed')
    figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def bare(axes: Any, title: str = '') -> Any:
    """Removes frame and numbers from the axes of a picture, and returns the axes."""
    axes.set_axis_off()
    axes.set_title(title, fontsize=9, parse_math=False)
    return axes


def charts(count: int, title: str) -> tuple[Any, list[Any]]:
    """Returns a figure and the axes of `count` line charts side by side."""
    figure = new(4.4, title)
    figure.set_layout_engine('constrained')
    charts_axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in charts_axes:
        axes.grid(alpha=0.3)
        axes.spines[['top', 'right']].set_visible(False)
    return figure, charts_axes


def legend(figure: Any, axes: Any) -> None:
    """Draws one legend for all charts, below them."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    characters_per_entry = 6 + max(map(len, labels))
    num_columns = max(1, min(len(labels), 140 // characters_per_entry))
    figure.legend(
        handles,
        [label.replace('$', r'\$') for label in labels],
        loc='outside lower center',
        fontsize=8,
        frameon=False,
        ncols=num_columns,
    )
