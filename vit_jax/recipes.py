"""The recipes by name: the files of configs/, which a wheel carries as vit_jax/configs/."""

import pathlib

_PACKAGE = pathlib.Path(__file__).parent
# An installed package has its own copy; a clone has the folder next to the package.
_FOLDERS = (_PACKAGE / 'configs', _PACKAGE.parent / 'configs')


def names() -> list[str]:
    """Returns the sorted names of all recipes, for example 'vit' for configs/vit.py."""
    return sorted(path.stem for path in _folder().glob('*.py'))


def path_of(name: str) -> str | None:
    """Returns the file of a recipe; None if there is no recipe of this name."""
    path = _folder() / f'{name}.py'
    return str(path) if path.is_file() else None


def _folder():
    return next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])
