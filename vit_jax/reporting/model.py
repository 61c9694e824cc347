"""The model of a run, with its weights and its data set."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.scoring import split
from vit_jax.weights import Loaded, description
from vit_jax.weights.apply import as_pixels
from vit_jax.workdir import record


@dataclasses.dataclass(frozen=True)
class Model(Loaded):
    """The model of a run with its weights, and the section `dataset` of the run's config."""

    dataset: dict[str, Any]

    def facts(self) -> dict[str, Any]:
        """Returns `step` of the checkpoint, the number of `parameters`, and `image_size`."""
        return {
            'step': int(os.path.basename(self.weights.source)),
            'parameters': sum(x.size for x in jax.tree.leaves(self.params)),
            'image_size': list(self.weights.image_size()),
        }

    def pixels(self, images: Float[np.ndarray, '... 3']) -> np.ndarray:
        """Returns prepared images as uint8 pixels."""
        return as_pixels(images, description.complete_preprocess(self.weights))

    def batch_size(self, least: int) -> int:
        """Returns a batch size of about `least` images, with equally many for every device."""
        return max(least // jax.device_count(), 1) * jax.device_count()


def load(workdir: str, config: Mapping[str, Any]) -> Model:
    """Loads the best checkpoint if the run keeps it, otherwise the newest.

    Raises:
      UserError: if there is no readable checkpoint, or the model does not take RGB images.
    """
    if not record.saved_steps(record.checkpoint_directory(workdir)):
        raise UserError(f'{workdir} has no checkpoint.', kind='missing', file=workdir)
    loaded = weights.load(workdir)
    description.check_rgb(loaded)
    ready = weights.build(loaded)
    return Model(
        ready.weights,
        ready.module,
        ready.params,
        split.dataset_of(workdir, {'name': None}),
    )
