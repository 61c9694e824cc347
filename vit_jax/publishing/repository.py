"""A repository on the Hugging Face Hub: its name, its files, and the upload of a folder."""

import os
import shlex

from vit_jax.errors import UserError
from vit_jax.publishing import card
from vit_jax.weights import array_files

FILES = (card.FILE, *array_files.WRITTEN)  # the files of a folder for the Hub
TOKENS = 'https://huggingface.co/settings/tokens'


def check_name(name: str) -> None:
    """Raises UserError unless `name` is a valid ORG/NAME of the Hub."""
    from huggingface_hub import errors, utils  # importing it takes 0.5 s

    try:
        utils.validate_repo_id(name)
        reason = '' if name.count('/') == 1 else 'it has no organisation or user.'
    except errors.HFValidationError as error:
        reason = str(error)
    if reason:
        raise UserError(
            f'--push={name}: {reason} Expected ORG/NAME, as in --push=my-lab/flowers: your user '
            'name or an organisation, and a name of letters, digits, -, _ and dots.',
            kind='value',
            field='--push',
            value=name,
        )


def listing(folder: str, name: str) -> str:
    """A line for each file of the folder: its name, its size, and its address on the Hub."""
    from huggingface_hub import hf_hub_url

    lines = []
    for file in sorted(os.listdir(folder)):
        size = os.path.getsize(os.path.join(folder, file))
        lines.append(f'{file:<26} {size:>13,} bytes  {hf_hub_url(name, file)}')
    return '\n'.join(lines)


def upload(folder: str, name: str, overwrite: bool) -> str:
    """Uploads a folder to the repository `name`, which is created if it does not exist.

    Args:
      folder: has FILES.
      name: ORG/NAME.
      overwrite: whether files of the repository may be replaced, in a new commit.

    Returns:
      The address of the repository.

    Raises:
      UserError: there is no token, the repository has such files and `overwrite` is False, or the
        Hub refuses the upload or cannot be reached. The folder stays.
    """
    import huggingface_hub
    from huggingface_hub import errors

    token = huggingface_hub.get_token()
    if not token:
        raise UserError(
            f'There is no token for the Hugging Face Hub: get one with write access at {TOKENS}, '
            f'and run `hf auth login` or set HF_TOKEN. {_ready(folder, name)}',
            kind='missing',
            field='HF_TOKEN',
            file=folder,
        )
    api = huggingface_hub.HfApi(token=token)
    try:
        address = api.create_repo(name, exist_ok=True)
        existing = sorted(set(FILES) & set(api.list_repo_files(name)))
        if existing and not overwrite:
            raise _conflict(folder, name, existing)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message='Upload a model and its card with vit_jax',
            delete_patterns=list(FILES),  # files of an earlier upload in another layout
        )
    except (errors.HTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise _failure(folder, name, error) from error
    return str(address)


def _conflict(folder, name, existing):
    return UserError(
        f'{name} on the Hugging Face Hub has {", ".join(existing)} already: choose another name, '
        'or add --overwrite to replace them in a new commit, the card included. To keep the card '
        f'of the Hub: {_command(folder, name)} --exclude {card.FILE}',
        kind='conflict',
        field='--push',
        file=folder,
        value=name,
    )


def _failure(folder, name, error):
    """The UserError for a refused or failed upload."""
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if status in (401, 403):
        organisation = name.partition('/')[0]
        return UserError(
            f'The Hugging Face Hub refuses to write {name} ({reason:.200}): expected a token with '
            f'write access to {organisation}. Get one at {TOKENS}, and run `hf auth login` or set '
            f'HF_TOKEN. {_ready(folder, name)}',
            kind='value',
            field='HF_TOKEN',
            file=folder,
            value=name,
        )
    return UserError(
        f'The upload to {name} on the Hugging Face Hub failed ({reason:.200}): check the network. '
        f'{_ready(folder, name)}',
        kind='resource',
        field='--push',
        file=folder,
        value=name,
    )


def _ready(folder, name):
    return f'The folder {folder} is written and ready. To upload it: {_command(folder, name)}'


def _command(folder, name):
    return f'hf upload {name} {shlex.quote(folder)} .'
