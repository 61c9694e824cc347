"""Weights from the Hugging Face hub; they are downloaded once and then read from its cache."""

import os

from vit_jax.errors import UserError
from vit_jax.weights import array_files

# File patterns, best first: the first kind that a repository has is downloaded.
_KINDS = (
    ['model.safetensors', 'model-*.safetensors', 'model.safetensors.index.json'],
    ['*.safetensors'],
    ['pytorch_model.bin'],
    ['*.npz'],
)


def fetch(source: str) -> str:
    """The local path of 'hf:ORG/NAME', 'hf:ORG/NAME/FILE' or 'timm:NAME'; other sources unchanged.

    Raises UserError if the hub has no such model, or if the hub cannot be reached and its cache on
    this machine lacks the model.
    """
    if not source.startswith(('hf:', 'timm:')):
        return source
    repository, file = _parse(source)
    if file:
        return _fetch_file(source, repository, file)
    for patterns in _KINDS:
        folder = _download(source, repository, [*patterns, *array_files.SIDECARS])
        names = os.listdir(folder) if os.path.isdir(folder) else ()  # missing without files
        if any(name.endswith(array_files.WEIGHT_FILES) for name in names):
            return folder
    raise UserError(
        f'{source}: the repository has no .safetensors, pytorch_model.bin or .npz file.',
        kind='content',
        file=source,
    )


def repository(source: str) -> str:
    """The repository 'ORG/NAME' of a source on the hub; '' for other sources.

    Raises UserError if the source names no repository.
    """
    if not source.startswith(('hf:', 'timm:')):
        return ''
    return _parse(source)[0]


def _parse(source):
    """Returns (repository, path of a file in it or '')."""
    kind, _, name = source.partition(':')
    if kind == 'timm':
        name = f'timm/{name}'
    parts = name.split('/', 2)
    if len(parts) < 2 or not all(parts):
        raise UserError(
            f'{source!r}: expected hf:ORGANISATION/NAME, hf:ORGANISATION/NAME/FILE or '
            'timm:NAME, as in hf:google/vit-base-patch16-224.',
            kind='value',
            value=source,
        )
    organisation, model, *file = parts
    return f'{organisation}/{model}', ''.join(file)


def _fetch_file(source, repository, file):
    """Downloads one file and the JSON files next to it; returns its local path."""
    directory = os.path.dirname(file)
    sidecars = [os.path.join(directory, name) for name in array_files.SIDECARS]
    folder = _download(source, repository, [file, *sidecars])
    return os.path.join(folder, file)


def _download(source, repository, patterns):
    import huggingface_hub  # importing it takes 0.5 s, which local files do not need
    from huggingface_hub import errors

    try:
        return huggingface_hub.snapshot_download(repository, allow_patterns=patterns)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(
            f'{source}: the Hugging Face hub has no public model {repository!r}; for '
            'a private one set HF_TOKEN.',
            kind='unknown',
            file=source,
            value=repository,
        ) from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f'{source}: the Hugging Face hub cannot be reached and its cache on this '
            f'machine lacks {repository!r} ({reason:.200}). Try again with a network, '
            'or download the files elsewhere and name their directory.',
            kind='unreadable',
            file=source,
            value=repository,
        ) from error
