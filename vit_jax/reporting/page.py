"""The page: what collect.run found, as one file of HTML that asks for nothing."""

import base64
import datetime
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from vit_jax.errors import UserError
from vit_jax.evaluators import per_class
from vit_jax.reporting import charts, collect, pictures

HERE = pathlib.Path(__file__).parent
TABLE = 20  # classes, up to which the confusion matrix is a table
MOST_CLASSES = 2000  # rows of the table of classes
# The browser holds to it: no request, no script but those of this page.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {}; "
    "base-uri 'none'; form-action 'none'"
)
SECTIONS = {
    'result': 'Result',
    'curves': 'Curves',
    'config': 'Config',
    'data-set': 'Data',
    'predictions': 'Predictions',
    'looks': 'What it looks at',
    'classes': 'Classes',
}
# Name, value of a summary. Before them stand the best and the last value of each headline.
COLUMNS = (
    'calibration error',
    'evaluation loss',
    'steps',
    'time',
    'images/s',
    'parameters',
)


def of_one(run: Mapping[str, Any]) -> str:
    """The page of a run of collect.run."""
    drawn, specs = _curves({run['name']: run}, len(run['classes']))
    values = {
        'run': {**run, 'has_recipe': run['compared_with'] != collect.DEFAULTS},
        'cards': cards(run),
        'curves': drawn,
        # Images so small that their pixels are to be seen.
        'tiny': bool(run['model']) and max(run['model']['image_size']) <= pictures.SMALL,
        'counts': None,
        'confusion': None,
        'confused': None,
        'reliability': None,
        'per_class': None,
        'distances': None,
        'canvas': (224, 224),
    }
    if (
        (data := run['data'])
        and data['splits'][0]['counts']
        and (len(run['classes']) <= MOST_CLASSES)
    ):
        values['counts'] = charts.counts(run['classes'], data['splits'][0]['counts'])
    if found := run['predictions']:
        values |= _predictions(run, found)
    explorer = (run['inspection'] or {}).get('explorer')
    if explorer:
        values['distances'] = charts.distances(explorer['distances'])
        height, width = run['model']['image_size']
        values['canvas'] = (224, round(224 * height / width))
    specs |= {
        name: values[name]['spec']
        for name in ('counts', 'confusion', 'reliability', 'distances')
        if 'spec' in (values[name] or ())
    }
    where = run['config']['recipe'] or run['config']['dataset.name']
    return _rendered(
        values,
        [run],
        run['name'],
        f'{where} · {run["workdir"]}',
        {
            'charts': specs,
            'explorer': explorer
            and {
                'heads': explorer['heads'],
                'photos': [
                    {name: x for name, x in photo.items() if name != 'rollout'}
                    for photo in explorer['photos']
                ],
            },
        },
        [name for name in SECTIONS if name != 'classes'],
    )


def of_several(runs: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """A page that sets the runs of collect.run side by side; `notes` are said of each, if given."""
    names = _unique_names([run['workdir'] for run in runs])
    headlines = dict.fromkeys(words for words in map(_headline_words, runs) if words)
    columns = [f'{which} {words}' for words in headlines for which in ('best', 'last')]
    columns += COLUMNS
    numbers = [_numbers(run, headlines) for run in runs]
    found = [k for k in range(len(columns)) if any(row[k][0] != '' for row in numbers)]
    splits = [run['config']['dataset.eval_split'] for run in runs]
    said = [
        [note, f'scored on {split}' if len(set(splits)) > 1 else '']
        for note, split in zip(notes or [''] * len(runs), splits, strict=True)
    ]
    drawn, specs = _curves(
        dict(zip(names, runs, strict=True)), max(len(run['classes']) for run in runs)
    )
    fields = {
        field: [run['config'].get(field) for run in runs]
        for field in sorted(set().union(*(run['config'] for run in runs)))
    }
    scores = [
        run['predictions']
        and {
            name: row.get('accuracy', row.get('average_precision'))
            for name, row in run['predictions']['classes'].items()
        }
        for run in runs
    ]
    names_of_classes = [x.keys() for x in scores if x]  # a run that diverged may have none
    same = names_of_classes and all(x == names_of_classes[0] for x in names_of_classes)
    values = {
        'run': None,
        'columns': [columns[k] for k in found],
        'curves': drawn,
        'names': names,
        'tiny': False,
        'legend': list(zip(names, charts.colours(len(runs)), strict=True)),
        'table': [
            (name, ' · '.join(filter(None, words)), [row[k] for k in found])
            for name, words, row in zip(names, said, numbers, strict=True)
        ],
        'differing': [
            (field, of_runs)
            for field, of_runs in fields.items()
            if any(x != of_runs[0] for x in of_runs)
        ],
        'per_class': [(name, [x and x[name] for x in scores]) for name in names_of_classes[0]]
        if same
        else None,
    }
    return _rendered(
        values,
        runs,
        f'{len(runs)} runs side by side',
        ' · '.join(names),
        {'charts': specs, 'explorer': None},
        ['result', 'curves', 'config', *(['classes'] if same else [])],
    )


def _unique_names(workdirs):
    """The last part of each path, or the whole where that is not enough."""
    last = [pathlib.Path(path).resolve().name for path in workdirs]
    return [
        name if last.count(name) == 1 else str(path)
        for name, path in zip(last, workdirs, strict=True)
    ]


def _curves(runs, num_classes):
    """The charts, each with an `id`, and their specifications by id."""
    rows = {name: run['rows'] for name, run in runs.items()}
    described = {name: run['metrics'] for name, run in runs.items()}
    drawn = [
        chart | {'id': f'curve-{k}'}
        for k, chart in enumerate(charts.curves(rows, num_classes, described))
    ]
    return drawn, {chart['id']: chart['spec'] for chart in drawn}


def _headline_words(run):
    """What the metric is called that tells how good the model is, '' if there is none."""
    headline = run['summary']['headline']
    return run['metrics'][headline].words if headline else ''


def cards(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The result in a few numbers: what, how much, and a note."""
    summary = run['summary']
    described = run['metrics']
    headline = summary['headline']
    last = summary['last'] or {}
    best = summary['best'] or {}
    words = _headline_words(run)
    found = []
    if best and best['step'] != last['step']:
        value = _text(described[headline], best[headline])
        found.append((f'Best {words}', value, f'step {best["step"]:,}'))
    if headline in last:
        note = f'step {last["step"]:,}' + (', the best' if best['step'] == last['step'] else '')
        found.append((f'Last {words}', _text(described[headline], last[headline]), note))
    missing = _missing_classes(run)
    if found and missing:
        label, accuracy, note = found[0]
        found[0] = (label, accuracy, '; '.join([note, *missing]))
    lowest = None
    if run['predictions']:
        lowest = per_class.from_table(run['predictions']['classes']).lowest()
    if lowest:
        name, score, num_examples = lowest
        found.append(('Worst class', percent(score), f'{name}, {num_examples:,} images'))
    found += _other_cards(run)
    if summary['seconds'] is not None:
        of_all = f' of {run["num_steps"]:,}' if summary['steps'] < run['num_steps'] else ''
        found += [
            ('Time', duration(summary['seconds']), f'{summary["steps"]:,}{of_all} steps'),
            ('Speed', charts.speed(summary['images_per_sec']), 'images/s in training'),
        ]
    if run['model']:
        found.append(
            (
                'Parameters',
                _short(run['model']['parameters']),
                ' × '.join(map(str, run['model']['image_size'])) + ' pixels',
            )
        )
    return found


def _other_cards(run):
    """The last values of the metrics besides the headline that stand on a card."""
    summary = run['summary']
    last = summary['last'] or {}
    found = []
    for name, metric in run['metrics'].items():
        value = last.get(name, summary['others'].get(name))
        is_first = metric.least_classes == 0 and name != summary['headline']
        if value is None or not metric.panel or not is_first:
            continue
        note = ''
        count = last.get('eval/num_examples')  # another program may have written the row
        if name == 'eval/loss' and count is not None:
            note = f'{count:,.0f} images'
        found.append((metric.title, _text(metric, value), note))
    return found


def _text(metric, value):
    """A value of a metric, on one line."""
    return percent(value) if metric.unit == 'percent' else metric.text(value)


def _missing_classes(run):
    """What to say of classes without training images and without evaluation images."""
    headline = run['summary']['headline']
    if headline and run['metrics'][headline].panel != 'accuracy':  # it predicts no classes
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


def _numbers(run, headlines):
    """(value to sort by, text) of the best and last of each of `headlines`, and of COLUMNS."""
    summary = run['summary']
    predictions = run['predictions'] or {}
    last = summary['last'] or {}
    best = summary['best'] or {}
    headline = summary['headline']
    cells = []
    for words in headlines:
        for row in (best, last):
            value = row.get(headline) if words == _headline_words(run) else None
            cells.append((value, '' if value is None else _text(run['metrics'][headline], value)))
    error = predictions.get('calibration', {}).get('expected_error')
    for value, text in (
        (error, percent),
        (last.get('eval/loss'), '{:.4f}'.format),
        (summary['steps'], '{:,}'.format),
        (summary['seconds'], duration),
        (summary['images_per_sec'], charts.speed),
        ((run['model'] or {}).get('parameters'), _short),
    ):
        cells.append((value, '' if value is None else text(value)))
    return [('', '–') if value is None else (value, text) for value, text in cells]


def _predictions(run, found):
    """What the section of predictions needs besides what collect found."""
    names, values, matrix = list(found['classes']), {}, None
    if found['calibration']['expected_error'] is not None:
        values['reliability'] = charts.reliability(found['calibration']['bins'])
    if 'confusion' in found:
        matrix = charts.matrix(names, found['confusion'])
        values['confused'] = charts.pairs(names, matrix)
        values['confusion'] = (
            _table(names, matrix) if len(names) <= TABLE else (charts.heat(names, matrix))
        )
    return values | {'per_class': _per_class(run, found, names, matrix)}


def _table(names, matrix):
    """A confusion matrix of few classes, every cell with its number."""
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    return {
        'names': names,
        'rows': [
            {
                'name': name,
                'cells': [
                    {
                        'images': int(matrix[y, x]),
                        'hit': x == y,
                        'strength': f'{shares[y, x] ** 0.5:.2f}',
                    }
                    for x in range(len(names))
                ],
            }
            for y, name in enumerate(names)
        ],
    }


def _per_class(run, found, names, matrix):
    """The rows of the table of classes, the lowest scores first."""
    counts = (run['data'] or {}).get('splits', [{}])[0].get('counts')
    wrong = None if matrix is None else matrix - np.diag(np.diag(matrix))
    rows = []
    for k, name in enumerate(names):
        row = found['classes'][name]
        taken_for = names[wrong[k].argmax()] if wrong is not None and wrong[k].any() else ''
        rows.append(
            {
                'name': name,
                'evaluated': row['num_examples'],
                'taken_for': taken_for,
                'score': row.get('accuracy', row.get('average_precision')),
                'trained': counts[k] if counts else None,
            }
        )
    rows.sort(key=lambda row: 2 if row['score'] is None else row['score'])
    return {
        'rows': rows[:MOST_CLASSES],
        'left_out': max(len(rows) - MOST_CLASSES, 0),
        'trained': bool(counts),
        'score': 'average precision' if found['several_labels'] else 'accuracy',
    }


def _rendered(values, runs, title, subtitle, data, sections):
    """The template with all that is the same for every page."""
    library, script = library_code(), (HERE / 'report.js').read_text()
    hashes = ' '.join(
        f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'"
        for x in (library, script)
    )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        'percent': percent,
        'count': '{:,}'.format,
        'value': value,
        'quote': shlex.quote,
    }
    most = max((s['number'] for chart in values['curves'] for s in chart['series']), default=0)
    return environment.get_template('report.html.j2').render(
        **values,
        runs=runs,
        title=title,
        subtitle=subtitle,
        policy=POLICY.format(hashes),
        sections=[(name, SECTIONS[name]) for name in sections],
        thinned=charts.MOST_POINTS if most > charts.MOST_POINTS else 0,
        css=Markup((HERE / 'report.css').read_text()),
        library=Markup(library),
        script=Markup(script),
        version=importlib.metadata.version('vit_jax'),
        data=Markup(json.dumps(data, allow_nan=False).replace('<', '\\u003c')),
        made=f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC',
    )


@functools.cache
def library_code() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, from vl-convert, which needs no network.

    In a process of its own: it is an engine of JavaScript, which ends its process where memory is
    scarce.
    """
    code = (
        'import sys, vl_convert; sys.stdout.write(vl_convert.javascript_bundle(vl_version="6.4"))'
    )
    result = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        encoding='utf-8',
        timeout=120,
        check=False,
    )
    if result.returncode or not result.stdout:
        reason = (result.stderr.strip().splitlines() or [''])[-1]
        raise UserError(
            "the charts' library "
            + (
                f"cannot be read ({reason}): pip install -e '.[train]' brings it."
                if result.returncode in (0, 1)
                else f'ended with exit code {result.returncode}: it '
                'needs memory, and much address space (ulimit -v unlimited).'
            )
        )
    return result.stdout


def percent(share: float | None, digits: int = 2) -> str:
    """0.9861 as '98.61 %', on one line; None as '–'."""
    return '–' if share is None else f'{100 * share:.{digits}f}\xa0%'


def duration(seconds: float) -> str:
    """'1 h 46 min', '3 min 5 s', '12 s'."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    if hours:
        return f'{hours:,} h {minutes} min'
    return f'{minutes} min {seconds} s' if minutes else f'{seconds} s'


def value(x: Any) -> str:
    """A value of a config as it is written on the command line; '–' for none."""
    if x in (None, '', []):
        return '–'
    return ', '.join(map(str, x)) if isinstance(x, list) else str(x)


def _short(number):
    """1234567 as '1.2 M'."""
    for size, unit in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if number >= size:
            return f'{number / size:.1f} {unit}'
    return str(number)
