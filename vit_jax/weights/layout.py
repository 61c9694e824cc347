"""What a layout of weights is: the one type whose values the modules of layouts/ define."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.weights.array_files import Contents
from vit_jax.weights.model import Weights
from vit_jax.weights.table import Entry

Arrays = dict[str, np.ndarray]


def only(fields: Mapping) -> dict[str, tuple]:
    """Allowed values of fields that can have no other values than these."""
    return {name: (value,) for name, value in fields.items()}


# What all programs have; only ours has axial attention and position embeddings in other places.
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
    """What a layout makes of the contents of a file or directory."""

    arrays: Arrays  # by the names in `table`
    fields: Mapping  # of the model: those that arrays do not show (see model.describe), or all
    table: Sequence[Entry]  # with all names that the layout has had
    num_classes: int | None = None  # if native; others show it in the arrays of their head
    classes: list[str] | None = None  # this and the next two as in Weights
    preprocess: dict | None = None
    loss: str | None = None
    # Of `fields`, those that the source does not state: defaults of the layout's program.
    assumed: Sequence[str] = ()
    doubt: str = ''  # a warning of the function gelu, behind the name of the source


class Layout(NamedTuple):
    """How a program stores a model."""

    mark: str  # regular expression of the names of arrays by which the layout is recognised
    suffixes: tuple[str, ...]  # endings of the files that are written; '' is a directory with JSON
    read: Callable[[Contents], Reading]  # UserError for a model that cannot be expressed here
    # Whether arrays have our names and shapes, repeated layers stacked, so that no table is needed.
    native: bool = False
    # From a model's fields: which array is written for which parameter.
    table: Callable[[Mapping], Sequence[Entry]] = lambda model: ()
    # From a model's fields and the path: the values that each field may have.
    allowed_values: Callable[[Mapping, str], dict[str, tuple]] = lambda model, path: {}
    # From weights with allowed values and the path: why they cannot be written.
    refusals: Callable[[Weights, str], list[str]] = lambda weights, path: []
    # From the arrays by their names in the layout and the weights: the arrays to write.
    finish: Callable[[Arrays, Weights], Arrays] = lambda arrays, weights: arrays
    # From weights that do not say how images are prepared: how they are, and a reason to think so.
    usual_preprocess: Callable[[Weights], tuple[str, dict] | None] = lambda weights: None
    # The JSON objects of a directory, by file name.
    sidecars: Callable[[Weights], dict[str, dict]] = lambda weights: {}
    # Of a .safetensors file; 'format' makes transformers take it for PyTorch's.
    metadata: Callable[[Weights], dict[str, str]] = lambda weights: {'format': 'pt'}
