"""A layout as a table: which of its arrays holds which of our parameters, its axes in what order.

Between the layouts parameters have flat names, one per layer: 'blocks/{i}/norm1/scale', or
'resnet/{s}/{j}/conv1/kernel' for unit j of stage s of a ResNet.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError, some

# How ours becomes theirs, and theirs ours except for the axes of heads, which `fit` splits.
KINDS = {
    'same': (lambda x: x, lambda x: x),
    'flat': (lambda x: x.reshape(-1), lambda x: x),
    'dense': (lambda x: x.T, lambda x: x.T),
    'to_heads': (lambda x: x.reshape(len(x), -1).T, lambda x: x.T),
    'from_heads': (lambda x: x.reshape(-1, x.shape[-1]).T, lambda x: x.T),
    'conv': (
        lambda x: x.transpose(3, 2, 0, 1),
        lambda x: x.transpose(2, 3, 1, 0) if x.ndim == 4 else x,
    ),
    'dense_as_conv': (
        lambda x: x.T[..., None, None],
        lambda x: x[..., 0, 0].T if x.shape[2:] == (1, 1) else x,
    ),
    'dense_as_google_conv': (
        lambda x: x[None, None],
        lambda x: x[0, 0] if x.shape[:2] == (1, 1) else x,
    ),
    'four_axes': (lambda x: x.reshape(1, 1, 1, -1), lambda x: x.reshape(-1)),
}


class Entry(NamedTuple):
    """Names of ours and theirs, and a key of KINDS; several of ours are concatenated on axis 0.

    Placeholders are {i}, {s} and {j}, counted from 0; {s1} and {j1} count from 1, and so does
    {j1:02} with two digits.
    """

    ours: tuple[str, ...]
    theirs: str
    kind: str = 'same'


def flax_modules(modules: Mapping[str, str], norm_kind: str = 'same') -> list[Entry]:
    """Entries of Flax modules {ours: theirs}, some without a bias; their arrays have our names."""
    entries = []
    for ours, theirs in modules.items():
        norm = 'norm' in ours.rpartition('/')[2]
        entries += [
            Entry((f'{ours}/{leaf}',), f'{theirs}/{leaf}', norm_kind if norm else 'same')
            for leaf in ('scale' if norm else 'kernel', 'bias')
        ]
    return entries


# The kind of a module of PyTorch, by what the last part of our name contains.
_TORCH_KINDS = {
    'norm': 'same',
    'conv|embedding': 'conv',
    'query|key|value': 'to_heads',
    'out': 'from_heads',
    '': 'dense',
}


def torch_modules(modules: Mapping[str, str], kind: str | None = None) -> list[Entry]:
    """Entries of PyTorch modules {ours: theirs}, some without a bias.

    'attention/query key value' are three of ours in one Linear; `kind` is that of the weights if
    our name does not tell it.
    """
    entries = []
    for ours, theirs in modules.items():
        parent, slash, last = ours.rpartition('/')
        names = [f'{parent}{slash}{name}' for name in last.split()]
        this = kind or next(k for part, k in _TORCH_KINDS.items() if re.search(part, last))
        weight = 'scale' if this == 'same' else 'kernel'
        prefix = theirs if theirs.endswith('_') else f'{theirs}.'
        entries += [
            Entry(tuple(f'{name}/{weight}' for name in names), f'{prefix}weight', this),
            Entry(
                tuple(f'{name}/bias' for name in names),
                f'{prefix}bias',
                'flat' if this == 'to_heads' else 'same',
            ),
        ]
    return entries


Found = list[tuple[Entry, np.ndarray]]  # arrays, each with its entry, placeholders filled in


def translate(arrays: Mapping[str, np.ndarray], table: Iterable[Entry]) -> tuple[Found, list[str]]:
    """The arrays that the table has, and the names of those that it does not have."""
    entries = {name: _find(name, table, lambda entry: [entry.theirs]) for name in arrays}
    found = [(entry, arrays[name]) for name, entry in entries.items() if entry]
    return found, [name for name, entry in entries.items() if not entry]


def parameters(found: Found) -> dict[str, np.ndarray]:
    """Our parameters by flat name; heads may still share an axis with their features."""
    flat = {}
    for entry, array in found:
        count = len(entry.ours)
        pieces = np.array_split(array, count) if array.ndim else [array] * count
        flat |= dict(zip(entry.ours, map(KINDS[entry.kind][1], pieces), strict=True))
    return flat


def fit(
    found: Found, unknown: list[str], templates: Mapping[str, np.ndarray], table: Iterable[Entry]
) -> dict[str, np.ndarray]:
    """Our parameters by flat name, each with the shape of its template.

    Raises UserError if arrays are missing (by their names in `table`), have no place in the model,
    have another shape or are there twice, under two names.
    """
    lines, source = [f'no place for {name:.100}' for name in unknown], {}
    for entry, array in found:
        if (first := source.setdefault(entry.ours, entry.theirs)) != entry.theirs:
            lines.append(f'{first} and {entry.theirs} are the same parameter')
        if not all(name in templates for name in entry.ours):
            lines.append(f'no place for {entry.theirs}')
        elif array.shape != (expected := _theirs(entry, templates).shape):
            lines.append(f'{entry.theirs} has shape {array.shape}, expected {expected}')
    flat = parameters(found)
    missing = [
        _find(name, table) or Entry((name,), name)
        for name in sorted(templates.keys() - flat.keys())
    ]
    lines += dict.fromkeys(f'no {entry.theirs}' for entry in missing)
    if lines:
        raise UserError(
            'the arrays do not fit the model that their sizes and config.json '
            'describe:\n  ' + some(lines, 10, '\n  ')
        )
    return {name: x.reshape(templates[name].shape) for name, x in flat.items()}


def to_theirs(flat: Mapping[str, np.ndarray], table: Iterable[Entry]) -> dict[str, np.ndarray]:
    """Their arrays from ours by flat name; UserError if the layout has no place for one."""
    entries = {name: _find(name, table) for name in flat}
    if unknown := sorted(name for name, entry in entries.items() if not entry):
        raise UserError(f'the layout has no place for {", ".join(unknown[:5])}.')
    return {entry.theirs: _theirs(entry, flat) for entry in dict.fromkeys(entries.values())}


def unstack(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of single layers by flat name, from those of the model, which stacks layers."""
    single = {}
    for name, x in flat.items():
        if match := re.fullmatch(r'blocks/(.+)', name):
            single |= {f'blocks/{i}/{match[1]}': x[i] for i in range(len(x))}
        elif match := re.fullmatch(r'resnet/stage(\d+)/(first|rest)/(.+)', name):
            units = {0: x} if match[2] == 'first' else dict(enumerate(x, start=1))
            single |= {f'resnet/{int(match[1]) - 1}/{j}/{match[3]}': y for j, y in units.items()}
        else:
            single[name] = x
    return single


def stack(
    single: Mapping[str, np.ndarray], templates: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The inverse of `unstack`: parameters with the names and shapes of their templates."""
    return {
        name: np.stack([single[part] for part in unstack({name: x})]).reshape(x.shape)
        for name, x in templates.items()
    }


def _theirs(entry, flat):
    pieces = [KINDS[entry.kind][0](flat[name]) for name in entry.ours]
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _find(name, table, patterns=lambda entry: entry.ours):
    """The entry with a name among its patterns, placeholders filled in; None if there is none."""
    for entry in table:
        for pattern in patterns(entry):
            if match := _regex(pattern).fullmatch(name):
                numbers = {key[0]: int(n) - (len(key) > 1) for key, n in match.groupdict().items()}
                numbers |= {f'{key}1': n + 1 for key, n in numbers.items()}
                if pattern.format(**numbers) != name:
                    continue  # block 01 is not block 1: both may be there
                return Entry(
                    tuple(ours.format(**numbers) for ours in entry.ours),
                    entry.theirs.format(**numbers),
                    entry.kind,
                )
    return None


@functools.cache
def _regex(pattern):
    return re.compile(re.sub(r'\\\{(\w+)(:02)?\\\}', r'(?P<\1>[0-9]{1,9})', re.escape(pattern)))
