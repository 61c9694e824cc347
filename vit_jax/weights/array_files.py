"""Files of arrays: .npz, .safetensors and PyTorch's .pth, which are recognised by content."""

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
# Beginnings of the names of files that are not the model: OpenCLIP's copy of the model, and the
# state of transformers' Trainer.
_OTHERS = ('open_clip_model.', 'training_args.', 'optimizer.', 'scheduler.', 'scaler.', 'rng_state')
# Names of the supported dtypes in .safetensors files.
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
)
SIDECARS = ('config.json', 'preprocessor_config.json')
WRITTEN = ('model.safetensors', *SIDECARS)  # the files of a directory with one model


class _Index(msgspec.Struct):
    """model.safetensors.index.json: the file of each array."""

    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


class Contents(NamedTuple):
    """The contents of a file or of a directory with one model.

    Attributes:
      arrays: the arrays by name.
      metadata: the metadata of a .safetensors file; {} for other files.
      sidecars: config.json and preprocessor_config.json, where they exist.
    """

    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]
    sidecars: dict[str, dict]


def read(path: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays by name, and the metadata of a .safetensors file.

    Raises UserError if the file is missing, damaged or of an unknown kind, or contains anything but
    arrays.
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
        raise UserError(
            f'{path} was refused: {error}.',
            kind='content',
            field=error.field,
            file=path,
            value=error.value,
        ) from error
    except MemoryError:
        raise
    except OSError as error:
        raise UserError(
            f'{path!r} cannot be read: {error.strerror or error}.', kind='unreadable', file=path
        ) from error
    except Exception as error:  # zip, NumPy and pickle raise any exception for a broken file
        raise UserError(
            f'{path} is damaged or cut short ({error}): copy or download it again.',
            kind='content',
            file=path,
        ) from error
    if start.startswith(b'\x80'):
        raise UserError(
            f'{path} is a bare pickle, the format of PyTorch before version 1.6. vit_jax does not '
            'read it, because it can run any command. If you trust it, write it again with '
            'torch.save(torch.load(..., weights_only=True), ...) of a current PyTorch.',
            kind='content',
            file=path,
        )
    raise UserError(
        f'{path} is not a weights file: it begins with {start!r}, expected an .npz, '
        '.safetensors or .pth file (whatever its name). vit_jax writes programs (ONNX, StableHLO) '
        'and does not read them: name the weights that a program was made from.',
        kind='content',
        file=path,
        value=start,
    )


def _read_zip(path):
    with zipfile.ZipFile(path) as file:
        if any(name.endswith('data.pkl') for name in file.namelist()):
            return torch_file.read(file)
        if not any(name.endswith('.npy') for name in file.namelist()):
            raise UserError('it is a zip file without arrays', kind='content')
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
                    'it',
                    kind='content',
                    field=name,
                    value=dtype,
                )
            arrays[name] = file.get_tensor(name)
        return arrays, file.metadata() or {}


def write(
    path: str, arrays: dict[str, np.ndarray], kind: str, metadata: dict[str, str] | None = None
) -> None:
    """Writes arrays as `kind`, one of WEIGHT_FILES; equal arrays give equal bytes.

    Raises UserError if the kind is PyTorch's and PyTorch is not installed.
    """
    arrays = {name: np.asarray(x, order='C') for name, x in sorted(arrays.items())}
    if kind == '.npz':
        with open(path, 'wb') as file:  # NumPy would add .npz to a path
            np.savez(file, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
    elif kind == '.safetensors':
        new = pathlib.Path(path)
        new.touch()
        mode = new.stat().st_mode  # the mode of new files; the library would make it private
        try:
            safetensors.numpy.save_file(arrays, path, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from error
        new.chmod(mode)
    else:
        torch_file.write(path, arrays)


def read_path(path: str) -> Contents:
    """Reads a file, or a directory with one model, which may have several .safetensors files.

    Raises UserError as `read` does, and unless there is exactly one model.
    """
    if os.path.isdir(path):
        directory = path
        files = _files_of_model(path)
    else:
        directory = os.path.dirname(path)
        files = [path]
    arrays: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    for file in files:
        more_arrays, metadata = read(file)
        repeated = arrays.keys() & more_arrays.keys()
        if repeated:
            raise UserError(
                f'{file} and another file of the model both have {min(repeated)}: remove '
                'the file that does not belong to it.',
                kind='content',
                file=file,
                value=min(repeated),
            )
        arrays |= more_arrays
    objects = {}
    for name in SIDECARS:
        file = os.path.join(directory, name)
        if os.path.isfile(file):
            objects[name] = sidecars.read(file)
    return Contents(arrays, metadata, objects)


def _files_of_model(path):
    """The weights files of a directory; UserError unless it has exactly one model."""
    names = sorted(os.listdir(path))
    candidates = _candidates(names)
    if len(candidates) != 1:
        if candidates:
            found = f'several: {", ".join(candidates)}. Name one of them'
        elif names:
            found = f'none, but {", ".join(names[:8])}'
        else:
            found = 'none: the directory is empty'
        raise UserError(
            f'{path}: expected one weights file ({", ".join(WEIGHT_FILES)}) or a '
            f'workdir with checkpoints/, found {found}.',
            kind='conflict' if candidates else 'missing',
            file=path,
        )
    file = os.path.join(path, candidates[0])
    if file.endswith('.json'):
        return _shards(path, file)
    return [file]


def _candidates(names):
    """The names of the weights files of the most preferred kind that is present."""
    for ending in ('model.safetensors', 'model.safetensors.index.json', *WEIGHT_FILES):
        candidates = [n for n in names if n.endswith(ending) and not n.startswith(_OTHERS)]
        if candidates:
            return candidates
    return []


def _shards(directory, index):
    """The files that an index names; all of them must be in its directory."""
    require_file(index)
    weight_map = sidecars.checked(_Index, sidecars.read(index), index).weight_map
    names = sorted(set(weight_map.values()))
    for name in names:
        if name != os.path.basename(name) or not name.endswith('.safetensors'):
            raise UserError(
                f'{index}: weight_map names the file {name!r:.80}: expected '
                '.safetensors files of the same directory.',
                kind='content',
                field='weight_map',
                file=index,
                value=name,
            )
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            raise UserError(
                f'there is no file {path!r}, which {index} '
                f'names: copy or download the missing one of {len(names)} files.',
                kind='missing',
                file=path,
            )
    return [os.path.join(directory, name) for name in names]


def is_directory(path: str) -> bool:
    """Whether weights written to `path` are a directory: `path` has no ending of a weights file."""
    return not path.endswith(WEIGHT_FILES)


def check_replaceable(path: str, written: Collection[str] = WRITTEN) -> None:
    """Raises UserError unless weights may replace what exists at `path`.

    `path` may be missing, a file, or a directory that has no other files than `written`. A device,
    a pipe or a socket may not be replaced.
    """
    kind = special_kind(path)
    is_existing_directory = os.path.isdir(path)
    if kind and not is_existing_directory:
        raise UserError(
            f'{path!r} is {kind}: name another destination.', kind='unwritable', file=path
        )
    names = os.listdir(path) if is_existing_directory else ()
    others = sorted(set(names) - set(written))
    if others:
        raise UserError(
            f'{path} is a directory with other files than those to be written '
            f'({", ".join(others[:3])}): name another destination.',
            kind='conflict',
            file=path,
        )


@contextlib.contextmanager
def replacing(path: str, written: Collection[str] = WRITTEN) -> Iterator[str]:
    """Yields the path of a temporary file or directory, which replaces `path` at the end."""
    check_replaceable(path, written)
    path = os.path.realpath(path)  # a link stays a link
    # Random, because hosts that share a home may have processes of the same number.
    suffix = uuid.uuid4().hex[:8]
    temporary = f'{path}.writing-{suffix}'
    old = f'{path}.replaced-{suffix}'
    try:
        with named(path):
            yield temporary
            if os.path.isdir(path):  # os.replace does not replace a directory that has files
                os.rename(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # has no effect on a file
        pathlib.Path(temporary).unlink(missing_ok=True)
