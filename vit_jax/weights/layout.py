"""The type of a layout of weights; each module of layouts/ defines one value of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.weights.array_files import Contents
from vit_jax.weights.model import Weights
from vit_jax.weights.table import Entry

Arrays = dict[str, np.ndarray]


def only(fields: Mapping) -> dict[str, tuple]:
    """Allowed values of fields that can have no other values than in `fields`."""
    return {name: (value,) for name, value in fields.items()}


# Values that all programs have. Only vit_jax has axial attention and position embeddings in other
# places than the stem.
PLAIN = only(
    dict(
        attention='full',
        block='sequential',
        position_at='stem',
        position='learned_1d',
        pool='cls',
        num_registers=0,
        stem_norm=False,
        norm_after_pool=False,
        layer_scale_init=0.0,
        axial_heads=0,
    )
)


class Reading(NamedTuple):
    """The model that a layout finds in the contents of a file or directory.

    Attributes:
      arrays: by the names in `table`.
      fields: fields of the model. All of them if the layout is native, otherwise those that arrays
        do not show (see model.describe).
      table: entries for all names that versions of the layout have had.
      num_classes: only if the layout is native; otherwise the head shows it.
      classes: as in Weights.
      preprocess: as in Weights.
      loss: as in Weights.
      assumed: names in `fields` whose values are defaults of the layout's program, because the
        source does not state them.
      doubt: a warning about the function gelu; it continues a sentence that begins with the source.
    """

    arrays: Arrays
    fields: Mapping
    table: Sequence[Entry]
    num_classes: int | None = None
    classes: list[str] | None = None
    preprocess: dict | None = None
    loss: str | None = None
    assumed: Sequence[str] = ()
    doubt: str = ''


class Layout(NamedTuple):
    """How a program stores a model.

    Attributes:
      mark: regular expression; a file is in this layout if it has an array of such a name.
      suffixes: endings of the files that the layout can be written to; '' is a directory with JSON.
      read: contents -> the model; raises UserError for a model that vit_jax does not have.
      native: whether arrays have our names and shapes, layers stacked, and need no table.
      table: fields of a model -> an entry for each array that is written.
      allowed_values: fields of a model, path -> the values that each field may have.
      refusals: weights with allowed values, path -> reasons why they cannot be written.
      finish: arrays by their names in the layout, weights -> the arrays to write.
      usual_preprocess: weights that do not state how images are prepared -> a reason, and the
        usual fields of `preprocess`; None if nothing is certain.
      sidecars: weights -> JSON objects of a directory, by file name.
      metadata: weights -> metadata of a .safetensors file. With 'format', transformers reads it as
        PyTorch's.
    """

    mark: str
    suffixes: tuple[str, ...]
    read: Callable[[Contents], Reading]
    native: bool = False
    table: Callable[[Mapping], Sequence[Entry]] = lambda model: ()
    allowed_values: Callable[[Mapping, str], dict[str, tuple]] = lambda model, path: {}
    refusals: Callable[[Weights, str], list[str]] = lambda weights, path: []
    finish: Callable[[Arrays, Weights], Arrays] = lambda arrays, weights: arrays
    usual_preprocess: Callable[[Weights], tuple[str, dict] | None] = lambda weights: None
    sidecars: Callable[[Weights], dict[str, dict]] = lambda weights: {}
    metadata: Callable[[Weights], dict[str, str]] = lambda weights: {'format': 'pt'}
