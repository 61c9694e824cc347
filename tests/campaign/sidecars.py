"""JSON files of weights with values of the wrong type, size or meaning, or without valid JSON.

A directory may load only as a complete model whose `preprocess` prepares an image.
"""

import contextlib
import json
import pathlib
import random
import shutil
import struct

import numpy as np
import safetensors.numpy
from PIL import Image

from tests.campaign import mutate, weights
from tests.campaign.cases import Failure
from vit_jax import cli
from vit_jax.data import images
from vit_jax.weights import description

KEEP_BYTES = True
SECONDS = 20
GIGABYTES = 1
QUOTA = 1000
# The JSON files of each directory; METADATA is the JSON in the header of its weights file.
METADATA = 'model.safetensors'
BASES = {
    'hf': ('config.json', 'preprocessor_config.json'),
    'timm': ('config.json',),
    'sharded': ('model.safetensors.index.json', 'config.json'),
    'own': (METADATA,),
    'classes': ('classes.json',),
}
PICTURE = 'picture.png'
TRAP = '../outside.safetensors'


def prepare(bases):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (21, 30, 3), np.uint8)).save(bases / PICTURE)
    for name, layout in (('hf', 'huggingface'), ('timm', 'timm'), ('classes', 'timm')):
        weights.save(bases, name, layout, 'vit')
    _write(bases / 'classes/classes.json', [f'class {k}' for k in range(7)])
    (bases / 'own').mkdir()
    weights.save(bases, f'own/{METADATA}', 'vit_jax', 'vit')
    shutil.copytree(bases / 'hf', bases / 'sharded')
    arrays = safetensors.numpy.load_file(bases / 'hf/model.safetensors')
    shards = {name: f'model-0000{k % 2 + 1}-of-00002.safetensors' for k, name in enumerate(arrays)}
    for shard in set(shards.values()):
        safetensors.numpy.save_file(
            {n: x for n, x in arrays.items() if shards[n] == shard}, bases / 'sharded' / shard
        )
    (bases / 'sharded/model.safetensors').unlink()
    _write(
        bases / 'sharded/model.safetensors.index.json',
        {'metadata': {'total_size': 1}, 'weight_map': shards},
    )


def _write(path, value):
    path.write_text(mutate.json_text(value), encoding='utf-8', errors='surrogatepass')


def draw(rng, bases):
    base = rng.choice(list(BASES))
    file = rng.choice(BASES[base])
    number = rng.choice((1, 1, 1, 1, 2, 3))
    if rng.random() < 0.15 and file != METADATA:
        return base, [(file, *mutate.draw_in_place(rng, 0.5))]
    if base == 'sharded' and rng.random() < 0.2:
        return base, [(BASES[base][0], 'trap', rng.randrange(10))]
    return base, [
        (file, 'json', rng.choice(mutate.JSON), rng.randrange(1 << 30)) for _ in range(number)
    ]


def make(case, bases):
    shutil.copytree(bases / case.base, 'model')
    for file, operation, *parameters in case.changes:
        path = pathlib.Path('model', file)
        with contextlib.suppress(Exception):  # an earlier change may have damaged the file
            if operation == 'trap':
                _trap(path, *parameters)
            elif operation != 'json':
                mutate.in_place(path, operation, *parameters)
            elif file == METADATA:
                _change_metadata(path, *parameters)
            else:
                _write(path, mutate.change_json(json.loads(path.read_text()), *parameters))


def _trap(path, seed):
    """Makes the index name a file outside of the directory for some arrays."""
    index = json.loads(path.read_text())
    if 'weight_map' not in index:
        return
    name = random.Random(seed).choice(sorted(index['weight_map']))
    shard = path.parent / index['weight_map'][name]
    shutil.copy(shard, path.parent / TRAP)
    index['weight_map'] = {
        n: TRAP if s == shard.name else s for n, s in index['weight_map'].items()
    }
    _write(path, index)


def _change_metadata(path, operation, seed):
    data = path.read_bytes()
    (length,) = struct.unpack('<Q', data[:8])
    header = json.loads(data[8 : 8 + length])
    stated = json.loads(header['__metadata__']['vit_jax'])
    header['__metadata__']['vit_jax'] = mutate.json_text(
        mutate.change_json(stated, operation, seed)
    )
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data[8 + length :])


def check(case, bases):
    parser = cli.make_parser('predict', '')
    cli.add_weights_options(parser)
    arguments = [f'--pretrained=model/{METADATA}' if case.base == 'own' else '--pretrained=model']
    if case.base == 'classes':
        arguments.append('--classes=model/classes.json')
    loaded = cli.read_weights(parser.parse_args(arguments))
    if any(change[1] == 'trap' for change in case.changes):
        raise Failure('silent', 'a file outside of the directory was read')
    weights.check_model(loaded)
    preprocess = description.complete_preprocess(loaded)
    image = images.load(str(bases / PICTURE), loaded.image_size(), preprocess)
    if image.shape != (*loaded.image_size(), 3) or not np.isfinite(image).all():
        raise Failure('silent', f'images cannot be prepared as {preprocess}')
    if not all(isinstance(name, str) for name in loaded.classes or ()):
        raise Failure('silent', 'names of classes that are not text')
    return 'loaded'
