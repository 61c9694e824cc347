"""The type of a layout of weights; each module of layouts/ defines one value of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.weights.array_files import Contents
from vit_jax.weights.model import Weights
from vit_jax.weights.table import Entry

Arrays = dict[str, np.ndarray]


def only(fields: Mapping) -> dict[str, tuple]:
    """The allowed values of fields whose only possible values are in `fields`."""
    return {name: (value,) for name, value in fields.items()}


# Values that all programs support. Only vit_jax has axial attention, and position embeddings
# outside the stem.
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
      arrays: the arrays, by the names in `table`.
      fields: all fields of the model if the layout is native, otherwise the fields that arrays do
        not show (see model.describe).
      table: entries for the names of all versions of the layout.
      num_classes: the number of classes if the layout is native; otherwise the head shows it.
      classes: see Weights.
      preprocess: see Weights.
      loss: see Weights.
      assumed: names in `fields` whose values are defaults of the layout's program, because the
        source does not state them.
      doubt: a warning about the form of GELU, or ''. It continues a sentence that begins with the
        source.
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
      mark: a regular expression. A file has this layout if the name of one of its arrays matches.
      suffixes: endings of the files that the layout can be written to; '' stands for a directory
        with JSON files.
      read: contents -> the model; raises UserError if vit_jax does not support the model.
      native: whether arrays have our names and shapes, with stacked layers, and so need no table.
      table: fields of a model -> an entry for each array that is written.
      allowed_values: fields of a model, path -> the values that each field may have.
      refusals: weights with allowed values, path -> reasons why they cannot be written.
      finish: arrays by their names in the layout, weights -> the arrays to write.
      usual_preprocess: weights that do not state how images are prepared -> (a reason, the usual
        fields of `preprocess`); None if the program has no usual values.
      sidecars: weights -> JSON objects of a directory, by file name.
      metadata: weights -> metadata of a .safetensors file. The key 'format' tells transformers to
        read the arrays as PyTorch arrays.
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
