"""Charts as Vega-Lite specifications, each with a summary in words and a table.

Colours are variables of the page's style sheet, which has other values for dark mode.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.evaluators.metric import Metric
from vit_jax.workdir import descriptions

MOST_POINTS = 500  # largest number of points that are drawn for a series
CELLS = 50  # largest number of rows and columns of a drawn confusion matrix
COLOURS = [f'var(--c{k})' for k in range(8)]
DASHES = {'solid': [1, 0], 'dashed': [6, 4], 'dotted': [2, 3]}
AXIS = {
    'labelColor': 'var(--muted)',
    'titleColor': 'var(--muted)',
    'gridColor': 'var(--line)',
    'domainColor': 'var(--line)',
    'tickColor': 'var(--line)',
    'labelFontSize': 12,
    'titleFontSize': 12,
    'titleFontWeight': 'normal',
    'labelLimit': 110,
}
LEGEND = {
    'orient': 'top',
    'title': None,
    'labelColor': 'var(--ink)',
    'labelFontSize': 12,
    'labelLimit': 220,
    'columns': 3,
    'symbolType': 'stroke',
    'symbolSize': 500,
    'symbolStrokeWidth': 3,
}
# Without `aria` a screen reader reads the summary of a chart instead of every point.
CONFIG = {
    'background': None,
    'font': 'system-ui, sans-serif',
    'aria': False,
    'axis': AXIS,
    'axisX': {'grid': False},
    'view': {'stroke': None},
    'legend': LEGEND,
    'bar': {'color': COLOURS[0]},
}


class Panel(NamedTuple):
    """A chart of curves.

    Attributes:
      title: the title of the chart.
      legends: legends of the series that every run may have, by name in metrics.jsonl.
      style: format of the values.
      is_logarithmic: whether the vertical axis is logarithmic.
    """

    title: str
    legends: Mapping[str, str]
    style: str
    is_logarithmic: bool = False

    def text(self, value: float) -> str:
        """Returns a value in the style of the panel."""
        if self.style == ',d':
            return speed(value)
        return f'{value:{self.style}}'


class Series(NamedTuple):
    """The values of one metric in one run."""

    run: str
    legend: str
    points: list[tuple[int, float]]  # step and value


LOSS = Panel('Loss', {'train/loss': 'training'}, '.4f', is_logarithmic=True)
FEWSHOT = 'Few-shot accuracy'
AGREEMENT = Panel('Agreement with the teacher', {'train/agreement': 'training'}, '.2%')
TRAINING = (
    Panel('Learning rate', {'train/learning_rate': 'learning rate'}, '.3g'),
    Panel('Images per second', {'train/images_per_sec': 'training'}, ',d'),
    Panel(
        'Norms',
        {'train/grad_norm': 'gradient', 'train/update_norm': 'update'},
        '.3g',
        is_logarithmic=True,
    ),
)


def curves(
    rows_of_run: Mapping[str, Sequence[Mapping[str, float]]],
    num_classes: int,
    described: Mapping[str, Mapping[str, Metric]] | None = None,
) -> list[dict[str, Any]]:
    """Draws a chart for each panel that has values, for one run or for several.

    Args:
      rows_of_run: the rows of metrics.jsonl, by name of the run.
      num_classes: the number of classes; metrics that need more classes are left out.
      described: the metrics of the evaluations of each run, whose panels are between the loss and
        the training panels; None: the metrics that their names imply.

    Returns:
      For each chart `title`, `spec` (Vega-Lite), `summary` (one sentence), `key` (the dashes of
      the lines, '' if colours suffice) and `series`: a list of the name, the number of values, and
      the first, lowest, highest and last value as text.
    """
    if described is None:
        described = {
            run: {name: descriptions.assumed(name) for name in descriptions.names_in(rows)}
            for run, rows in rows_of_run.items()
        }
    runs = list(rows_of_run)
    charts = []
    for panel in _panels(described):
        series: list[Series] = []
        for run, rows in rows_of_run.items():
            legends = _legends(panel, described[run], num_classes)
            series += _series_of_run(run, rows, legends)
        if series:
            charts.append(_line_chart(panel, series, runs))
    return charts


def _title(metric):
    """Returns the title of the panel of a metric, '' if it has none."""
    return metric.panel[:1].upper() + metric.panel[1:]


def _panels(described):
    """Returns the panels in order: loss, accuracies, other metrics, training."""
    is_percent = {}  # by title
    for metrics in described.values():
        for metric in metrics.values():
            title = _title(metric)
            if title and title != LOSS.title:
                is_percent[title] = is_percent.get(title, True) and metric.unit == 'percent'
    panels = []
    for title, is_share in is_percent.items():
        style = '.4g'
        if is_share:
            style = '.2%'
        panels.append(Panel(title, {}, style))
    panels.sort(key=lambda panel: panel.title != 'Accuracy')
    before = [panel for panel in panels if panel.title != FEWSHOT]
    after = [panel for panel in panels if panel.title == FEWSHOT]
    return [LOSS, *before, AGREEMENT, *after, *TRAINING]


def _legends(panel, metrics, num_classes):
    """Returns the legends of a panel in a run, by name in metrics.jsonl."""
    legends = dict(panel.legends)
    for name, metric in metrics.items():
        if _title(metric) == panel.title and metric.is_shown(num_classes):
            legends[name] = metric.legend
    return legends


def _series_of_run(run, rows, legends):
    """Returns the series of a run that have finite values."""
    series = []
    for name, legend in legends.items():
        points = [
            (row['step'], row[name]) for row in rows if name in row and math.isfinite(row[name])
        ]
        if points:
            series.append(Series(run, legend, points))
    return series


def _line_chart(panel, series, runs):
    """Draws series as lines, with a rule and a tooltip at the step below the pointer.

    Args:
      panel: title and style.
      series: the series, each with at least one value.
      runs: names of all runs, including runs without values.
    """
    compares_runs = len(runs) > 1
    labels = [s.legend for s in series]
    if compares_runs:
        labels = [f'{s.run}: {s.legend}' for s in series]
    legends = list(dict.fromkeys(s.legend for s in series))
    spec = _spec(
        220,
        {
            'encoding': {'x': _step_axis(max(max(s.points)[0] for s in series))},
            'layer': [
                _lines(panel, series, legends, runs),
                _tooltips(panel, series, labels, with_absent=not compares_runs),
            ],
        },
    )
    table = [
        _row(label, [value for _, value in s.points], panel.text)
        for label, s in zip(labels, series, strict=True)
    ]
    sentences = [f'{row["name"]}: from {row["first"]} to {row["last"]}.' for row in table[:12]]
    key = ''
    if compares_runs and len(legends) > 1:
        key = ', '.join(f'{dash}: {legend}' for dash, legend in zip(DASHES, legends, strict=False))
    return {
        'title': panel.title,
        'spec': spec,
        'series': table,
        'key': key,
        'summary': ' '.join([f'{panel.title} by step.', *sentences]),
    }


def _step_axis(last_step):
    """Returns the encoding of the horizontal axis."""
    number_format = ',d'
    if last_step >= 1e6:
        number_format = '~s'
    return {
        'field': 'step',
        'type': 'quantitative',
        'title': 'step',
        'scale': {'zero': True},
        'axis': {'format': number_format, 'tickCount': 5, 'tickMinStep': 1},
    }


def _lines(panel, series, legends, runs):
    """Returns the layer of lines."""
    rows = []
    for s in series:
        for step, value in thinned(s.points):
            rows.append({'step': step, 'value': value, 'run': s.run, 'series': s.legend})
    values = [row['value'] for row in rows]
    y = {'field': 'value', 'type': 'quantitative', 'title': None, **_scale(values, panel)}
    mark = {'type': 'line', 'strokeWidth': 2, 'interpolate': 'linear'}
    if max(len(s.points) for s in series) <= 40:
        mark['point'] = {'size': 30}
    return {
        'data': {'values': rows},
        'encoding': _colours_and_dashes(rows, legends, runs) | {'y': y},
        'mark': mark,
    }


def _tooltips(panel, series, labels, with_absent):
    """Returns the layer of the rule and tooltip; `with_absent`: series without a value show '–'."""
    absent = {}
    if with_absent:
        absent = dict.fromkeys(labels, '–')
    rows = {}
    for label, s in zip(labels, series, strict=True):
        for step, value in thinned(s.points):
            row = rows.setdefault(step, {'step': step} | absent)
            row[label] = panel.text(value)
    select = {
        'type': 'point',
        'fields': ['step'],
        'nearest': True,
        'on': 'pointermove',
        'clear': 'pointerout',
    }
    visible = {'param': 'near', 'empty': False, 'value': 0.45}
    return {
        'data': {'values': [rows[step] for step in sorted(rows)]},
        'mark': {'type': 'rule', 'color': 'var(--ink)', 'tooltip': {'content': 'data'}},
        'params': [{'name': 'near', 'select': select}],
        'encoding': {'opacity': {'condition': visible, 'value': 0}},
    }


def speed(number: float) -> str:
    """Returns images per second as '1,235', or '3.1' below ten."""
    if number >= 10:
        return f'{number:,.0f}'
    return f'{number:,.1f}'


def _colours_and_dashes(rows, legends, runs):
    """Returns the encoding: a colour for each series of a single run, or else for each run."""
    compares_runs = len(runs) > 1
    field = 'series'
    names = list(dict.fromkeys(row['series'] for row in rows))
    if compares_runs:
        field = 'run'
        names = runs
    no_legend = {}
    if compares_runs or len(names) == 1:
        no_legend = {'legend': None}
    patterns = list(DASHES.values())
    dashes = [patterns[k % len(patterns)] for k in range(len(legends))]
    return {
        'color': {
            'field': field,
            **no_legend,
            'scale': {'domain': names, 'range': colours(len(names))},
        },
        'strokeDash': {
            'field': 'series',
            **no_legend,
            'scale': {'domain': legends, 'range': dashes},
        },
    }


def colours(number: int) -> list[str]:
    """Returns different colours: of the style sheet, or evenly spaced hues if these are too few."""
    if number <= len(COLOURS):
        return COLOURS[:number]
    return [
        f'oklch(calc(var(--lightness) + {k % 2 * 0.15}) 0.13 {360 * k / number:.0f})'
        for k in range(number)
    ]


def _row(name, values, text):
    """Returns a row of the table below a chart: a series in numbers."""
    return {
        'name': name,
        'number': len(values),
        'first': text(values[0]),
        'last': text(values[-1]),
        'lowest': text(min(values)),
        'highest': text(max(values)),
    }


def _scale(values, panel):
    """Returns scale and axis for values; a logarithmic axis gets few ticks."""
    low = min(values)
    high = max(values)
    number_format = '~g'
    if panel.style.endswith('%'):
        number_format = '~%'
    elif panel.style.endswith('d') and high >= 10:
        number_format = ',d'
    axis = {'format': number_format, 'tickCount': 5}
    if not panel.is_logarithmic or low <= 0:
        return {'axis': axis, 'scale': {'zero': panel.style.startswith(',')}}
    ticks = _logarithmic_ticks(low, high)
    if len(ticks) > 1:
        axis['values'] = ticks
    return {
        'axis': axis,
        'scale': {'type': 'log', 'nice': False, 'domain': [low / 1.1, high * 1.1]},
    }


def _logarithmic_ticks(low, high):
    """Returns at most six round numbers in a range, or the powers of ten if these are more."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = []
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = []
        for power in powers:
            ticks += [digit * 10.0**power for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= 6:
            break
    return ticks


def _spec(height, content):
    return {
        '$schema': 'https://vega.github.io/schema/vega-lite/v6.json',
        'width': 'container',
        'height': height,
        'config': CONFIG,
        'autosize': {'type': 'fit', 'contains': 'padding'},
        **content,
    }


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most MOST_POINTS + 1 evenly spaced points, with the first and the last."""
    every = -(-len(points) // MOST_POINTS)
    result = list(points[::every])
    if (len(points) - 1) % every:
        result.append(points[-1])
    return result


def counts(
    names: Sequence[str], number: Sequence[int], unit: str = 'training images'
) -> dict[str, Any]:
    """Draws bars with the number of images of each class, the most frequent class first."""
    order = sorted(range(len(names)), key=lambda k: (-number[k], k))
    values = [
        {'place': place, 'class': names[k], 'images': number[k]} for place, k in enumerate(order)
    ]
    x: dict[str, Any] = {
        'field': 'place',
        'type': 'ordinal',
        'title': 'classes, the most frequent first',
        'axis': {'labels': False, 'ticks': False},
    }
    if len(names) <= 20:
        angle = -40
        if max(map(len, names)) < 5:
            angle = 0
        x = {
            'field': 'class',
            'type': 'nominal',
            'sort': None,
            'title': None,
            'axis': {'labelAngle': angle},
        }
    most_frequent = order[0]
    rarest = order[-1]
    return {
        'spec': _spec(
            200,
            {
                'data': {'values': values},
                'mark': {'type': 'bar'},
                'encoding': {
                    'x': x,
                    'y': {
                        'field': 'images',
                        'type': 'quantitative',
                        'title': unit,
                        'axis': {'tickCount': 4},
                    },
                    'tooltip': [{'field': 'class'}, {'field': 'images', 'format': ','}],
                },
            },
        ),
        'summary': f'{unit.capitalize()} of each class: from {number[rarest]:,} '
        f'({names[rarest]}) to {number[most_frequent]:,} ({names[most_frequent]}).',
    }


def matrix(names: Sequence[str], confusion: Mapping[str, Mapping[str, int]]) -> np.ndarray:
    """Returns the confusion matrix of scoring.classes.by_class as int [label, predicted]."""
    index = {name: k for k, name in enumerate(names)}
    result = np.zeros((len(names), len(names)), int)
    for label, row in confusion.items():
        for predicted, count in row.items():
            result[index[label], index[predicted]] = count
    return result


def blocks(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Sums a square matrix over equal blocks, so that at most CELLS rows remain.

    Returns:
      The smaller matrix and the side of a block.
    """
    side = -(-len(values) // CELLS)
    starts = range(0, len(values), side)
    return np.add.reduceat(np.add.reduceat(values, starts, axis=0), starts, axis=1), side


def heat(names: Sequence[str], values: np.ndarray) -> dict[str, Any]:
    """Draws a confusion matrix, in blocks of neighbouring classes if there are many.

    A cell is as dark as the square root of its share of the images of its row.

    Args:
      names: the names of the classes.
      values: the matrix [label, predicted].
    """
    cells, side = blocks(values)
    shares = cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
    block_names = []
    for first in range(0, len(names), side):
        last = min(len(names), first + side) - 1
        name = names[first]
        if first < last:
            name = f'{names[first]} … {names[last]}'
        block_names.append(name)
    rows = [
        {
            'x': int(x),
            'y': int(y),
            'strength': round(math.sqrt(shares[y, x]), 3),
            'label': block_names[y],
            'predicted': block_names[x],
            'images': int(cells[y, x]),
            'share': f'{shares[y, x]:.1%}',
        }
        for y, x in np.argwhere(cells)
    ]
    unit = 'classes'
    if side > 1:
        unit = f'blocks of {side} neighbouring classes'

    def axis(field, title):
        return {
            'field': field,
            'type': 'ordinal',
            'title': f'{title} ({unit})',
            'axis': {'labels': False, 'ticks': False, 'domain': False},
            'scale': {'domain': list(range(len(cells)))},
        }

    right = values.trace() / max(values.sum(), 1)
    return {
        'side': side,
        'spec': _spec(
            400,
            {
                'data': {'values': rows},
                'mark': {'type': 'rect', 'color': COLOURS[0]},
                'encoding': {
                    'x': axis('x', 'predicted'),
                    'y': axis('y', 'labelled'),
                    'opacity': {
                        'field': 'strength',
                        'type': 'quantitative',
                        'legend': None,
                        'scale': {'domain': [0, 1], 'range': [0, 1]},
                    },
                    'tooltip': [
                        {'field': name} for name in ('label', 'predicted', 'images', 'share')
                    ],
                },
            },
        ),
        'summary': f'Confusion matrix of {len(names):,} classes in {len(cells)} rows and columns; '
        f'{right:.1%} of the images are on its diagonal.',
    }


def pairs(names: Sequence[str], values: np.ndarray, most: int = 20) -> list[dict[str, Any]]:
    """Returns the most confused pairs of classes.

    Args:
      names: the names of the classes.
      values: the confusion matrix [label, predicted].
      most: largest number of pairs.

    Returns:
      For each pair `label`, `predicted`, `images` and their `share` of the images of the label.
    """
    wrong = values - np.diag(np.diag(values))
    order = np.argsort(-wrong, axis=None, kind='stable')[:most]
    return [
        {
            'label': names[y],
            'predicted': names[x],
            'images': int(wrong[y, x]),
            'share': wrong[y, x] / values[y].sum(),
        }
        for y, x in zip(*np.unravel_index(order, wrong.shape), strict=True)
        if wrong[y, x]
    ]


def reliability(bins: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Draws the reliability diagram of the bins of evaluators.calibration."""
    rows = [
        {
            'from': row['from'],
            'to': row['to'],
            'accuracy': row['accuracy'],
            'said': f'{row["confidence"]:.1%}',
            'right': f'{row["accuracy"]:.1%}',
            'images': row['num_examples'],
        }
        for row in bins
    ]
    axis = {'format': '.0%', 'tickCount': 5}
    scale = {'domain': [0, 1], 'nice': False}
    bars = {
        'data': {'values': rows},
        'mark': {'type': 'rect', 'color': COLOURS[0], 'stroke': 'var(--card)'},
        'encoding': {
            'x': {
                'field': 'from',
                'type': 'quantitative',
                'title': 'confidence',
                'axis': axis,
                'scale': scale,
            },
            'x2': {'field': 'to'},
            'y': {
                'field': 'accuracy',
                'type': 'quantitative',
                'title': 'accuracy',
                'axis': axis,
                'scale': scale,
            },
            'y2': {'datum': 0},
            'tooltip': [
                {'field': 'said', 'title': 'mean confidence'},
                {'field': 'right', 'title': 'accuracy'},
                {'field': 'images'},
            ],
        },
    }
    diagonal = {
        'data': {'values': [{'from': 0, 'accuracy': 0}, {'from': 1, 'accuracy': 1}]},
        'mark': {'type': 'line', 'color': 'var(--ink)', 'strokeDash': [4, 4], 'opacity': 0.6},
        'encoding': {
            'x': {'field': 'from', 'type': 'quantitative'},
            'y': {'field': 'accuracy', 'type': 'quantitative'},
        },
    }
    sentences = [f'{row["said"]}: {row["right"]} of {row["images"]}.' for row in rows]
    return {
        'spec': _spec(260, {'layer': [bars, diagonal]}),
        'rows': rows,
        'summary': ' '.join(['Reliability diagram: accuracy by confidence.', *sentences]),
    }


def distances(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Draws the mean attention distance of each head by layer (figure 7, right).

    Args:
      values: distances in pixels [layers, heads].
    """
    rows = []
    for layer, distances_of_layer in enumerate(values, 1):
        for head, distance in enumerate(distances_of_layer, 1):
            rows.append({'layer': layer, 'head': head, 'pixels': round(distance, 2)})
    return {
        'spec': _spec(
            240,
            {
                'data': {'values': rows},
                'mark': {'type': 'circle', 'size': 55, 'opacity': 0.75, 'color': COLOURS[0]},
                'encoding': {
                    'x': {
                        'field': 'layer',
                        'type': 'quantitative',
                        'axis': {'tickMinStep': 1, 'format': 'd'},
                        'scale': {'nice': False, 'domain': [0.5, len(values) + 0.5]},
                    },
                    'y': {
                        'field': 'pixels',
                        'type': 'quantitative',
                        'title': 'mean distance (pixels)',
                        'axis': {'tickCount': 5},
                    },
                    'tooltip': [{'field': name} for name in ('layer', 'head', 'pixels')],
                },
            },
        ),
        'summary': 'Mean attention distance of the heads by layer, in pixels: '
        f'{min(values[0]):.0f} to {max(values[0]):.0f} in the first, '
        f'{min(values[-1]):.0f} to {max(values[-1]):.0f} in the last.',
    }
