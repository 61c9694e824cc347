"""A layout as a table: which of its arrays holds which of our parameters, its axes in what order.

Between the layouts parameters have flat names, one per layer: 'blocks/{i}/norm1/scale', or
'resnet/{s}/{j}/conv1/kernel' for unit j of stage s of a ResNet.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError

# How ours becomes theirs, and theirs ours except for the axes of heads, which `fit` splits.
KINDS = {
    'same': (lambda x: x, lambda x: x),
    'flat': (lambda x: x.reshape(-1), lambda x: x),
    'dense': (lambda x: x.T, lambda x: x.T),
    'to_heads': (lambda x: x.reshape(len(x), -1).T, lambda x: x.T),
    'from_heads': (lambda x: x.reshape(-1, x.shape[-1]).T, lambda x: x.T),
    'conv': (lambda x: x.transpose(3, 2, 0, 1),
             lambda x: x.transpose(2, 3, 1, 0) if x.ndim == 4 else x),
    'dense_as_conv': (lambda x: x.T[..., None, None],
                      lambda x: x[..., 0, 0].T if x.shape[2:] == (1, 1) else x),
    'dense_as_google_conv': (lambda x: x[None, None],
                             lambda x: x[0, 0] if x.shape[:2] == (1, 1) else x),
    'four_axes': (lambda x: x.reshape(1, 1, 1, -1), lambda x: x.reshape(-1)),
}


class Entry(NamedTuple):
    """Ours, theirs, and a key of KINDS; more than one of ours stand behind each other on axis 0.

    Placeholders are {i}, {s} and {j}, counted from 0; {s1} and {j1} count from 1, {j01} likewise
    in two digits.
    """

    ours: tuple[str, ...]
    theirs: str
    kind: str = 'same'


def same(ours: str, theirs: str, leaves: str = 'kernel bias', kind: str = 'same') -> list[Entry]:
    """Entries of a module whose arrays have our names."""
    return [Entry((f'{ours}/{leaf}',), f'{theirs}/{leaf}', kind) for leaf in leaves.split()]


def torch_norm(ours: str, theirs: str) -> list[Entry]:
    """Entries of a PyTorch LayerNorm or GroupNorm."""
    return [Entry((f'{ours}/scale',), f'{theirs}.weight'),
            Entry((f'{ours}/bias',), f'{theirs}.bias')]


def torch_dense(ours: str, theirs: str, kind: str = 'dense') -> list[Entry]:
    """Entries of a PyTorch Linear, or of a Conv2d that is one (`kind`)."""
    return [Entry((f'{ours}/kernel',), f'{theirs}.weight', kind),
            Entry((f'{ours}/bias',), f'{theirs}.bias')]


def torch_conv(ours: str, theirs: str) -> list[Entry]:
    """Entries of a PyTorch Conv2d; its bias is found only where there is one."""
    return torch_dense(ours, theirs, 'conv')


def torch_heads(attention: str, theirs: str, names: str) -> list[Entry]:
    """Entries of a PyTorch Linear for one or more of query, key, value.

    theirs: ends with what stands before 'weight' and 'bias'.
    """
    ours = [f'{attention}/{name}' for name in names.split()]
    return [Entry(tuple(f'{o}/kernel' for o in ours), f'{theirs}weight', 'to_heads'),
            Entry(tuple(f'{o}/bias' for o in ours), f'{theirs}bias', 'flat')]


class Found(NamedTuple):
    """Where parameters were found: names of ours, in order; the array's name, its kind, itself."""

    ours: tuple[str, ...]
    theirs: str
    kind: str
    array: np.ndarray


def translate(arrays: Mapping[str, np.ndarray], table: Iterable[Entry]
              ) -> tuple[list[Found], list[str]]:
    """The arrays that the table knows, and the names of those that it does not."""
    found, unknown = [], []
    for name, array in arrays.items():
        for entry in table:
            match = _regex(entry.theirs).fullmatch(name)
            if match:
                ours = tuple(_render(o, _indices(match)) for o in entry.ours)
                found.append(Found(ours, name, entry.kind, array))
                break
        else:
            unknown.append(name)
    return found, unknown


def parts(found: Iterable[Found]) -> dict[str, np.ndarray]:
    """Our parameters by flat name; the axes of heads may still be one."""
    flat = {}
    for ours, _, kind, array in found:
        pieces = np.array_split(array, len(ours)) if array.ndim else [array] * len(ours)
        flat |= dict(zip(ours, map(KINDS[kind][1], pieces), strict=True))
    return flat


def fit(found: list[Found], unknown: list[str], shapes: Mapping[str, tuple[int, ...]],
        table: Iterable[Entry]) -> dict[str, np.ndarray]:
    """Our parameters by flat name, each with its shape in the model.

    Args:
      found, unknown: what `translate` gave.
      shapes: of every parameter of the model.
      table: that of `translate`, for the names of what is missing.

    Raises:
      UserError: an array is missing, has no place in the model or another shape.
    """
    lines = [f'no place for {name}' for name in unknown]
    for ours, theirs, kind, array in found:
        if not all(name in shapes for name in ours):
            lines.append(f'no place for {theirs}')
        elif array.shape != (expected := _their_shape([shapes[n] for n in ours], kind)):
            lines.append(f'{theirs} has shape {array.shape}, expected {expected}')
    flat = parts(found)
    missing = sorted(shapes.keys() - flat.keys())
    lines += [f'no {name}' for name in dict.fromkeys(their_name(n, table) or n for n in missing)]
    if lines:
        more = f'\n  and {len(lines) - 10} more' if len(lines) > 10 else ''
        raise UserError('the arrays do not fit the model that their sizes and config.json '
                        'describe:\n  ' + '\n  '.join(lines[:10]) + more)
    return {name: x.reshape(shapes[name]) for name, x in flat.items()}


def to_theirs(flat: Mapping[str, np.ndarray], table: Iterable[Entry]) -> dict[str, np.ndarray]:
    """Their arrays from ours by flat name.

    Raises UserError for parameters that the layout has no place for.
    """
    left, arrays = dict(flat), {}
    for name in flat:
        entry, indices = _find(name, table)
        if entry is None or name not in left:
            continue
        names = [_render(o, indices) for o in entry.ours]
        pieces = [KINDS[entry.kind][0](left.pop(n)) for n in names]
        arrays[_render(entry.theirs, indices)] = pieces[0] if len(pieces) == 1 else (
            np.concatenate(pieces))
    if left:
        raise UserError(f'the layout has no place for {", ".join(sorted(left)[:5])}.')
    return arrays


def their_name(ours: str, table: Iterable[Entry]) -> str | None:
    """The array that holds a parameter of ours."""
    entry, indices = _find(ours, table)
    return entry and _render(entry.theirs, indices)


def unstack(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Flat names of single layers, from those of the model, whose repeated layers are stacked."""
    single = {}
    for name, x in flat.items():
        if match := re.fullmatch(r'blocks/(.+)', name):
            single |= {f'blocks/{i}/{match[1]}': x[i] for i in range(len(x))}
        elif match := re.fullmatch(r'resnet/stage(\d+)/(first|rest)/(.+)', name):
            stage, units = int(match[1]) - 1, (x[None] if match[2] == 'first' else x)
            start = int(match[2] == 'rest')
            single |= {f'resnet/{stage}/{start + j}/{match[3]}': y for j, y in enumerate(units)}
        else:
            single[name] = x
    return single


def stack(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `unstack`."""
    stacked, layers = {}, {}
    for name, x in flat.items():
        if match := re.fullmatch(r'blocks/(\d+)/(.+)', name):
            layers.setdefault(f'blocks/{match[2]}', {})[int(match[1])] = x
        elif match := re.fullmatch(r'resnet/(\d+)/(\d+)/(.+)', name):
            stage, unit = f'resnet/stage{int(match[1]) + 1}', int(match[2])
            if unit == 0:
                stacked[f'{stage}/first/{match[3]}'] = x
            else:
                layers.setdefault(f'{stage}/rest/{match[3]}', {})[unit] = x
        else:
            stacked[name] = x
    return stacked | {name: np.stack([x[i] for i in sorted(x)]) for name, x in layers.items()}


def _their_shape(shapes, kind):
    """Reshaping and transposing empty memory costs nothing."""
    pieces = [KINDS[kind][0](np.empty(shape, np.int8)).shape for shape in shapes]
    return (sum(p[0] for p in pieces), *pieces[0][1:])


def _find(ours, table):
    for entry in table:
        for pattern in entry.ours:
            if match := _regex(pattern).fullmatch(ours):
                return entry, _indices(match)
    return None, None


@functools.cache
def _regex(pattern):
    return re.compile(re.sub(r'\\\{(\w+)\\\}', r'(?P<\1>\\d+)', re.escape(pattern)))


def _indices(match):
    return {name[0]: int(value) - (len(name) > 1) for name, value in match.groupdict().items()}


def _render(pattern, indices):
    others = {f'{k}1': v + 1 for k, v in indices.items()}
    return pattern.format(**indices, **others, **{f'{k}01': f'{v + 1:02}'
                                                  for k, v in indices.items()})
