"""fit.json: what a fit has decided and found so far, so that the same command resumes it.

Its folder also has the table of photos, and the best model.
"""

import os
from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.files import read_json, write_json

FILE = 'fit.json'
TABLE = 'photos.csv'  # the photos with their splits
MODEL = 'model.safetensors'  # the best model so far


class Record:
    """The entries of fit.json. Each is written once, when its stage is complete.

    Attributes:
      entries: by the name of the stage.
    """

    def __init__(self, folder: str, settings: Mapping[str, Any]):
        """Args:
        folder: of the fit.
        settings: what the command asks for.

        Raises:
          UserError: if the folder has a fit of other settings.
        """
        self._path = os.path.join(folder, FILE)
        self.entries: dict[str, Any] = {'settings': dict(settings)}
        if os.path.exists(self._path):
            self.entries = read_json(self._path, dict)
            self._require_same(settings)

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
