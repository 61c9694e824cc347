"""JSON next to weights and in their metadata: any content gives weights or a single message.

Without the schemas it would raise RecursionError, TypeError and others.
"""

import copy
import json
import random

import pytest
import safetensors.numpy

from tests.support import small
from tests.support.errors import refused
from tests.support.small import message
from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights import array_files, sidecars

VALUES = [
    None,
    True,
    -1,
    0,
    3,
    10_000_000,
    10**30,
    0.5,
    -0.5,
    1e308,
    float('nan'),
    float('inf'),
    '',
    'gelu',
    'avgmax',
    '1e3',
    '\ud800',
    [],
    [0],
    [-1, 16],
    [1e9] * 3,
    ['a', None],
    {},
    {'height': -2},
    {'0': 'ant'},
    {'x': 'ant'},
    [[]],
]
TEXTS = [
    b'',
    b'\xff\xfe',
    b'\x00\x01\x02',
    b'null',
    b'3',
    b'[' * 200_000,
    b'{"a":' * 200_000,
    b'{"a": 1, "a": 2}',
    b'{"a": ' + b'9' * 5000 + b'}',
    b'{"hidden_size": 1e999}',
    b'{',
]


def mutations(value, number, seed=0):
    """Copies of a JSON object with one value changed or removed."""
    rng = random.Random(seed)
    for _ in range(number):
        mutant = copy.deepcopy(value)
        place = mutant
        while True:
            keys = list(place if isinstance(place, dict) else range(len(place)))
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            break
        if rng.random() < 0.1:
            del place[key]
        else:
            place[key] = rng.choice(VALUES)
        yield json.dumps(mutant).encode()


def replaceable(kind, path):
    """(the JSON object, a function that replaces it by bytes, the path to load) of one sidecar."""
    given = small.make('vit', num_layers=1)
    layout = {'config.json of timm': 'timm', 'metadata': 'vit_jax'}.get(kind, 'huggingface')
    target = path / ('x.safetensors' if layout == 'vit_jax' else 'x')
    weights.save(given, str(target), layout)
    if layout == 'vit_jax':
        arrays, metadata = array_files.read(str(target))

        def put(text):
            stated = {'vit_jax': text.decode(errors='replace')}
            safetensors.numpy.save_file(arrays, target, stated)

        return json.loads(metadata['vit_jax']), put, target
    if kind == 'index':
        names = array_files.read(str(target / 'model.safetensors'))[0]
        (target / 'model.safetensors').rename(target / 'a.safetensors')
        file = target / 'model.safetensors.index.json'
        value = {'metadata': {}, 'weight_map': dict.fromkeys(names, 'a.safetensors')}
    else:
        file = target / kind.split()[0]
        value = json.loads(file.read_text())
    return value, file.write_bytes, target


@pytest.mark.parametrize(
    'kind',
    [
        'config.json of timm',
        'config.json of transformers',
        'metadata',
        'preprocessor_config.json',
        'index',
    ],
)
def test_mutations_give_weights_or_one_message(kind, tmp_path):
    value, put, target = replaceable(kind, tmp_path)
    outcomes = {'weights': 0, 'message': 0}
    for text in [*TEXTS, *mutations(value, 80)]:
        put(text)
        try:
            loaded = weights.load(str(target))
            loaded.grid(), loaded.channels(), str(loaded.classes).encode()
            outcomes['weights'] += 1
        except UserError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1 or 'the arrays do not fit' in lines[0], text[:200]
            assert len(lines[0]) < 600, text[:200]
            outcomes['message'] += 1
    assert min(outcomes.values()) > 4, outcomes


@pytest.mark.parametrize(
    ('kind', 'change', 'field', 'expected'),
    [
        (
            'config.json of transformers',
            {'hidden_size': '128'},
            'hidden_size',
            'config.json: hidden_size is "128": expected a whole number or null.',
        ),
        (
            'config.json of transformers',
            {'num_hidden_layers': 10_000_000},
            'num_hidden_layers',
            'num_hidden_layers is 10000000: expected a whole number <= 1000.',
        ),
        (
            'config.json of transformers',
            {'image_size': [-16, 16]},
            'image_size[0]',
            'image_size[0] is -16: expected a whole number >= 1.',
        ),
        (
            'config.json of transformers',
            {'id2label': {'1': 'ant'}},
            'id2label',
            'id2label names 1 classes, but',
        ),
        (
            'preprocessor_config.json',
            {'image_mean': [0.5, None, 0.5]},
            'image_mean[1]',
            'preprocessor_config.json: image_mean[1] is null: expected a number.',
        ),
        (
            'preprocessor_config.json',
            {'image_mean': [0.5, 0.5]},
            'preprocess.mean',
            'a number for each of 3 channels',
        ),
        (
            'config.json of timm',
            {'model_args': [3]},
            'model_args',
            'config.json: model_args is [3]: expected an object or null.',
        ),
        (
            'config.json of timm',
            {'pretrained_cfg': {'crop_pct': float('nan')}},
            None,
            'config.json cannot be read as JSON (NaN is not a number)',
        ),
        (
            'metadata',
            {'preprocess': {'crop_ratio': 2}},
            'preprocess.crop_ratio',
            'the metadata of the file: preprocess.crop_ratio is 2: expected a number <= 1.0.',
        ),
    ],
)
def test_errors_name_file_field_value_and_expected_type(kind, change, field, expected, tmp_path):
    value, put, target = replaceable(kind, tmp_path)
    put(json.dumps(value | change).encode())
    with refused('content', field=field) as error:
        weights.load(str(target))
    assert expected in str(error.value)
    put(b'{"a": 1, "a": 2}')
    assert "('a' occurs 2 times)" in message(weights.load, str(target))
    put(b'\xff')
    assert 'cannot be read as JSON' in message(weights.load, str(target))


def test_missing_and_large_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / 'x'
    with refused('unreadable', file=path):
        sidecars.read(str(path))
    monkeypatch.setattr(sidecars, 'LARGEST_FILE', 1 << 20)
    path.write_bytes(b'[' * ((1 << 20) + 1))
    with refused('content', file=path):
        sidecars.read(str(path))
