"""What a layout of weights is: the one type whose values the modules of layouts/ define."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.weights.files import Contents
from vit_jax.weights.model import Weights
from vit_jax.weights.table import Entry

Arrays = dict[str, np.ndarray]


def only(fields: Mapping) -> dict[str, tuple]:
    """Allowed values of fields that can have no other values than these."""
    return {name: (value,) for name, value in fields.items()}


# What all programs have; only ours has axial attention and position embeddings in other places.
PLAIN = only(dict(attention='full', position_at='stem', position='learned_1d', pool='cls',
                  layer_scale_init=0.0))


class Reading(NamedTuple):
    """What a layout makes of the contents of a file or directory."""

    arrays: Arrays  # by the names in `table`
    fields: Mapping  # of the model: those that arrays do not show (see model.describe), or all
    table: Sequence[Entry]  # with all names that the layout has had
    num_classes: int | None = None  # if native; others show it in the arrays of their head
    classes: list[str] | None = None  # this and the next as in Weights
    preprocess: dict | None = None


class Layout(NamedTuple):
    """How a program stores a model.

    Attributes:
      mark: regular expression of the names of arrays by which the layout is recognised.
      suffixes: endings of the files that are written; '' is a directory with JSON files.
      read: raises UserError for a model that cannot be expressed here.
      native: arrays have our names and shapes, repeated layers stacked: no table is needed.
      table: from a model's fields: which array is written for which parameter.
      allowed_values: from a model's fields and the path: the values that each field may have.
      refusals: from weights with allowed values and the path: why they cannot be written.
      finish: from the arrays by their names in the layout and the weights: the arrays to write.
      sidecars: the JSON objects of a directory, by file name.
      metadata: of a .safetensors file; 'format' makes transformers take it for PyTorch's.
    """

    mark: str
    suffixes: tuple[str, ...]
    read: Callable[[Contents], Reading]
    native: bool = False
    table: Callable[[Mapping], Sequence[Entry]] = lambda model: ()
    allowed_values: Callable[[Mapping, str], dict[str, tuple]] = lambda model, path: {}
    refusals: Callable[[Weights, str], list[str]] = lambda weights, path: []
    finish: Callable[[Arrays, Weights], Arrays] = lambda arrays, weights: arrays
    sidecars: Callable[[Weights], dict[str, dict]] = lambda weights: {}
    metadata: Callable[[Weights], dict[str, str]] = lambda weights: {'format': 'pt'}
