"""Weights from the Hugging Face hub, downloaded once; later its cache is enough."""

import os

from vit_jax.errors import UserError
from vit_jax.weights import array_files

# The first kind that a repository has is taken.
_KINDS = (
    ['model.safetensors', 'model-*.safetensors', 'model.safetensors.index.json'],
    ['*.safetensors'],
    ['pytorch_model.bin'],
    ['*.npz'],
)


def fetch(source: str) -> str:
    """The local path of 'hf:ORG/NAME', 'hf:ORG/NAME/FILE' or 'timm:NAME'; of others, `source`.

    Raises UserError if the hub has no such model, or cannot be reached and the cache lacks it.
    """
    if not source.startswith(('hf:', 'timm:')):
        return source
    kind, _, name = source.partition(':')
    parts = (name if kind == 'hf' else f'timm/{name}').split('/', 2)
    if len(parts) < 2 or not all(parts):
        raise UserError(
            f'{source!r}: expected hf:ORGANISATION/NAME, hf:ORGANISATION/NAME/FILE or '
            'timm:NAME, as in hf:google/vit-base-patch16-224.'
        )
    repository, file = '/'.join(parts[:2]), parts[2:]
    if file:
        beside = [os.path.join(os.path.dirname(*file), name) for name in array_files.SIDECARS]
        return os.path.join(_download(source, repository, [*file, *beside]), *file)
    for patterns in _KINDS:
        folder = _download(source, repository, [*patterns, *array_files.SIDECARS])
        names = os.listdir(folder) if os.path.isdir(folder) else ()  # no directory without files
        if any(name.endswith(array_files.WEIGHT_FILES) for name in names):
            return folder
    raise UserError(
        f'{source}: the repository has no .safetensors, pytorch_model.bin or .npz file.'
    )


def _download(source, repository, patterns):
    import huggingface_hub  # half a second that local files need not wait for
    from huggingface_hub import errors

    try:
        return huggingface_hub.snapshot_download(repository, allow_patterns=patterns)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(
            f'{source}: the Hugging Face hub has no public model {repository!r}; for '
            'a private one set HF_TOKEN.'
        ) from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f'{source}: the Hugging Face hub cannot be reached and its cache on this '
            f'machine lacks {repository!r} ({reason:.200}). Try again with a network, '
            'or download the files elsewhere and name their directory.'
        ) from error
