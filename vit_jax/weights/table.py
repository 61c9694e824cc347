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


def _same(x):
    return x


def _transposed(x):
    return x.T


def _conv_to_ours(x):
    """[outputs, inputs, height, width] to [height, width, inputs, outputs]."""
    return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x


def _dense_as_conv_to_ours(x):
    """[outputs, inputs, 1, 1] to [inputs, outputs]."""
    return x[..., 0, 0].T if x.shape[2:] == (1, 1) else x


def _dense_as_google_conv_to_ours(x):
    """[1, 1, inputs, outputs] to [inputs, outputs]."""
    return x[0, 0] if x.shape[:2] == (1, 1) else x


# How ours becomes theirs, and theirs ours except for the axes of heads, which `fit` splits. What
# has another shape than theirs should have stays as it is, for `fit` to complain of it.
KINDS = {
    'same': (_same, _same),
    'flat': (lambda x: x.reshape(-1), _same),
    'dense': (_transposed, _transposed),
    'to_heads': (lambda x: x.reshape(len(x), -1).T, _transposed),
    'from_heads': (lambda x: x.reshape(-1, x.shape[-1]).T, _transposed),
    'conv': (lambda x: x.transpose(3, 2, 0, 1), _conv_to_ours),
    'dense_as_conv': (lambda x: x.T[..., None, None], _dense_as_conv_to_ours),
    'dense_as_google_conv': (lambda x: x[None, None], _dense_as_google_conv_to_ours),
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
        is_norm = 'norm' in ours.rpartition('/')[2]
        kind = norm_kind if is_norm else 'same'
        for leaf in ('scale' if is_norm else 'kernel', 'bias'):
            entries.append(Entry((f'{ours}/{leaf}',), f'{theirs}/{leaf}', kind))
    return entries


# The kind of a module of PyTorch, by what the last part of our name contains.
_TORCH_KINDS = {
    'norm': 'same',
    'conv|embedding': 'conv',
    'query|key|value': 'to_heads',
    'out': 'from_heads',
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
        weight_kind = kind or _torch_kind(last)
        bias_kind = 'flat' if weight_kind == 'to_heads' else 'same'
        leaf = 'scale' if weight_kind == 'same' else 'kernel'
        prefix = theirs if theirs.endswith('_') else f'{theirs}.'
        weights = tuple(f'{name}/{leaf}' for name in names)
        biases = tuple(f'{name}/bias' for name in names)
        entries.append(Entry(weights, f'{prefix}weight', weight_kind))
        entries.append(Entry(biases, f'{prefix}bias', bias_kind))
    return entries


def _torch_kind(name):
    for part, kind in _TORCH_KINDS.items():
        if re.search(part, name):
            return kind
    return 'dense'


Found = list[tuple[Entry, np.ndarray]]  # arrays, each with its entry, placeholders filled in


def translate(arrays: Mapping[str, np.ndarray], table: Iterable[Entry]) -> tuple[Found, list[str]]:
    """The arrays that the table has, and the names of those that it does not have."""
    known = []
    unknown = []
    for name, array in arrays.items():
        entry = _find(name, table, lambda entry: [entry.theirs])
        if entry:
            known.append((entry, array))
        else:
            unknown.append(name)
    return known, unknown


def parameters(found: Found) -> dict[str, np.ndarray]:
    """Our parameters by flat name; heads may still share an axis with their features."""
    flat: dict[str, np.ndarray] = {}
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
    lines = [f'no place for {name:.100}' for name in unknown]
    names: dict[tuple[str, ...], str] = {}  # of theirs, by ours
    for entry, array in found:
        first = names.setdefault(entry.ours, entry.theirs)
        if first != entry.theirs:
            lines.append(f'{first} and {entry.theirs} are the same parameter')
        if not all(name in templates for name in entry.ours):
            lines.append(f'no place for {entry.theirs}')
            continue
        expected = _theirs(entry, templates).shape
        if array.shape != expected:
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
    unknown = sorted(name for name, entry in entries.items() if not entry)
    if unknown:
        raise UserError(f'the layout has no place for {", ".join(unknown[:5])}.')
    return {entry.theirs: _theirs(entry, flat) for entry in dict.fromkeys(entries.values())}


def unstack(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of single layers by flat name, from those of the model, which stacks layers."""
    single = {}
    for name, x in flat.items():
        block = re.fullmatch(r'blocks/(.+)', name)
        stage = re.fullmatch(r'resnet/stage(\d+)/(first|rest)/(.+)', name)
        if block:
            for i, layer in enumerate(x):
                single[f'blocks/{i}/{block[1]}'] = layer
        elif stage:
            number = int(stage[1]) - 1
            units = {0: x} if stage[2] == 'first' else dict(enumerate(x, start=1))
            for j, unit in units.items():
                single[f'resnet/{number}/{j}/{stage[3]}'] = unit
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
            match = _regex(pattern).fullmatch(name)
            if not match:
                continue
            numbers = _numbers(match)
            if pattern.format(**numbers) != name:
                continue  # block 01 is not block 1: both may be there
            return Entry(
                tuple(ours.format(**numbers) for ours in entry.ours),
                entry.theirs.format(**numbers),
                entry.kind,
            )
    return None


def _numbers(match):
    """What a name has for {i}, {s} and {j}, and for {i1}, {s1} and {j1}, which are one more."""
    numbers = {}
    for key, text in match.groupdict().items():
        counts_from_one = len(key) > 1
        numbers[key[0]] = int(text) - counts_from_one
    return numbers | {f'{key}1': number + 1 for key, number in numbers.items()}


@functools.cache
def _regex(pattern):
    return re.compile(re.sub(r'\\\{(\w+)(:02)?\\\}', r'(?P<\1>[0-9]{1,9})', re.escape(pattern)))
