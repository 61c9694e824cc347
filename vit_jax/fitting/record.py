"""fit.json: the decisions and results of a fit so far, which let the same command resume it.

Its folder also has the table of photos, and the best model.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError, some
from vit_jax.files import read_json, write_json
from vit_jax.workdir.run_directory import LOG

FILE = 'fit.json'
IMAGES = 'photos'  # folder of the images of a data set that has no files
TABLE = 'photos.csv'  # the photos with their splits
MODEL = 'model.safetensors'  # the best model so far
_BEFORE_THE_BEGINNING = {LOG, IMAGES, f'{FILE}.tmp'}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the command.

    Attributes:
      data: a directory, a table of photos or a data set.
      pretrained: weights of any layout.
      minutes: how long it may take.
      seed: of the cuts and of all runs.
      folds: of the cross-validation of the linear probe; 0: there is none.
    """

    data: str
    pretrained: str
    minutes: float
    seed: int = 0
    folds: int = 0


class Record:
    """The entries of fit.json. Each is written once, when its stage is complete.

    `begin` comes before any other file of the fit, so that a folder with files and without fit.json
    is not the folder of a fit.

    Attributes:
      entries: by the name of the stage.
    """

    def __init__(self, folder: str, settings: Mapping[str, Any]):
        """Args:
        folder: of the fit.
        settings: the settings of the command.

        Raises:
          UserError: if the folder has a fit of other settings, or files that are of no fit.
        """
        self._path = os.path.join(folder, FILE)
        self.entries: dict[str, Any] = {'settings': dict(settings)}
        if os.path.exists(self._path):
            self.entries = read_json(self._path, dict)
            self._require_same(settings)
        elif os.path.isdir(folder):
            _require_free(folder)

    def _require_same(self, settings):
        recorded = self.entries.get('settings', {})
        for name, value in settings.items():
            if recorded.get(name) != value:
                raise UserError(
                    f'{name} is {value!r}, and the fit in {os.path.dirname(self._path)} began with '
                    f'{recorded.get(name)!r}. To resume it, repeat its command; to start another '
                    'one, choose another --workdir.',
                    kind='conflict',
                    field=name,
                    file=self._path,
                    value=value,
                )

    def begin(self) -> None:
        """Record the settings, before any stage.

        Raises:
          UserError: if the file cannot be written.
        """
        write_json(self._path, self.entries)

    def has(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return stage in self.entries

    def __getitem__(self, stage: str) -> Any:
        return self.entries[stage]

    def write(self, stage: str, value: Any) -> None:
        """Record a stage.

        Raises:
          UserError: if the file cannot be written.
        """
        self.entries[stage] = value
        write_json(self._path, self.entries)


def _require_free(folder):
    """Raise UserError if a folder without a fit has files, which a fit could replace."""
    others = sorted(
        name
        for name in os.listdir(folder)
        if name not in _BEFORE_THE_BEGINNING and not name.startswith('.')
    )
    if others:
        raise UserError(
            f'--workdir {folder} has files that are of no fit: {some(others)}. Expected a new or '
            'empty directory, or the one of a fit to resume: choose another --workdir.',
            kind='conflict',
            field='--workdir',
            file=folder,
            value=others,
        )
