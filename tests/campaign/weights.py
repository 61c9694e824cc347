"""Weight files of every layout with changed bytes, headers, arrays and pickles.

A file may load only as a complete model with finite parameters. Zip files have checksums: with
flipped bits they must be refused, or load the same arrays.
"""

import contextlib
import io
import json
import pathlib
import random
import shutil
import struct
import warnings
import zipfile

import jax
import numpy as np
import safetensors
import safetensors.numpy

from tests.campaign import mutate, pickles
from tests.campaign.cases import Failure
from tests.support import small
from vit_jax import models, weights
from vit_jax.weights.model import flatten

KEEP_BYTES = True
SECONDS = 20
GIGABYTES = 1
QUOTA = 5000
_TINY = dict(patch_size=(4, 4), hidden_size=64, num_layers=2, mlp_dim=32, num_heads=1)
MODELS = {'vit': {}, 'gap': dict(pool='gap'), 'map': dict(pool='map')}
BASES = {
    'google.npz': ('google', 'vit'),
    'big_vision.npz': ('big_vision', 'map'),
    'timm.safetensors': ('timm', 'vit'),
    'gap.safetensors': ('timm', 'gap'),
    'torchvision.safetensors': ('torchvision', 'vit'),
    'own.safetensors': ('vit_jax', 'vit'),
    'hf': ('huggingface', 'vit'),
    'timm.pth': ('timm', 'vit'),
    'map.pth': ('timm', 'map'),
    'torchvision.pth': ('torchvision', 'vit'),
}
FILE = 'model.safetensors'  # the weights file in a directory
_SHAPES = {}  # cache: the shapes of the parameters by model


def make_model(name):
    """Random weights with few bits, so that the files in the corpus are small."""
    small.MODELS['campaign'] = _TINY | MODELS[name]
    model = small.make('campaign', gelu='erf', layer_norm_epsilon=1e-6)
    model.params.update(jax.tree.map(lambda x: np.round(x * 8) / 8, model.params))
    return model


def save(bases, base, layout, model):
    path = bases / base
    approximated, _ = weights.approximate(make_model(model), str(path), layout)
    if base.endswith('.pth'):
        plain = bases / f'{base}.safetensors'
        weights.save(approximated, str(plain), layout)
        pickles.write(path, safetensors.numpy.load_file(plain))
    else:
        weights.save(approximated, str(path), layout)


def prepare(bases):
    for base, (layout, model) in BASES.items():
        save(bases, base, layout, model)
    shutil.copy(bases / 'google.npz', bases / 'bomb.npz')
    _write_bomb(bases / 'bomb.npz', 'x.npy')


def draw(rng, bases):
    if rng.random() < 0.002:
        return 'bomb.npz', []
    base = rng.choice(list(BASES))
    kind = base.partition('.')[2]
    operations = {
        'npz': ('bytes', 'array', 'npy', 'member'),
        'pth': ('bytes', 'array', 'pickle', 'opcodes', 'malicious', 'member'),
    }.get(kind, ('bytes', 'array', 'header', 'length', 'many'))
    scales = (8, 8, 4, 4, 0.2) if kind != 'pth' else (8, 6, 6, 4, 6, 2)
    operation = rng.choices(operations, scales[: len(operations)])[0]
    if operation == 'bytes':
        return base, [
            ('bytes', *mutate.draw_in_place(rng, 0.03)) for _ in range(rng.choice((1, 1, 1, 2, 4)))
        ]
    return base, [(operation, rng.randrange(1 << 30)) for _ in range(rng.choice((1, 1, 2, 3)))]


def make(case, bases):
    source = bases / case.base
    target = _target(case)
    if source.is_dir():
        shutil.copytree(source, case.base)
    else:
        shutil.copy(source, target)
    for operation, *parameters in case.changes:
        data = target.read_bytes() if target.is_file() else b''
        if operation == 'bytes':
            mutate.in_place(target, *parameters)
            continue
        with contextlib.suppress(Exception):  # an earlier change may have damaged the file
            target.write_bytes(OPERATIONS[operation](data, random.Random(*parameters)))


def _target(case):
    path = pathlib.Path(case.base)
    return path / FILE if path.suffix == '' else path


def check(case, bases):
    loaded = weights.load(case.base)
    check_model(loaded)
    if case.base.endswith('.npz'):
        with zipfile.ZipFile(case.base) as file:
            if len(set(file.namelist())) < len(file.namelist()):
                raise Failure('silent', 'one of two arrays of the same name')
    has_flips = case.changes and all(
        change[0] == 'bytes' and change[1] in mutate.BYTES for change in case.changes
    )
    if has_flips and case.base.endswith(('.npz', '.pth')):
        intact = flatten(weights.load(str(bases / case.base)).params)
        arrays = flatten(loaded.params)
        if arrays.keys() != intact.keys() or any(
            not np.array_equal(x, intact[name]) for name, x in arrays.items()
        ):
            raise Failure('silent', 'other arrays from a damaged zip file')
        return 'equal'
    return 'loaded'


def check_model(loaded):
    """Raises Failure unless the weights have all parameters of their model, all finite."""
    image = (1, *loaded.image_size(), loaded.channels())
    key = repr((loaded.model, loaded.num_classes, image))
    if key not in _SHAPES:
        model = models.build(loaded.model, loaded.num_classes)
        params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(image, float))
        _SHAPES[key] = {name: x.shape for name, x in flatten(params['params']).items()}
    arrays = flatten(loaded.params)
    if {name: x.shape for name, x in arrays.items()} != _SHAPES[key]:
        raise Failure('silent', 'parameters of another model')
    for x in arrays.values():
        if not np.isfinite(np.asarray(x, np.float32)).all():
            raise Failure('not finite', 'values that are not finite are loaded')


# Changes of arrays; the file is then written again in its format.


def _arrays(data):
    if data[:2] == b'PK':
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            if any(name.endswith('.pkl') for name in file.namelist()):
                return pickles.read(file), pickles.written
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return dict(file), _npz
    (length,) = struct.unpack('<Q', data[:8])
    metadata = json.loads(data[8 : 8 + length]).get('__metadata__')
    return safetensors.numpy.load(data), lambda arrays: safetensors.numpy.save(
        {k: np.ascontiguousarray(x) for k, x in arrays.items()}, metadata
    )


def _npz(arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def change_arrays(data, rng):
    arrays, write = _arrays(data)
    name = rng.choice(sorted(arrays))
    kind = rng.choice(
        (
            'drop',
            'rename',
            'number',
            'reshape',
            'cast',
            'nan',
            'inf',
            'huge',
            'empty',
            'extra',
            'grow',
            'scalar',
            'transpose',
        )
    )
    x = np.array(arrays.pop(name))
    if kind == 'rename':
        arrays[rng.choice((name + 'x', name[1:], '../' + name, name.upper(), 'x' * 5000))] = x
    elif kind == 'number':
        number = rng.choice((2, 7, 1000000, 10**18, -1))
        arrays |= {name: x, ''.join(str(number) if c.isdigit() else c for c in name): x}
        arrays[f'blocks.{number}.norm1.weight'] = x
    elif kind == 'reshape':
        arrays[name] = x.reshape(rng.choice(((-1,), (1, *x.shape), (x.size, 1), (*x.shape, 1, 1))))
    elif kind == 'cast':
        arrays[name] = x.astype(rng.choice(('f2', 'f8', 'i8', 'u1', 'bool', 'i2')))
    elif kind in ('nan', 'inf', 'huge'):
        with np.errstate(over='ignore'):
            x.flat[rng.randrange(x.size)] = {'nan': np.nan, 'inf': -np.inf, 'huge': 3e38}[kind]
        arrays[name] = x
    elif kind == 'grow':
        arrays[name] = np.concatenate([x, x]) if x.ndim else x
    elif kind != 'drop':
        arrays[name] = {
            'empty': x[:0] if x.ndim else x.reshape(1)[:0],
            'extra': x,
            'scalar': x.reshape(-1)[0],
            'transpose': x.T,
        }[kind]
        if kind == 'extra':
            arrays[rng.choice(('x', 'optimizer/step', 'blocks.0.new.weight', ''))] = x
    return write(arrays)


# Headers.


def change_header(data, rng):
    """Changes the JSON of a .safetensors file."""
    (length,) = struct.unpack('<Q', data[:8])
    header = mutate.change_json(
        json.loads(data[8 : 8 + length]), rng.choice(mutate.JSON), rng.randrange(1 << 30)
    )
    text = mutate.json_text(header).encode('utf-8', 'surrogatepass')
    return struct.pack('<Q', len(text)) + text + data[8 + length :]


def change_length(data, rng):
    """Changes the length of the header of a .safetensors file."""
    (length,) = struct.unpack('<Q', data[:8])
    lengths = (0, 1, length - 1, length + 1, len(data), 10**8, 2**31, 2**40, 2**63, 2**64 - 1)
    return struct.pack('<Q', rng.choice(lengths)) + data[8:]


def many_entries(data, rng):
    """Writes a header with very many empty arrays, or with very many spaces."""
    number = rng.choice((10, 1000, 100_000, 1_000_000))
    entry = '"blocks.%d.x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = '{' + ','.join(entry % k for k in range(number)) + '}'
    text = text if rng.random() < 0.7 else '{' + ' ' * (90 * number) + '}'
    return struct.pack('<Q', len(text)) + text.encode() + data[8:]


def change_npy(data, rng):
    """Changes the header of one array of an .npz file."""
    dtype = rng.choice(
        (
            '<f4',
            '>f4',
            '|S4',
            '|V4',
            '<U1',
            '|O',
            '<M8[s]',
            '<c8',
            '<f2',
            '|V2',
            [('a', '<f4')],
            '<f16',
            'f4,f4',
            '|b1',
        )
    )
    shape = rng.choice(
        (
            (1,),
            (0,),
            (-1,),
            (2**62,),
            (2**31, 2**31),
            (10**9,),
            (),
            (1,) * 40,
            (64, 0),
            'x',
            (0.5,),
            (True,),
        )
    )

    def change(name, content):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.zeros(1, np.float32))
        size = len(buffer.getvalue()) - 4
        fields = dict(
            descr=rng.choice((dtype, '<f4')),
            fortran_order=rng.choice((False, True, 7)),
            shape=shape,
        )
        text = f'{fields}'.ljust(size - 11).encode() + b'\n'
        return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(text)) + text + content[size:]

    return _zipped(data, rng, change)


def change_member(data, rng):
    """Changes one member of a zip file: its bytes, an array of objects, or a second copy."""
    operation = rng.choice(('bytes', 'bytes', 'twice', 'object'))
    if operation == 'object':
        return _zipped(data, rng, lambda name, content: pickles.object_array(rng))
    if operation == 'twice':
        return _zipped(data, rng, lambda name, content: content[:-4] + b'\0\0\x80?', twice=True)
    change = mutate.BYTES[rng.choice(sorted(mutate.BYTES))]
    return _zipped(data, rng, lambda name, content: change(content, rng))


def _zipped(data, rng, change, twice=False):
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, 'w') as new:
        chosen = rng.choice(old.namelist())
        warnings.simplefilter('ignore')  # zipfile warns of duplicate names
        for name in old.namelist():
            content = old.read(name)
            if name == chosen:
                if twice:
                    new.writestr(name, content)
                content = change(name, content)
            new.writestr(name, content)
    return buffer.getvalue()


def _write_bomb(path, name):
    """Adds a compressed member of 1.2 GB of zeros to a zip file."""
    with (
        zipfile.ZipFile(path, 'a', zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open(name, 'w', force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(
            member, dict(descr='<f4', fortran_order=False, shape=(300_000_000,))
        )
        for _ in range(100):
            member.write(bytes(12_000_000))


OPERATIONS = {
    'array': change_arrays,
    'header': change_header,
    'length': change_length,
    'many': many_entries,
    'npy': change_npy,
    'member': change_member,
    'pickle': pickles.change_tensors,
    'opcodes': pickles.change_opcodes,
    'malicious': pickles.malicious,
}
