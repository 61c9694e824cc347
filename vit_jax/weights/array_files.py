"""Containers of arrays: .npz, .safetensors and PyTorch's .pth, told apart by their content."""

import contextlib
import os
import pathlib
import shutil
import uuid
import zipfile
from collections.abc import Collection, Iterator
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.errors import UserError
from vit_jax.files import named, require_file, special_kind
from vit_jax.weights import limits, npz_file, sidecars, torch_file

WEIGHT_FILES = ('.safetensors', '.npz', '.pth', '.pt', '.bin')
# Beginnings of files beside models: of OpenCLIP's, and of the state of transformers' Trainer.
_OTHERS = ('open_clip_model.', 'training_args.', 'optimizer.', 'scheduler.', 'scaler.', 'rng_state')
_DTYPES = (
    'F64',
    'F32',
    'F16',
    'BF16',
    'I64',
    'I32',
    'I16',
    'I8',
    'U64',
    'U32',
    'U16',
    'U8',
    'BOOL',
)  # of .safetensors
SIDECARS = ('config.json', 'preprocessor_config.json')
WRITTEN = ('model.safetensors', *SIDECARS)  # into directories with one model


class _Index(msgspec.Struct):
    """model.safetensors.index.json: the file of each array."""

    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


class Contents(NamedTuple):
    """What a file or a directory with one model holds."""

    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]  # of a .safetensors file, {} of others
    sidecars: dict[str, dict]  # config.json and preprocessor_config.json, where they exist


def read(path: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays by name as they are in a file, and the metadata of a .safetensors file.

    Raises UserError if the file is missing, damaged, of an unknown kind or holds more than arrays.
    """
    require_file(path)
    try:
        with open(path, 'rb') as file:
            start = file.read(9)
        if start.startswith(b'PK'):
            return _read_zip(path), {}
        if start[8:] == b'{':
            limits.check_header('header', int.from_bytes(start[:8], 'little'))
            return _read_safetensors(path)
    except FileNotFoundError:
        raise UserError(
            f'there is no file {path!r}: expected a file, a directory, '
            'hf:ORGANISATION/NAME, timm:NAME or gs://BUCKET/FILE.',
            kind='missing',
            file=path,
        ) from None
    except UserError as error:
        raise UserError(f'{path} was refused: {error}.', kind='content', file=path) from error
    except MemoryError:
        raise
    except OSError as error:
        raise UserError(
            f'{path!r} cannot be read: {error.strerror or error}.', kind='unreadable', file=path
        ) from error
    except Exception as error:  # zip, NumPy and pickle raise any kind for a broken file
        raise UserError(
            f'{path} is damaged or cut short ({error}): copy or download it again.',
            kind='content',
            file=path,
        ) from error
    if start.startswith(b'\x80'):
        raise UserError(
            f'{path} is a bare pickle, as PyTorch wrote before version 1.6, which is '
            'not read: it can run any command. If you trust it, write it again with '
            "torch.save(torch.load(..., weights_only=True), ...) of today's PyTorch.",
            kind='content',
            file=path,
        )
    raise UserError(
        f'{path} is not a weights file: it begins with {start!r}, expected an .npz, '
        '.safetensors or .pth file (whatever its name). Programs (ONNX, StableHLO) '
        'are written only: read the weights that they were made of.',
        kind='content',
        file=path,
    )


def _read_zip(path):
    with zipfile.ZipFile(path) as file:
        if any(name.endswith('data.pkl') for name in file.namelist()):
            return torch_file.read(file)
        if not any(name.endswith('.npy') for name in file.namelist()):
            raise UserError('it is a zip file without arrays')
        return npz_file.read(file)


def _read_safetensors(path):
    arrays = {}
    with safetensors.safe_open(path, 'np') as file:
        for name in file.keys():  # noqa: SIM118
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise UserError(
                    f'{name} has dtype {dtype}, which is not supported: expected one '
                    f'of {", ".join(_DTYPES)}. Convert it with the program that wrote '
                    'it'
                )
            arrays[name] = file.get_tensor(name)
        return arrays, file.metadata() or {}


def write(
    path: str, arrays: dict[str, np.ndarray], kind: str, metadata: dict[str, str] | None = None
) -> None:
    """Writes arrays as `kind`, one of WEIGHT_FILES; equal arrays give equal bytes.

    Raises UserError if the kind is one of PyTorch's and PyTorch is not installed.
    """
    arrays = {name: np.asarray(x, order='C') for name, x in sorted(arrays.items())}
    if kind == '.npz':
        with open(path, 'wb') as file:  # or NumPy would add .npz to the name
            np.savez(file, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
    elif kind == '.safetensors':
        new = pathlib.Path(path)
        new.touch()
        mode = new.stat().st_mode  # of new files here; the library makes its own private
        try:
            safetensors.numpy.save_file(arrays, path, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from error
        new.chmod(mode)
    else:
        torch_file.write(path, arrays)


def read_path(path: str) -> Contents:
    """Reads a file, or a directory with one model, which may have several .safetensors files.

    Raises UserError as `read` does, and if there is no weights file or there are several.
    """
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    arrays: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    for file in _files_of_model(path) if os.path.isdir(path) else [path]:
        more, metadata = read(file)
        if both := arrays.keys() & more.keys():
            raise UserError(
                f'{file} and another file of the model both have {min(both)}: remove '
                'the one that does not belong to it.'
            )
        arrays |= more
    beside = {
        name: sidecars.read(file)
        for name in SIDECARS
        if os.path.isfile(file := os.path.join(directory, name))
    }
    return Contents(arrays, metadata, beside)


def _files_of_model(path):
    names = sorted(os.listdir(path))
    kinds = ('model.safetensors', 'model.safetensors.index.json', *WEIGHT_FILES)  # best first
    found = next(
        (
            files
            for kind in kinds
            if (files := [n for n in names if n.endswith(kind) and not n.startswith(_OTHERS)])
        ),
        [],
    )
    if len(found) != 1:
        what = (
            f'several: {", ".join(found)}. Name one of them'
            if found
            else (f'none, but {", ".join(names[:8])}' if names else 'none: the directory is empty')
        )
        raise UserError(
            f'{path}: expected one weights file ({", ".join(WEIGHT_FILES)}) or a '
            f'workdir with checkpoints/, found {what}.'
        )
    file = os.path.join(path, found[0])
    return _shards(path, file) if file.endswith('.json') else [file]


def _shards(directory, index):
    """The files that an index names, all of them in its directory."""
    require_file(index)
    names = sorted(set(sidecars.checked(_Index, sidecars.read(index), index).weight_map.values()))
    for name in names:
        if name != os.path.basename(name) or not name.endswith('.safetensors'):
            raise UserError(
                f'{index}: weight_map names the file {name!r:.80}: expected '
                '.safetensors files of the same directory.'
            )
        if not os.path.exists(os.path.join(directory, name)):
            raise UserError(
                f'there is no file {os.path.join(directory, name)!r}, which {index} '
                f'names: copy or download the missing one of {len(names)} files.'
            )
    return [os.path.join(directory, name) for name in names]


def is_directory(path: str) -> bool:
    """Whether weights written to `path` go into a directory: its name is not of a weights file."""
    return not path.endswith(WEIGHT_FILES)


def check_replaceable(path: str, written: Collection[str] = WRITTEN) -> None:
    """Raises UserError for a directory with others than the files `written`, a device and so on."""
    if (kind := special_kind(path)) and not os.path.isdir(path):
        raise UserError(
            f'{path!r} is {kind}: name another destination.', kind='unwritable', file=path
        )
    found = os.listdir(path) if os.path.isdir(path) else ()
    if others := set(found) - set(written):
        raise UserError(
            f'{path} is a directory that holds more than what is to be written there '
            f'({", ".join(sorted(others)[:3])}): name another destination.'
        )


@contextlib.contextmanager
def replacing(path: str, written: Collection[str] = WRITTEN) -> Iterator[str]:
    """The name for a new file or directory, which then takes the place of what is at `path`."""
    check_replaceable(path, written)
    path = os.path.realpath(path)  # a link stays one
    # Hosts that share a home may have processes of the same number.
    temporary, old = (f'{path}.{word}-{uuid.uuid4().hex[:8]}' for word in ('writing', 'replaced'))
    try:
        with named(path):
            yield temporary
            if os.path.isdir(path):  # which cannot be replaced in one step
                os.rename(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # which leaves a file alone
        pathlib.Path(temporary).unlink(missing_ok=True)
