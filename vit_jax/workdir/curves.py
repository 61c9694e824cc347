"""The learning curves of a run over its steps, as a picture."""

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
# The panels above, by title: the series of training in them, which metrics of evaluations join.
UPPER = {'loss': ['train/loss'], 'accuracy': []}
LOWER = (  # title, series, how the values are shown
    ('learning rate', ['train/learning_rate'], 'linear'),
    ('gradient norm', ['train/grad_norm'], 'log'),
    ('training images/s', ['train/images_per_sec'], 'from 0'),
)
IN_A_ROW = 3  # further panels, which other metrics need
NOISY = ('train/loss', 'train/grad_norm')  # drawn as they are, and smoothed


def draw(
    rows: list[dict[str, float]],
    workdir: str,
    num_classes: int,
    seconds: float,
    described: Mapping[str, Metric] | None = None,
) -> None:
    """Draws WORKDIR/curves.png; each series from the rows of metrics.jsonl that contain it.

    Every evaluation is a point, and the best is a star. Metrics that say little of so few classes
    are left out. Where the file cannot be written, a warning says so.

    Args:
      seconds: that the run has taken, for the title.
      described: what the metrics of evaluations are; None: as their names imply.
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
    grid = figure.add_gridspec(2 + further_rows, 6, height_ratios=(3, 2, *[2] * further_rows))
    places = [grid[0, :3], grid[0, 3:]]
    for row in range(1, 2 + further_rows):
        places += [grid[row, :2], grid[row, 2:4], grid[row, 4:]]
    for place, (title, series, shown) in zip(places, panels, strict=False):
        axes = figure.add_subplot(place)
        for k, name in enumerate(series):
            points = metrics.scores(rows, name)
            if points:
                _line(axes, name, points, f'C{k}', shown, described.get(name))
        _dress(axes, title, shown)
    _explain(figure.axes[: len(UPPER)])
    if further:
        _explain(figure.axes[len(UPPER) + len(LOWER) :])
    save(figure, os.path.join(workdir, FILE), dpi=120)


def _panels(rows, described, num_classes):
    """(title, names of series, how values are shown) of every panel, in order."""
    present = {name for row in rows for name in row}
    series = {title: list(names) for title, names in UPPER.items()}
    units = {}
    for name, metric in described.items():
        if name in present and metric.is_shown(num_classes):
            series.setdefault(metric.panel, []).append(name)
            units.setdefault(metric.panel, set()).add(metric.unit)
    styles = {'loss': 'log', 'accuracy': 'percent'}
    for title, of_panel in units.items():
        styles.setdefault(title, 'percent' if of_panel == {'percent'} else 'linear')
    panels = [(title, names, styles[title]) for title, names in series.items()]
    return [*panels[: len(UPPER)], *LOWER, *panels[len(UPPER) :]]


def _line(axes, name, points, colour, shown, metric):
    """A series of values by step: as it is, smoothed if it is noisy, with points and the best."""
    steps, values = np.array(list(points)), np.array(list(points.values()))
    text = (lambda x: f'{100 * x:.2f} %') if shown == 'percent' else '{:,.4g}'.format
    if metric is not None:
        label = f'{name} {text(values[-1])}'
        if metric.best:
            best = metrics.best(points, points, metric)
            label = f'{label}, best {text(points[best])} at {best:,}'
        size = 7 if len(points) < 60 else 3
        axes.plot(steps, values, '.-', color=colour, markersize=size, label=label)
        if metric.best:
            axes.plot(best, points[best], '*', color=colour, markersize=13, markeredgecolor='white')
        return
    said = ''
    if name in NOISY and len(points) >= 40:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        values, said = smoothed(values), ' (smoothed)'
    axes.plot(
        steps,
        values,
        '.-' if len(points) < 20 else '-',
        color=colour,
        label=f'{name} {text(values[-1])}{said}',
    )


def _dress(axes, title, shown):
    """Title, grid, and ticks that are read without counting zeros."""
    axes.set_title(title, fontsize=10, loc='left')
    axes.set_xlabel('step', fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
    if shown == 'log':
        axes.set_yscale('log')
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    elif shown == 'from 0':
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(
        {
            'percent': ticker.PercentFormatter(1, symbol=' %'),
            'from 0': ticker.StrMethodFormatter('{x:,.0f}'),
        }.get(shown, ticker.StrMethodFormatter('{x:,.3g}'))
    )


def _explain(panels):
    """Legends between panels and their titles, where they cover no value."""
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
    """The mean of each value and its neighbours: a fortieth of all on either side, if so many."""
    window = np.ones(2 * (len(values) // 40) + 1)
    return np.convolve(values, window, 'same') / np.convolve(np.ones(len(values)), window, 'same')


def save(figure: Figure, path: str, dpi: int = 110) -> None:
    """Writes a PNG file, as a whole; where that fails, a warning says so."""
    try:
        with written_whole(path) as temporary:
            figure.savefig(temporary, format='png', dpi=dpi)
    except OSError as error:
        log.warning('%s cannot be written (%s): the run goes on without it', path, error.strerror)
