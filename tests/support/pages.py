"""Parses HTML pages, and checks the properties of every report.html."""

import base64
import html.parser
import io
import json
import math
import re

import numpy as np
from PIL import Image

from tests.support.runs import load, resolved
from vit_jax import config as config_lib
from vit_jax.evaluators.calibration import calibration
from vit_jax.inspection.attention import Observed
from vit_jax.reporting import attention, collect, pictures
from vit_jax.workdir import descriptions


class Read(html.parser.HTMLParser):
    """A parsed page: its elements, text, tables and scripts."""

    VOID = {'meta', 'link', 'img', 'br', 'input'}

    def __init__(self, source):
        super().__init__()
        self.open = []
        self.elements = []
        self.scripts = []
        self.tables = []
        self.text = ''
        self.feed(source)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == 'script':
            self.scripts.append('')
        if tag == 'table':
            self.tables.append([])
        if tag == 'tr':
            self.tables[-1].append([])
        if tag in ('td', 'th'):
            self.tables[-1][-1].append('')

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data):
        data = data.replace('\xa0', ' ')
        if self.open[-1:] == ['script']:
            self.scripts[-1] += data
        elif self.open[-1:] != ['style']:
            self.text += data
            if {'td', 'th'} & set(self.open):
                self.tables[-1][-1][-1] += data

    def of(self, tag, **expected):
        """The attributes of all elements with this tag and these attributes."""
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and all(attributes.get(key) == x for key, x in expected.items())
        ]


def observed(layers=2, heads=3, grid=(4, 6), class_token=True, registers=0, seed=0):
    """Random attention of one image."""
    tokens = math.prod(grid) + class_token + registers
    weights = np.random.default_rng(seed).dirichlet(
        np.full(tokens, 0.3), (layers, 1, heads, tokens)
    )
    return Observed(None, weights.astype(np.float32), None, grid, class_token)


def read_sheet(uri, queries, heads, keys):
    """The weights in a picture of attention.sheet: [heads, queries, rows, columns]."""
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(',')[2]))) as image:
        grey = np.asarray(image.convert('L'), float) / 255
    rows, columns = keys
    tiles = grey.reshape(queries, rows + 1, heads, columns).transpose(2, 0, 1, 3)
    return tiles[:, :, :rows] ** 2 * tiles[:, :, rows:, :1] ** 2


def write_workdir(path, config=None, accuracies=(0.25, 0.5)):
    """Writes the config, classes and metrics of a run without checkpoints."""
    path.mkdir(parents=True, exist_ok=True)
    config = config or load('quickstart').get_config()
    config = resolved(config, config.dataset.num_examples or 1437, 10)
    for name, content in (('config', config.to_dict()), ('classes', list('0123456789'))):
        (path / f'{name}.json').write_text(json.dumps(content))
    rows = [
        {
            'step': 800 * k,
            'eval/accuracy': accuracy,
            'eval/loss': 1 / k,
            'eval/seconds': 1.0,
            'eval/num_examples': 360.0,
        }
        for k, accuracy in enumerate(accuracies, 1)
    ]
    (path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    return path


def made(num_classes=3, names=None, **changes):
    """The result of collect.run for an imaginary run, with predictions of random labels."""
    rng = np.random.default_rng(0)
    names = names or [f'class {k}' for k in range(num_classes)]
    config = config_lib.flatten(resolved(load('quickstart').get_config(), 1437, 10))
    rows = _rows()
    metrics_of = {name: descriptions.assumed(name) for name in descriptions.names_in(rows)}
    picture = pictures.uri(np.zeros((4, 4, 3), np.uint8))
    explorer = _explorer(names, picture, rng)  # before the predictions, which draw from rng next
    return {
        'name': 'run',
        'workdir': 'runs/run',
        'config': config,
        'classes': names,
        'rows': rows,
        'compared_with': 'configs/quickstart.py',
        'differences': [],
        'num_steps': 20,
        'metrics': metrics_of,
        'summary': collect.summary(rows, 128, metrics_of),
        'missing': {},
        'model': {'step': 20, 'parameters': 1_234_567, 'image_size': [16, 16]},
        'data': {
            'name': 'digits',
            'mixup': 0.0,
            'samples': [{'image': picture, 'label': names[0]}],
            'splits': [
                {'split': 'train', 'num_examples': 9, 'counts': [3] * len(names)},
                {'split': 'test', 'num_examples': 16, 'counts': None},
            ],
        },
        'predictions': _predictions(names, picture, rng),
        'inspection': {
            'filters': picture,
            'similarity': picture,
            'explorer': explorer,
            'missing': {},
        },
    } | changes


def _rows():
    """Rows of metrics.jsonl: four of training and one evaluation."""
    rows = [
        {'step': 5 * k, 'train/loss': 2.0 / k, 'train/images_per_sec': 1234.0} for k in range(1, 5)
    ]
    evaluation = {
        'step': 20,
        'eval/accuracy': 0.8125,
        'eval/loss': 0.4321,
        'eval/accuracy_top5': 0.9,
        'eval/num_examples': 16.0,
        'eval/seconds': 1.0,
    }
    return [*rows, evaluation]


def _explorer(names, picture, rng):
    photos = [
        {
            'image': pictures.uri(rng.integers(0, 256, (32, 48, 3)).astype(np.uint8)),
            'label': name,
            'rollout': picture,
            **attention.photo(observed(seed=seed), (1, 1)),
        }
        for seed, name in enumerate(names[:2])
    ]
    return {
        'photos': photos,
        'heads': 3,
        'blocks': (1, 1),
        'distances': [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]],
    }


def _predictions(names, picture, rng):
    confusion = {
        name: {names[other]: 1 + k % 3 for other in {k, (k + 1) % len(names)}}
        for k, name in enumerate(names)
    }
    example = {
        'image': picture,
        'predicted': names[0],
        'confidence': 0.75,
        'label': names[1],
        'label_confidence': 0.125,
        'name': f'{names[1]}.png',
        'path': f'/images/{names[1]}.png',
    }
    return {
        'split': 'test',
        'num_images': 16,
        'of': 16,
        'several_labels': False,
        'metrics': {'eval/accuracy': 0.8125, 'eval/loss': 0.4321},
        'classes': {
            name: {'accuracy': 0.5, 'num_examples': sum(row.values())}
            for name, row in confusion.items()
        },
        'confusion': confusion,
        'calibration': calibration(
            rng.uniform(0, 1, 16).astype(np.float32), rng.uniform(0, 1, 16) > 0.5
        ),
        'mistakes': [example],
        'hits': [example],
    }


def without(report, *parts):
    """A report without some of its parts."""
    missing = {name: f'no {name} here' for name in parts}
    return report | dict.fromkeys(parts) | {'missing': missing}


def check(source, links=()):
    """Checks the properties of every page: it makes no requests, and its ids are unique.

    Args:
      source: the page as HTML.
      links: the files beside the page that it may link to.

    Returns:
      (the parsed page, the data of its charts).
    """
    read = Read(source)
    for _, attributes in read.elements:
        for name in ('src', 'href', 'action', 'poster', 'srcset', 'data'):
            address = attributes.get(name, '#')
            assert address in links or re.match(r'#|data:', address), address
        assert not [name for name in attributes if name.startswith('on')]
    style = source[source.index('<style>') : source.index('</style>')]
    assert not re.search(r'url\(|@import', style)
    assert not re.search(r'\bfetch\(|XMLHttpRequest|import\(', read.scripts[-1])
    policy = read.of('meta', **{'http-equiv': 'Content-Security-Policy'})[0]['content']
    assert "default-src 'none'; img-src data:;" in policy
    assert 'unsafe-eval' not in policy
    ids = [attributes['id'] for _, attributes in read.elements if 'id' in attributes]
    assert len(ids) == len(set(ids))
    references = [a['href'][1:] for a in read.of('a') if a['href'] not in links]
    for _, attributes in read.elements:
        for name in ('aria-labelledby', 'aria-describedby', 'for'):
            references += attributes.get(name, '').split()
    assert set(references) <= set(ids)
    assert all(image.get('alt') for image in read.of('img'))
    assert all(
        chart['role'] == 'img' and chart['aria-label']
        for chart in read.of('div')
        if 'data-chart' in chart
    )
    assert all(head.get('scope') for head in read.of('th'))
    levels = [int(tag[1]) for tag, _ in read.elements if re.fullmatch(r'h\d', tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    data = json.loads(read.scripts[0])
    assert {c['data-chart'] for c in read.of('div') if 'data-chart' in c} == set(data['charts'])
    return read, data
