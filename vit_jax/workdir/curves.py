"""The learning curves of a run: loss, accuracy and learning rate over steps."""

import logging
import os

from matplotlib.figure import Figure

log = logging.getLogger(__name__)

FILE = 'curves.png'
PANELS = (  # title, series, logarithmic
    ('loss', ('train/loss', 'eval/loss'), True),
    ('accuracy', ('eval/accuracy', 'eval/accuracy_top5', 'eval/mean_average_precision'), False),
    ('learning rate', ('train/learning_rate',), False),
)


def draw(rows: list[dict[str, float]], workdir: str) -> None:
    """Draws WORKDIR/curves.png; each series from the rows of metrics.jsonl that contain it.

    Where it cannot be written, a warning says so.
    """
    figure = Figure(figsize=(13, 3.6), layout='constrained')
    for axes, (title, series, logarithmic) in zip(figure.subplots(1, len(PANELS)), PANELS,
                                                  strict=True):
        for name in series:
            points = [(row['step'], row[name]) for row in rows if name in row]
            if points:
                steps, values = zip(*points, strict=True)
                few = len(points) < 40
                axes.plot(steps, values, '.-' if few else '-', label=f'{name} {values[-1]:.4g}')
        axes.set(title=title, xlabel='step', yscale='log' if logarithmic else 'linear')
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    save(figure, os.path.join(workdir, FILE))


def save(figure: Figure, path: str) -> None:
    """Writes a PNG file, as a whole; where that fails, a warning says so."""
    try:
        figure.savefig(path + '.tmp', format='png', dpi=110)
        os.replace(path + '.tmp', path)
    except OSError as error:
        log.warning('%s cannot be written (%s): the run goes on without it', path, error.strerror)
