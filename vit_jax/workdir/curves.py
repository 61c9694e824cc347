"""Draws the learning curves of a run."""

import logging
import os
import time
from collections.abc import Mapping

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from vit_jax.evaluators.metric import Metric
from vit_jax.files import written_whole
from vit_jax.workdir import descriptions, metrics
from vit_jax.workdir.progress import duration

log = logging.getLogger(__name__)

FILE = 'curves.png'
# The upper panels by title, with their training series. Evaluation metrics are added.
UPPER = {'loss': ['train/loss'], 'accuracy': []}
LOWER = (  # title, series, style of the values
    ('learning rate', ['train/learning_rate'], 'linear'),
    ('gradient norm', ['train/grad_norm'], 'log'),
    ('training images/s', ['train/images_per_sec'], 'from 0'),
)
IN_A_ROW = 3  # number of panels per row, for rows of further metrics
NOISY = ('train/loss', 'train/grad_norm')  # series that are drawn both raw and smoothed


def draw(
    rows: list[dict[str, float]],
    workdir: str,
    num_classes: int,
    seconds: float,
    described: Mapping[str, Metric] | None = None,
) -> None:
    """Draws WORKDIR/curves.png. If it cannot be written, logs a warning.

    Every evaluation is a point, and the best one is a star. Metrics that need more classes than
    the data have are omitted.

    Args:
      rows: the rows of metrics.jsonl.
      workdir: the directory of the run.
      num_classes: number of classes of the data.
      seconds: duration of the run, for the title.
      described: the metrics of the evaluations by name; None: the names imply them.
    """
    if described is None:
        described = {name: descriptions.assumed(name) for name in descriptions.names_in(rows)}
    panels = _panels(rows, described, num_classes)
    further = len(panels) - len(UPPER) - len(LOWER)
    further_rows = -(-further // IN_A_ROW)
    figure = Figure(figsize=(9, 6 + 2.4 * further_rows), layout='constrained')
    run = os.path.join(*os.path.abspath(workdir).split(os.sep)[-2:])
    figure.suptitle(
        f'{run}: {rows[-1]["step"]:,} steps in {duration(seconds)}'
        f'  ({time.strftime("%Y-%m-%d %H:%M")})',
        fontsize=11,
        parse_math=False,
    )
    places = _places(figure, further_rows)
    for place, (title, series, style) in zip(places, panels, strict=False):
        axes = figure.add_subplot(place)
        for k, name in enumerate(series):
            points = metrics.scores(rows, name)
            if points:
                _draw_series(axes, name, points, f'C{k}', style, described.get(name))
        _format_axes(axes, title, style)
    _add_legends(figure.axes[: len(UPPER)])
    if further:
        _add_legends(figure.axes[len(UPPER) + len(LOWER) :])
    save(figure, os.path.join(workdir, FILE), dpi=120)


def _places(figure, further_rows):
    """The cells of the figure's grid: two in the upper row, three in each other row."""
    heights = [3, 2]
    for _ in range(further_rows):
        heights.append(2)
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    places = [grid[0, :3], grid[0, 3:]]
    for row in range(1, len(heights)):
        places += [grid[row, :2], grid[row, 2:4], grid[row, 4:]]
    return places


def _panels(rows, described, num_classes):
    """(title, names of series, style of values) of every panel, in order."""
    present = set().union(*rows)
    series = {title: list(names) for title, names in UPPER.items()}
    units = {}
    for name, metric in described.items():
        if name in present and metric.is_shown(num_classes):
            series.setdefault(metric.panel, []).append(name)
            units.setdefault(metric.panel, set()).add(metric.unit)
    styles = {'loss': 'log', 'accuracy': 'percent'}
    for title, units_of_panel in units.items():
        styles.setdefault(title, 'percent' if units_of_panel == {'percent'} else 'linear')
    panels = [(title, names, styles[title]) for title, names in series.items()]
    return [*panels[: len(UPPER)], *LOWER, *panels[len(UPPER) :]]


def _draw_series(axes, name, points, colour, style, metric):
    """Draws one series; `points` maps steps to values, `metric` is None for training values."""
    if metric is None:
        _draw_training(axes, name, points, colour, style)
    else:
        _draw_evaluations(axes, name, points, colour, style, metric)


def _draw_evaluations(axes, name, points, colour, style, metric):
    """Draws a point for every evaluation and a star for the best one."""
    steps = np.array(list(points))
    values = np.array(list(points.values()))
    label = f'{name} {_text(values[-1], style)}'
    if metric.best:
        best = metrics.best(points, points, metric)
        label = f'{label}, best {_text(points[best], style)} at {best:,}'
    size = 7 if len(points) < 60 else 3
    axes.plot(steps, values, '.-', color=colour, markersize=size, label=label)
    if metric.best:
        axes.plot(best, points[best], '*', color=colour, markersize=13, markeredgecolor='white')


def _draw_training(axes, name, points, colour, style):
    """Draws the values of training steps, smoothed if they are noisy."""
    steps = np.array(list(points))
    values = np.array(list(points.values()))
    suffix = ''
    if name in NOISY and len(points) >= 40:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        values = smoothed(values)
        suffix = ' (smoothed)'
    axes.plot(
        steps,
        values,
        '.-' if len(points) < 20 else '-',
        color=colour,
        label=f'{name} {_text(values[-1], style)}{suffix}',
    )


def _text(value, style):
    if style == 'percent':
        return f'{100 * value:.2f} %'
    return f'{value:,.4g}'


def _format_axes(axes, title, style):
    """Sets the title, the grid, and ticks with few digits."""
    axes.set_title(title, fontsize=10, loc='left')
    axes.set_xlabel('step', fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
    if style == 'log':
        axes.set_yscale('log')
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    elif style == 'from 0':
        axes.set_ylim(bottom=0)
    formatters = {
        'percent': ticker.PercentFormatter(1, symbol=' %'),
        'from 0': ticker.StrMethodFormatter('{x:,.0f}'),
    }
    axes.yaxis.set_major_formatter(formatters.get(style, ticker.StrMethodFormatter('{x:,.3g}')))


def _add_legends(panels):
    """Puts legends between the panels and their titles, so that the legends cover no values."""
    lines = max(len(axes.get_legend_handles_labels()[1]) for axes in panels)
    for axes in panels:
        axes.set_title(axes.get_title('left'), fontsize=10, loc='left', pad=6 + 13 * lines)
        if axes.lines:
            axes.legend(
                fontsize=8.5,
                loc='lower left',
                bbox_to_anchor=(0, 1),
                borderaxespad=0.3,
                borderpad=0,
                labelspacing=0.3,
                frameon=False,
            )


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of each value and its neighbours, len(values) // 40 on either side."""
    window = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, window, 'same') / np.convolve(np.ones(len(values)), window, 'same')


def save(figure: Figure, path: str, dpi: int = 110) -> None:
    """Writes a PNG file, whole or not at all. If it cannot be written, logs a warning."""
    try:
        with written_whole(path) as temporary:
            figure.savefig(temporary, format='png', dpi=dpi)
    except OSError as error:
        log.warning('%s cannot be written (%s): the run continues without it', path, error.strerror)
