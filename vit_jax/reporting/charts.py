"""Charts as Vega-Lite specifications, with what they show in words and as a table.

Colours are variables of the page's style sheet, which has others in dark mode.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.evaluators.metric import Metric
from vit_jax.workdir import descriptions

MOST_POINTS = 500  # of a series
CELLS = 50  # of each side of a confusion matrix that is drawn
COLOURS = [f'var(--c{k})' for k in range(8)]
DASHES = {'solid': [1, 0], 'dashed': [6, 4], 'dotted': [2, 3]}
# Title, series by name in metrics.jsonl, format of the values, logarithmic.
LOSS = ('Loss', {'train/loss': 'training'}, '.4f', True)
FEWSHOT = 'Few-shot accuracy'
AGREEMENT = ('Agreement with the teacher', {'train/agreement': 'training'}, '.2%', False)
TRAINING = (
    ('Learning rate', {'train/learning_rate': 'learning rate'}, '.3g', False),
    ('Images per second', {'train/images_per_sec': 'training'}, ',d', False),
    ('Norms', {'train/grad_norm': 'gradient', 'train/update_norm': 'update'}, '.3g', True),
)
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
# `aria`: each chart is one picture with a summary, for every point would be read out.
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


def curves(
    rows_of_run: Mapping[str, Sequence[Mapping[str, float]]],
    num_classes: int,
    described: Mapping[str, Mapping[str, Metric]] | None = None,
) -> list[dict[str, Any]]:
    """A chart for each panel that has values, of one run or of several by name.

    Args:
      described: what the metrics of evaluations of each run are, whose panels stand between loss
        and training; None: as their names imply.

    Each has `title`, `spec`, `summary` (a sentence), `key` (of lines that differ by more than the
    run, whose colours are `colours` in turn) and `series`, a list of name, number of values, and
    the first, lowest, highest and last value as text. Metrics that say little of so few classes are
    left out.
    """
    if described is None:
        described = {
            run: {name: descriptions.assumed(name) for name in descriptions.names_in(rows)}
            for run, rows in rows_of_run.items()
        }
    found = []
    for title, names, style, logarithmic in _panels(described):
        series = []
        for run, rows in rows_of_run.items():
            present = names | {
                name: metric.legend
                for name, metric in described[run].items()
                if _title(metric) == title and metric.is_shown(num_classes)
            }
            for name, words in present.items():
                points = [
                    (row['step'], row[name])
                    for row in rows
                    if name in row and math.isfinite(row[name])
                ]
                if points:
                    series.append((run, words, points))
        if series:
            found.append(
                _lines(
                    title,
                    series,
                    style,
                    logarithmic,
                    list(rows_of_run) if len(rows_of_run) > 1 else [],
                )
            )
    return found


def _title(metric):
    """The title of the panel of a metric, '' if it has none."""
    return metric.panel[:1].upper() + metric.panel[1:]


def _panels(described):
    """As TRAINING, with the panels of the metrics before them: loss, accuracies, then others."""
    percent = {}
    for metrics in described.values():
        for metric in metrics.values():
            title = _title(metric)
            if title and title != LOSS[0]:
                percent[title] = percent.get(title, True) and metric.unit == 'percent'
    panels = [
        (title, {}, '.2%' if is_share else '.4g', False) for title, is_share in percent.items()
    ]
    panels.sort(key=lambda panel: panel[0] != 'Accuracy')
    before = [panel for panel in panels if panel[0] != FEWSHOT]
    after = [panel for panel in panels if panel[0] == FEWSHOT]
    return [LOSS, *before, AGREEMENT, *after, *TRAINING]


def _lines(title, series, style, logarithmic, several):
    """The chart of (run, words, points) with a line at the step below the pointer.

    `several` are the names of all runs, also of those that have none of its values, if not of one.
    """

    def text(value):
        return speed(value) if style == ',d' else f'{value:{style}}'

    labels = [f'{run}: {words}' if several else words for run, words, _ in series]
    points, hover, absent = [], {}, {} if several else dict.fromkeys(labels, '–')
    for label, (run, words, values) in zip(labels, series, strict=True):
        for step, value in thinned(values):
            points.append({'step': step, 'value': value, 'run': run, 'series': words})
            hover.setdefault(step, {'step': step} | absent)[label] = text(value)
    kinds = list(dict.fromkeys(words for _, words, _ in series))
    encoding = _encoding(points, kinds, several) | {
        'y': {
            'field': 'value',
            'type': 'quantitative',
            'title': None,
            **_scale([row['value'] for row in points], style, logarithmic),
        }
    }
    few = max(len(values) for *_, values in series) <= 40
    layers = [
        {
            'data': {'values': points},
            'encoding': encoding,
            'mark': {
                'type': 'line',
                'strokeWidth': 2,
                'interpolate': 'linear',
                **({'point': {'size': 30}} if few else {}),
            },
        },
        {
            'data': {'values': [hover[step] for step in sorted(hover)]},
            'mark': {'type': 'rule', 'color': 'var(--ink)', 'tooltip': {'content': 'data'}},
            'params': [
                {
                    'name': 'near',
                    'select': {
                        'type': 'point',
                        'fields': ['step'],
                        'nearest': True,
                        'on': 'pointermove',
                        'clear': 'pointerout',
                    },
                }
            ],
            'encoding': {
                'opacity': {
                    'condition': {'param': 'near', 'empty': False, 'value': 0.45},
                    'value': 0,
                }
            },
        },
    ]
    spec = _spec(
        220,
        {
            'encoding': {
                'x': {
                    'field': 'step',
                    'type': 'quantitative',
                    'title': 'step',
                    'scale': {'zero': True},
                    'axis': {
                        'format': '~s' if max(hover) >= 1e6 else ',d',
                        'tickCount': 5,
                        'tickMinStep': 1,
                    },
                }
            },
            'layer': layers,
        },
    )
    table = [
        _row(label, [value for _, value in values], text)
        for label, (*_, values) in zip(labels, series, strict=True)
    ]
    words = [f'{row["name"]}: from {row["first"]} to {row["last"]}.' for row in table[:12]]
    key = ', '.join(f'{dash}: {kind}' for dash, kind in zip(DASHES, kinds, strict=False))
    return {
        'title': title,
        'spec': spec,
        'series': table,
        'key': key if several and len(kinds) > 1 else '',
        'summary': ' '.join([f'{title} by step.', *words]),
    }


def speed(number: float) -> str:
    """Images per second: '1,235', or '3.1' below ten."""
    return f'{number:,.{0 if number >= 10 else 1}f}'


def _encoding(points, kinds, several):
    """Colours and dashes: of one run by series, of several the colour by run."""
    colour = 'run' if several else 'series'
    keys = several or list(dict.fromkeys(row[colour] for row in points))
    silent = {'legend': None} if several or len(keys) == 1 else {}
    return {
        'color': {
            'field': colour,
            **silent,
            'scale': {'domain': keys, 'range': colours(len(keys))},
        },
        'strokeDash': {
            'field': 'series',
            **silent,
            'scale': {
                'domain': kinds,
                'range': [list(DASHES.values())[k % len(DASHES)] for k in range(len(kinds))],
            },
        },
    }


def colours(number: int) -> list[str]:
    """As many as asked for: those of the style sheet, or hues in order where it has fewer."""
    return (
        COLOURS[:number]
        if number <= len(COLOURS)
        else [
            f'oklch(calc(var(--lightness) + {k % 2 * 0.15}) 0.13 {360 * k / number:.0f})'
            for k in range(number)
        ]
    )


def _row(name, values, text):
    """A series in numbers."""
    return {
        'name': name,
        'number': len(values),
        'first': text(values[0]),
        'last': text(values[-1]),
        'lowest': text(min(values)),
        'highest': text(max(values)),
    }


def _scale(values, style, logarithmic):
    """Scale and axis of values that are shown in a style; a logarithm has few lines."""
    low, high = min(values), max(values)
    axis = {
        'format': {'%': '~%', 'd': ',d' if high >= 10 else '~g'}.get(style[-1], '~g'),
        'tickCount': 5,
    }
    if not logarithmic or low <= 0:
        return {'axis': axis, 'scale': {'zero': style.startswith(',')}}
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        marks = [
            digit * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for digit in digits
            if low <= digit * 10.0**power <= high
        ]
        if len(marks) <= 6:
            break
    return {
        'axis': axis | {'values': marks} if len(marks) > 1 else axis,
        'scale': {'type': 'log', 'nice': False, 'domain': [low / 1.1, high * 1.1]},
    }


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
    """At most MOST_POINTS (and one), evenly spaced; the first and last are among them."""
    every = -(-len(points) // MOST_POINTS)
    return [*points[::every], *([points[-1]] if (len(points) - 1) % every else [])]


def counts(names: Sequence[str], number: Sequence[int]) -> dict[str, Any]:
    """Bars with the number of images of each class, the most frequent first."""
    order = sorted(range(len(names)), key=lambda k: (-number[k], k))
    values = [
        {'place': place, 'class': names[k], 'images': number[k]} for place, k in enumerate(order)
    ]
    few = len(names) <= 20
    x = (
        {
            'field': 'class',
            'type': 'nominal',
            'sort': None,
            'title': None,
            'axis': {'labelAngle': 0 if max(map(len, names)) < 5 else -40},
        }
        if few
        else {
            'field': 'place',
            'type': 'ordinal',
            'title': 'classes, the most frequent first',
            'axis': {'labels': False, 'ticks': False},
        }
    )
    least, most = number[order[-1]], number[order[0]]
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
                        'title': 'training images',
                        'axis': {'tickCount': 4},
                    },
                    'tooltip': [{'field': 'class'}, {'field': 'images', 'format': ','}],
                },
            },
        ),
        'summary': f'Training images of each class: from {least:,} ({names[order[-1]]}) to '
        f'{most:,} ({names[order[0]]}).',
    }


def matrix(names: Sequence[str], confusion: Mapping[str, Mapping[str, int]]) -> np.ndarray:
    """The confusion matrix [label, predicted] of scoring.classes.by_class as whole numbers."""
    number = {name: k for k, name in enumerate(names)}
    found = np.zeros((len(names), len(names)), int)
    for label, row in confusion.items():
        for predicted, count in row.items():
            found[number[label], number[predicted]] = count
    return found


def blocks(values: np.ndarray) -> tuple[np.ndarray, int]:
    """A square matrix summed over equal blocks, at most CELLS to a side, and their own side."""
    side = -(-len(values) // CELLS)
    starts = range(0, len(values), side)
    return np.add.reduceat(np.add.reduceat(values, starts, axis=0), starts, axis=1), side


def heat(names: Sequence[str], values: np.ndarray) -> dict[str, Any]:
    """The confusion matrix as a chart, in blocks of neighbouring classes where they are many.

    A cell is as dark as the square root of its share of the images of its row.
    """
    cells, side = blocks(values)
    shares = cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)

    def words(k):
        first, last = k * side, min(len(names), (k + 1) * side) - 1
        return names[first] if first == last else f'{names[first]} … {names[last]}'

    rows = [
        {
            'x': int(x),
            'y': int(y),
            'strength': round(math.sqrt(shares[y, x]), 3),
            'label': words(y),
            'predicted': words(x),
            'images': int(cells[y, x]),
            'share': f'{shares[y, x]:.1%}',
        }
        for y, x in np.argwhere(cells)
    ]
    axis = {'labels': False, 'ticks': False, 'domain': False}
    domain = list(range(len(cells)))
    what = 'classes' if side == 1 else f'blocks of {side} neighbouring classes'
    return {
        'side': side,
        'spec': _spec(
            400,
            {
                'data': {'values': rows},
                'mark': {'type': 'rect', 'color': COLOURS[0]},
                'encoding': {
                    'x': {
                        'field': 'x',
                        'type': 'ordinal',
                        'title': f'predicted ({what})',
                        'axis': axis,
                        'scale': {'domain': domain},
                    },
                    'y': {
                        'field': 'y',
                        'type': 'ordinal',
                        'title': f'labelled ({what})',
                        'axis': axis,
                        'scale': {'domain': domain},
                    },
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
        f'{values.trace() / max(values.sum(), 1):.1%} of the images are on its '
        'diagonal.',
    }


def pairs(names: Sequence[str], values: np.ndarray, most: int = 20) -> list[dict[str, Any]]:
    """The most confused pairs: label, predicted, images, and their share of those of the label."""
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
    """The reliability diagram of the bins of evaluators.calibration."""
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
    bar = {
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
    }
    line = {
        'data': {'values': [{'from': 0, 'accuracy': 0}, {'from': 1, 'accuracy': 1}]},
        'mark': {'type': 'line', 'color': 'var(--ink)', 'strokeDash': [4, 4], 'opacity': 0.6},
        'encoding': {
            'x': {'field': 'from', 'type': 'quantitative'},
            'y': {'field': 'accuracy', 'type': 'quantitative'},
        },
    }
    bars = {
        'data': {'values': rows},
        'mark': {'type': 'rect', 'color': COLOURS[0], 'stroke': 'var(--card)'},
        'encoding': bar,
    }
    words = [f'{row["said"]}: {row["right"]} of {row["images"]}.' for row in rows]
    return {
        'spec': _spec(260, {'layer': [bars, line]}),
        'rows': rows,
        'summary': ' '.join(['Reliability diagram: accuracy by confidence.', *words]),
    }


def distances(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean attention distance in pixels of each head, by layer (figure 7, right)."""
    rows = [
        {'layer': layer, 'head': head, 'pixels': round(x, 2)}
        for layer, heads in enumerate(values, 1)
        for head, x in enumerate(heads, 1)
    ]
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
