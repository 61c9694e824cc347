"""The page: the content from collect.run as one HTML file that makes no requests."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.evaluators import per_class
from vit_jax.reporting import charts, collect, pictures
from vit_jax.reporting.rendering import duration, percent, render, short

TEMPLATE = 'report.html.j2'
TABLE = 20  # largest number of classes whose confusion matrix is a table
MOST_CLASSES = 2000  # largest number of rows in the table of classes
SECTIONS = {
    'result': 'Result',
    'curves': 'Curves',
    'config': 'Config',
    'data-set': 'Data',
    'predictions': 'Predictions',
    'looks': 'Inside the model',
    'classes': 'Classes',
}
# Columns of the table that compares runs, after the best and last value of each headline.
COLUMNS = (
    'calibration error',
    'evaluation loss',
    'steps',
    'time',
    'images/s',
    'parameters',
)
CANVAS = 224  # pixels of the width of an attention map

Cell = tuple[Any, str]  # the value to sort by, and its text


def of_any(runs: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Returns the page of one run, or the page that compares several."""
    if len(runs) == 1:
        return of_one(runs[0])
    return of_several(runs, notes)


def of_one(run: Mapping[str, Any]) -> str:
    """Returns the page of one run, from the content that collect.run returns."""
    curves, specs = _curves({run['name']: run}, len(run['classes']))
    values: dict[str, Any] = {
        'run': {**run, 'has_recipe': run['compared_with'] != collect.DEFAULTS},
        'cards': cards(run),
        # The pixels of small images are shown as squares.
        'tiny': bool(run['model']) and max(run['model']['image_size']) <= pictures.SMALL,
        'counts': None,
        'confusion': None,
        'confused': None,
        'reliability': None,
        'per_class': None,
        'distances': None,
        'canvas': (CANVAS, CANVAS),
    }
    if len(run['classes']) <= MOST_CLASSES and run['data'] and run['data']['splits'][0]['counts']:
        values['counts'] = charts.counts(run['classes'], run['data']['splits'][0]['counts'])
    if run['predictions']:
        values |= _predictions(run)
    explorer = (run['inspection'] or {}).get('explorer')
    if explorer:
        values['distances'] = charts.distances(explorer['distances'])
        height, width = run['model']['image_size']
        values['canvas'] = (CANVAS, round(CANVAS * height / width))
    for name in ('counts', 'confusion', 'reliability', 'distances'):
        if values[name] and 'spec' in values[name]:
            specs[name] = values[name]['spec']
    recipe = run['config']['recipe'] or run['config']['dataset.name']
    return render(
        TEMPLATE,
        values | _of_curves([run], curves),
        run['name'],
        f'{recipe} · {run["workdir"]}',
        {name: words for name, words in SECTIONS.items() if name != 'classes'},
        {'charts': specs, 'explorer': _explorer_data(explorer)},
    )


def _explorer_data(explorer):
    """Returns the data of the explorer's script, without the pictures of rollout."""
    if not explorer:
        return None
    photos = []
    for photo in explorer['photos']:
        photos.append({name: value for name, value in photo.items() if name != 'rollout'})
    return {'heads': explorer['heads'], 'photos': photos}


def of_several(runs: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """Returns a page that compares runs.

    Args:
      runs: the contents of the pages from collect.run.
      notes: a note on each run, such as 'diverges' or ''.
    """
    names = _unique_names([run['workdir'] for run in runs])
    num_classes = max(len(run['classes']) for run in runs)
    curves, specs = _curves(dict(zip(names, runs, strict=True)), num_classes)
    columns, rows = _results(runs)
    scores = _scores_by_class(runs)
    sections = ['result', 'curves', 'config']
    if scores:
        sections.append('classes')
    values: dict[str, Any] = {
        'run': None,
        'columns': columns,
        'names': names,
        'tiny': False,
        'legend': list(zip(names, charts.colours(len(runs)), strict=True)),
        'table': list(zip(names, _notes(runs, notes), rows, strict=True)),
        'differing': _differing_fields(runs),
        'per_class': scores,
    }
    return render(
        TEMPLATE,
        values | _of_curves(runs, curves),
        f'Comparison of {len(runs)} runs',
        ' · '.join(names),
        {name: SECTIONS[name] for name in sections},
        {'charts': specs, 'explorer': None},
    )


def _of_curves(runs, curves):
    """Returns the values of every page of runs."""
    lengths = [0]
    for chart in curves:
        lengths += [series['number'] for series in chart['series']]
    return {
        'runs': runs,
        'curves': curves,
        'most_points': charts.MOST_POINTS,
        'is_thinned': max(lengths) > charts.MOST_POINTS,
    }


def _results(runs):
    """Returns the columns that have values, and the cells of each run."""
    headlines = []
    for run in runs:
        words = _headline_words(run)
        if words and words not in headlines:
            headlines.append(words)
    columns = []
    for words in headlines:
        columns += [f'best {words}', f'last {words}']
    columns += COLUMNS
    rows = [_cells(run, headlines) for run in runs]
    filled = [k for k in range(len(columns)) if any(row[k][0] != '' for row in rows)]
    return [columns[k] for k in filled], [[row[k] for k in filled] for row in rows]


def _notes(runs, notes):
    """Returns the text below the name of each run."""
    splits = [run['config']['dataset.eval_split'] for run in runs]
    texts = []
    for number, split in enumerate(splits):
        parts = []
        if notes and notes[number]:
            parts.append(notes[number])
        if len(set(splits)) > 1:
            parts.append(f'scored on {split}')
        texts.append(' · '.join(parts))
    return texts


def _differing_fields(runs):
    """Returns (field, its values) for each field that differs between the runs."""
    fields = sorted(set().union(*(run['config'] for run in runs)))
    differing = []
    for field in fields:
        values = [run['config'].get(field) for run in runs]
        if any(value != values[0] for value in values):
            differing.append((field, values))
    return differing


def _scores_by_class(runs):
    """Returns (class, its scores) for each class; None unless all runs have the same classes.

    A run without predictions, such as a diverged run, has the score None.
    """
    scores = []
    for run in runs:
        of_run = None
        if run['predictions']:
            of_run = {name: _score(row) for name, row in run['predictions']['classes'].items()}
        scores.append(of_run)
    with_predictions = [of_run for of_run in scores if of_run]
    if not with_predictions:
        return None
    classes = with_predictions[0].keys()
    if any(of_run.keys() != classes for of_run in with_predictions):
        return None
    rows = []
    for name in classes:
        rows.append((name, [of_run[name] if of_run else None for of_run in scores]))
    return rows


def _score(row):
    """Returns the score of a class: its accuracy, or its average precision with several labels."""
    return row.get('accuracy', row.get('average_precision'))


def _unique_names(workdirs):
    """Returns the last part of each path, or the whole path if the last part is not unique."""
    last = [pathlib.Path(path).resolve().name for path in workdirs]
    names = []
    for name, path in zip(last, workdirs, strict=True):
        if last.count(name) > 1:
            name = str(path)
        names.append(name)
    return names


def _curves(runs, num_classes):
    """Returns the charts, each with an `id`, and their specifications by id."""
    rows = {name: run['rows'] for name, run in runs.items()}
    described = {name: run['metrics'] for name, run in runs.items()}
    curves = []
    for k, chart in enumerate(charts.curves(rows, num_classes, described)):
        curves.append(chart | {'id': f'curve-{k}'})
    return curves, {chart['id']: chart['spec'] for chart in curves}


def _headline_words(run):
    """Returns the words of the metric that ranks models, '' if there is none."""
    headline = run['summary']['headline']
    if not headline:
        return ''
    return run['metrics'][headline].words


def cards(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the most important results of a run: (label, value, note) for each card."""
    summary = run['summary']
    result = _headline_cards(run)
    missing = _missing_classes(run)
    if result and missing:
        label, accuracy, note = result[0]
        result[0] = (label, accuracy, '; '.join([note, *missing]))
    lowest = None
    if run['predictions']:
        lowest = per_class.from_table(run['predictions']['classes']).lowest()
    if lowest:
        name, score, num_examples = lowest
        result.append(('Worst class', percent(score), f'{name}, {num_examples:,} images'))
    result += _other_cards(run)
    if summary['seconds'] is not None:
        steps = f'{summary["steps"]:,}'
        if summary['steps'] < run['num_steps']:
            steps += f' of {run["num_steps"]:,}'
        speed = charts.speed(summary['images_per_sec'])
        result.append(('Time', duration(summary['seconds']), f'{steps} steps'))
        result.append(('Speed', speed, 'images/s in training'))
    if run['model']:
        size = ' × '.join(map(str, run['model']['image_size']))
        result.append(('Parameters', short(run['model']['parameters']), f'{size} pixels'))
    return result


def _headline_cards(run):
    """Returns the cards of the best and the last value of the metric that ranks models."""
    summary = run['summary']
    headline = summary['headline']
    last = summary['last'] or {}
    best = summary['best'] or {}
    if not headline:
        return []
    metric = run['metrics'][headline]
    result = []
    if best and best['step'] != last['step']:
        text = _text(metric, best[headline])
        result.append((f'Best {metric.words}', text, f'step {best["step"]:,}'))
    if headline in last:
        note = f'step {last["step"]:,}'
        if best['step'] == last['step']:
            note += ', the best'
        result.append((f'Last {metric.words}', _text(metric, last[headline]), note))
    return result


def _other_cards(run):
    """Returns the cards of the last values of the other metrics."""
    summary = run['summary']
    last = summary['last'] or {}
    result = []
    for name, metric in run['metrics'].items():
        value = last.get(name, summary['others'].get(name))
        is_first = metric.least_classes == 0 and name != summary['headline']
        if value is None or not metric.panel or not is_first:
            continue
        note = ''
        count = last.get('eval/num_examples')  # a row of another program may not have it
        if name == 'eval/loss' and count is not None:
            note = f'{count:,.0f} images'
        result.append((metric.title, _text(metric, value), note))
    return result


def _text(metric, value):
    """Returns a value of a metric as text without line breaks."""
    if metric.unit == 'percent':
        return percent(value)
    return metric.text(value)


def _missing_classes(run):
    """Returns notes on classes without training images and without evaluation images."""
    headline = run['summary']['headline']
    if headline and run['metrics'][headline].panel != 'accuracy':  # the model predicts no classes
        return []
    counts = [None, None]
    if run['data']:
        counts = [split['counts'] for split in run['data']['splits']]
    predictions = run['predictions']
    if counts[1] is None and predictions and predictions['num_images'] == predictions['of']:
        counts[1] = [row['num_examples'] for row in predictions['classes'].values()]
    texts = []
    for count, purpose in zip(counts, ('training', 'evaluation'), strict=True):
        without = [
            name for name, number in zip(run['classes'], count or (), strict=False) if not number
        ]
        missing = per_class.missing_classes(without, len(run['classes']))
        if missing:
            texts.append(f'{purpose} has {missing}')
    return texts


def _cells(run, headlines) -> list[Cell]:
    """Returns the best and last value of each headline, and the values of COLUMNS."""
    summary = run['summary']
    predictions = run['predictions'] or {}
    last = summary['last'] or {}
    best = summary['best'] or {}
    headline = summary['headline']
    cells = []
    for words in headlines:
        for row in (best, last):
            if words == _headline_words(run) and row.get(headline) is not None:
                metric = run['metrics'][headline]
                cells.append((row[headline], _text(metric, row[headline])))
            else:
                cells.append(_cell(None, str))
    return [
        *cells,
        _cell(predictions.get('calibration', {}).get('expected_error'), percent),
        _cell(last.get('eval/loss'), '{:.4f}'.format),
        _cell(summary['steps'], '{:,}'.format),
        _cell(summary['seconds'], duration),
        _cell(summary['images_per_sec'], charts.speed),
        _cell((run['model'] or {}).get('parameters'), short),
    ]


def _cell(value, text: Callable[[Any], str]) -> Cell:
    """Returns a cell with the text of a value; '–' if the value is None."""
    if value is None:
        return ('', '–')
    return (value, text(value))


def _predictions(run):
    """Returns the values of the predictions section that are not in the content of the run."""
    predictions = run['predictions']
    names = list(predictions['classes'])
    values = {}
    if predictions['calibration']['expected_error'] is not None:
        values['reliability'] = charts.reliability(predictions['calibration']['bins'])
    matrix = None
    if 'confusion' in predictions:
        matrix = charts.matrix(names, predictions['confusion'])
        values['confused'] = charts.pairs(names, matrix)
        values['confusion'] = confusion(names, matrix)
    values['per_class'] = _per_class(run, names, matrix)
    return values


def confusion(names: Sequence[str], matrix: np.ndarray) -> dict[str, Any]:
    """Returns a confusion matrix [label, predicted]: a table up to TABLE classes, or a chart."""
    if len(names) <= TABLE:
        return _table(names, matrix)
    return charts.heat(names, matrix)


def _table(names, matrix):
    """Returns the confusion matrix of few classes, with the number of every cell."""
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    rows = []
    for y, name in enumerate(names):
        cells = [
            {
                'images': int(matrix[y, x]),
                'hit': x == y,
                'strength': f'{shares[y, x] ** 0.5:.2f}',
            }
            for x in range(len(names))
        ]
        rows.append({'name': name, 'cells': cells})
    return {'names': names, 'rows': rows}


def _per_class(run, names, matrix):
    """Returns the table of classes, the lowest scores first.

    Args:
      run: the content of the page from collect.run.
      names: the names of the classes.
      matrix: the confusion matrix [label, predicted]; None for images with several labels.
    """
    predictions = run['predictions']
    counts = None
    if run['data']:
        counts = run['data']['splits'][0]['counts']
    rows = []
    for k, name in enumerate(names):
        of_class = predictions['classes'][name]
        row = {
            'name': name,
            'evaluated': of_class['num_examples'],
            'taken_for': '',
            'score': _score(of_class),
            'trained': None,
        }
        if matrix is not None:
            mistakes = matrix[k].copy()
            mistakes[k] = 0
            if mistakes.any():
                row['taken_for'] = names[mistakes.argmax()]
        if counts:
            row['trained'] = counts[k]
        rows.append(row)
    rows.sort(key=lambda row: (row['score'] is None, row['score']))
    score = 'accuracy'
    if predictions['several_labels']:
        score = 'average precision'
    return {
        'rows': rows[:MOST_CLASSES],
        'left_out': max(len(rows) - MOST_CLASSES, 0),
        'trained': bool(counts),
        'score': score,
    }
