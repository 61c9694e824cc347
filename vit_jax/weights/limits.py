"""What a file of weights may ask for, checked before memory is taken for it."""

import math
import os
from collections.abc import Iterable

from vit_jax.errors import UserError

HEADER = 4 << 20  # bytes that list the arrays of a .safetensors file: 40,000 of them
PICKLE = 1 << 20  # bytes that list the tensors of a .pth file: 5,000 of them
GROWTH = 20  # times the size of the file, for all of its arrays in memory ...
GROWTH_FREE = 256 << 20  # ... or this many bytes, whatever the size of the file
AXES = 32  # of an array, which every version of NumPy allows
LAYERS = 1000  # of a model, or of a stage of a ResNet
PATCHES = 1 << 16  # of an image
STAGES = 16  # of a ResNet; each halves the image


def check_header(name: str, size: int, most: int = HEADER) -> None:
    """Raises UserError if the part that lists the arrays is larger than that of any model."""
    if size > most:
        raise UserError(
            f'its {name} takes {size:,} bytes; at most {most:,} are read, enough for '
            'the names and shapes of any model'
        )


def check_arrays(path: str, arrays: Iterable[tuple[str, tuple[int, ...], int]]) -> None:
    """Raises UserError if a small file asks for much memory.

    `arrays` are names, shapes and bytes per number. An axis of length 0 counts as one of 1: it must
    not hide the lengths of others.
    """
    total, largest = 0, (0, '')
    for name, shape, itemsize in arrays:
        if len(shape) > AXES:
            raise UserError(f'{name} has {len(shape)} axes: expected at most {AXES}')
        size = itemsize * math.prod(n or 1 for n in shape)
        total, largest = total + size, max(largest, (size, f'{name} {shape}'))
    found = os.path.getsize(path)
    if total > max(GROWTH_FREE, GROWTH * found):
        raise UserError(
            f'its {found:,} bytes become {total:,} in memory, most of them as '
            f'{largest[1]}; at most {GROWTH} times as much is read. If that is right, '
            'save it without compression and without expanded arrays'
        )


def check_count(what: str, count: int, most: int = LAYERS) -> None:
    """Raises UserError for more layers, stages or patches than any model has."""
    if count > most:
        raise UserError(f'there are said to be {count:,} {what}: expected at most {most:,}.')
