"""Limits on the arrays that a file of weights declares, checked before memory is allocated."""

import math
import os
from collections.abc import Iterable

from vit_jax.errors import UserError

HEADER = 4 << 20  # bytes of the list of arrays in a .safetensors file, enough for 40,000 arrays
PICKLE = 1 << 20  # bytes of the list of tensors in a .pth file, enough for 5,000 tensors
GROWTH = 20  # largest size of all arrays in memory, as a multiple of the size of the file ...
GROWTH_FREE = 256 << 20  # ... or this many bytes, whatever the size of the file
AXES = 32  # largest number of axes of an array, which every version of NumPy allows
LAYERS = 1000  # largest number of layers of a model, or of a stage of a ResNet
PATCHES = 1 << 16  # largest number of patches of an image
STAGES = 16  # largest number of stages of a ResNet; each halves the image


def check_header(name: str, size: int, most: int = HEADER) -> None:
    """Raises UserError if the list of arrays in a file is larger than any model needs."""
    if size > most:
        raise UserError(
            f'its {name} has {size:,} bytes: expected at most {most:,}, which are enough for '
            'the names and shapes of any model',
            kind='content',
        )


def check_arrays(path: str, arrays: Iterable[tuple[str, tuple[int, ...], int]]) -> None:
    """Raises UserError if the arrays of a small file would take much memory.

    Args:
      path: the file.
      arrays: names, shapes and bytes per number. An axis of length 0 counts as length 1, so that it
        cannot hide the lengths of other axes.
    """
    total = 0
    largest = (0, '')
    for name, shape, itemsize in arrays:
        if len(shape) > AXES:
            raise UserError(
                f'{name} has {len(shape)} axes: expected at most {AXES}', kind='content'
            )
        size = itemsize * math.prod(n or 1 for n in shape)
        total += size
        largest = max(largest, (size, f'{name} {shape}'))
    file_size = os.path.getsize(path)
    if total > max(GROWTH_FREE, GROWTH * file_size):
        raise UserError(
            f'its {file_size:,} bytes become {total:,} in memory, most of them in '
            f'{largest[1]}: expected at most {GROWTH} times the size of the file. If the arrays '
            'are right, save them without compression and without expanded arrays',
            kind='content',
        )


def check_count(noun: str, count: int, most: int = LAYERS) -> None:
    """Raises UserError for more layers, stages or patches than any model has."""
    if count > most:
        raise UserError(
            f'the weights have {count:,} {noun}: expected at most {most:,}.',
            kind='content',
            value=count,
        )
