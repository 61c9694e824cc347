"""A layout as a table: the array that stores each of our parameters, and its axes.

Tables use flat names of our parameters, one per layer: 'blocks/{i}/norm1/scale' for block i, or
'resnet/{s}/{j}/conv1/kernel' for unit j of stage s of a ResNet.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError, some


class Axes(NamedTuple):
    """How the axes of an array change between our layout and another one.

    `to_ours` returns an array of an unexpected shape unchanged, so that `fit` can report it. `fit`
    also splits the axis of heads from the axis of their features.
    """

    to_theirs: Callable[[np.ndarray], np.ndarray]
    to_ours: Callable[[np.ndarray], np.ndarray]


def _same(x):
    return x


def _transposed(x):
    return x.T


def _flat(x):
    return x.reshape(-1)


def _to_heads(x):
    """[inputs, heads, head_dim] to [heads * head_dim, inputs]."""
    return x.reshape(len(x), -1).T


def _from_heads(x):
    """[heads, head_dim, outputs] to [outputs, heads * head_dim]."""
    return x.reshape(-1, x.shape[-1]).T


def _conv_to_theirs(x):
    """[height, width, inputs, outputs] to [outputs, inputs, height, width]."""
    return x.transpose(3, 2, 0, 1)


def _conv_to_ours(x):
    """[outputs, inputs, height, width] to [height, width, inputs, outputs]."""
    if x.ndim != 4:
        return x
    return x.transpose(2, 3, 1, 0)


def _dense_as_conv_to_theirs(x):
    """[inputs, outputs] to [outputs, inputs, 1, 1]."""
    return x.T[..., None, None]


def _dense_as_conv_to_ours(x):
    """[outputs, inputs, 1, 1] to [inputs, outputs]."""
    if x.shape[2:] != (1, 1):
        return x
    return x[..., 0, 0].T


def _dense_as_google_conv_to_theirs(x):
    """[inputs, outputs] to [1, 1, inputs, outputs]."""
    return x[None, None]


def _dense_as_google_conv_to_ours(x):
    """[1, 1, inputs, outputs] to [inputs, outputs]."""
    if x.shape[:2] != (1, 1):
        return x
    return x[0, 0]


def _four_axes(x):
    """[features] to [1, 1, 1, features]."""
    return x.reshape(1, 1, 1, -1)


KINDS: dict[str, Axes] = {
    'same': Axes(_same, _same),
    'flat': Axes(_flat, _same),
    'dense': Axes(_transposed, _transposed),
    'to_heads': Axes(_to_heads, _transposed),
    'from_heads': Axes(_from_heads, _transposed),
    'conv': Axes(_conv_to_theirs, _conv_to_ours),
    'dense_as_conv': Axes(_dense_as_conv_to_theirs, _dense_as_conv_to_ours),
    'dense_as_google_conv': Axes(_dense_as_google_conv_to_theirs, _dense_as_google_conv_to_ours),
    'four_axes': Axes(_four_axes, _flat),
}


class Entry(NamedTuple):
    """One array of a layout.

    Names may contain the placeholders {i}, {s} and {j}, which count from 0, and {s1}, {j1} and
    {j1:02} (two digits), which count from 1.

    Attributes:
      ours: names of our parameters; the array is their concatenation along axis 0.
      theirs: name of the array in the layout.
      kind: a key of KINDS.
    """

    ours: tuple[str, ...]
    theirs: str
    kind: str = 'same'


# (our prefix, their prefix) of all names in a group of a table, such as the names in a block.
Prefixes = tuple[str, str]
_TOP: Prefixes = ('', '')


def entries(
    names: Mapping[str, str], kind: str = 'same', *, within: Prefixes = _TOP
) -> list[Entry]:
    """Makes entries for arrays {our name: their name}, all of one kind."""
    our_prefix, their_prefix = within
    return [Entry((our_prefix + ours,), their_prefix + names[ours], kind) for ours in names]


def flax_modules(
    modules: Mapping[str, str], norm_kind: str = 'same', *, within: Prefixes = _TOP
) -> list[Entry]:
    """Makes entries for Flax modules {our name: their name}; the arrays in them have our names.

    Modules may have a bias. `norm_kind` is the key of KINDS for the arrays of norms.
    """
    table = []
    for ours, theirs in modules.items():
        bias = {f'{ours}/bias': f'{theirs}/bias'}
        if 'norm' in ours.rpartition('/')[2]:
            scale = {f'{ours}/scale': f'{theirs}/scale'}
            table += entries(scale | bias, norm_kind, within=within)
        else:
            kernel = {f'{ours}/kernel': f'{theirs}/kernel'}
            table += entries(kernel | bias, within=within)
    return table


# The kind of the weight of a PyTorch module, by a pattern for the last part of our name.
_TORCH_KINDS = {
    'norm': 'same',
    'conv|embedding': 'conv',
    'query|key|value': 'to_heads',
    'out': 'from_heads',
}


def torch_modules(
    modules: Mapping[str, str], kind: str | None = None, *, within: Prefixes = _TOP
) -> list[Entry]:
    """Makes entries for PyTorch modules {our name: their name}, which may have a bias.

    'attention/query key value' stands for three of our modules in one Linear. Its name may end in
    '_', as in PyTorch's in_proj_weight. `kind` is a key of KINDS for the weights; by default our
    name implies it.
    """
    our_prefix, their_prefix = within
    table = []
    for ours, theirs in modules.items():
        parent, slash, last = ours.rpartition('/')
        names = [f'{our_prefix}{parent}{slash}{name}' for name in last.split()]
        weight_kind = kind or _torch_kind(last)
        bias_kind = 'flat' if weight_kind == 'to_heads' else 'same'
        leaf = 'scale' if weight_kind == 'same' else 'kernel'
        module = their_prefix + theirs
        if not module.endswith('_'):
            module += '.'
        weights = tuple(f'{name}/{leaf}' for name in names)
        biases = tuple(f'{name}/bias' for name in names)
        table.append(Entry(weights, f'{module}weight', weight_kind))
        table.append(Entry(biases, f'{module}bias', bias_kind))
    return table


def _torch_kind(name):
    for pattern, kind in _TORCH_KINDS.items():
        if re.search(pattern, name):
            return kind
    return 'dense'


# Arrays of a layout, each with its entry, whose placeholders are filled in.
Matches = list[tuple[Entry, np.ndarray]]


def translate(
    arrays: Mapping[str, np.ndarray], table: Iterable[Entry]
) -> tuple[Matches, list[str]]:
    """Returns the arrays in the table, with their entries, and the names of all other arrays."""
    known = []
    unknown = []
    for name, array in arrays.items():
        entry = _find_by_theirs(name, table)
        if entry:
            known.append((entry, array))
        else:
            unknown.append(name)
    return known, unknown


def parameters(matches: Matches) -> dict[str, np.ndarray]:
    """Our parameters by flat name. Heads may still share an axis with their features."""
    flat: dict[str, np.ndarray] = {}
    for entry, array in matches:
        pieces = [array for _ in entry.ours]  # `fit` reports the shape of an array without axes
        if array.ndim:
            pieces = np.array_split(array, len(entry.ours))
        to_ours = KINDS[entry.kind].to_ours
        flat |= dict(zip(entry.ours, map(to_ours, pieces), strict=True))
    return flat


def fit(
    matches: Matches,
    unknown: list[str],
    templates: Mapping[str, np.ndarray],
    table: Iterable[Entry],
) -> dict[str, np.ndarray]:
    """Our parameters by flat name, each with the shape of its template.

    Args:
      matches: arrays of the layout with their entries.
      unknown: names of arrays without an entry.
      templates: arrays with the shapes of our parameters, by flat name.
      table: gives the names of missing arrays in the layout.

    Raises:
      UserError: an array is missing, has no place in the model or has another shape, or two arrays
        store the same parameter under different names.
    """
    problems = [f'no place for {name:.100}' for name in unknown]
    their_names: dict[tuple[str, ...], str] = {}  # by our names
    for entry, array in matches:
        first = their_names.setdefault(entry.ours, entry.theirs)
        if first != entry.theirs:
            problems.append(f'{first} and {entry.theirs} are the same parameter')
        if not all(name in templates for name in entry.ours):
            problems.append(f'no place for {entry.theirs}')
            continue
        expected = _theirs(entry, templates).shape
        if array.shape != expected:
            problems.append(f'{entry.theirs} has shape {array.shape}, expected {expected}')
    flat = parameters(matches)
    problems += [f'no {name}' for name in _missing(templates.keys() - flat.keys(), table)]
    if problems:
        raise UserError(
            'the arrays do not fit the model that their sizes and config.json '
            'describe:\n  ' + some(problems, 10, '\n  '),
            kind='content',
        )
    return {name: x.reshape(templates[name].shape) for name, x in flat.items()}


def _missing(names, table):
    """The layout's names for our missing parameters, each once."""
    theirs = {}
    for name in sorted(names):
        entry = _find_by_ours(name, table)
        their_name = entry.theirs if entry else name
        theirs[their_name] = None
    return list(theirs)


def to_theirs(flat: Mapping[str, np.ndarray], table: Iterable[Entry]) -> dict[str, np.ndarray]:
    """Converts our arrays by flat name to theirs; UserError if the layout has no place for one."""
    our_entries = {name: _find_by_ours(name, table) for name in flat}
    unknown = sorted(name for name, entry in our_entries.items() if not entry)
    if unknown:
        raise UserError(
            f'the layout has no place for {", ".join(unknown[:5])}.', kind='inapplicable'
        )
    return {entry.theirs: _theirs(entry, flat) for entry in dict.fromkeys(our_entries.values())}


def unstack(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters of single layers by flat name, from the model's parameters with stacked layers."""
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
    to_theirs = KINDS[entry.kind].to_theirs
    pieces = [to_theirs(flat[name]) for name in entry.ours]
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces)


def _find_by_theirs(name, table):
    """The entry for an array of the layout, with placeholders filled in; None if there is none."""
    for entry in table:
        numbers = _match(entry.theirs, name)
        if numbers is not None:
            return _filled_in(entry, numbers)
    return None


def _find_by_ours(name, table):
    """The entry that stores our parameter, with placeholders filled in; None if there is none."""
    for entry in table:
        for pattern in entry.ours:
            numbers = _match(pattern, name)
            if numbers is not None:
                return _filled_in(entry, numbers)
    return None


def _filled_in(entry, numbers):
    return Entry(
        tuple(name.format(**numbers) for name in entry.ours),
        entry.theirs.format(**numbers),
        entry.kind,
    )


def _match(pattern, name):
    """The numbers that make the pattern equal the name, by placeholder; None if none do."""
    match = _regex(pattern).fullmatch(name)
    if not match:
        return None
    numbers = {}
    for placeholder, text in match.groupdict().items():
        counts_from_one = len(placeholder) > 1
        numbers[placeholder[0]] = int(text) - counts_from_one
    numbers |= {f'{letter}1': number + 1 for letter, number in numbers.items()}
    if pattern.format(**numbers) != name:
        return None  # block 01 is not block 1: a file may have both
    return numbers


@functools.cache
def _regex(pattern):
    return re.compile(re.sub(r'\\\{(\w+)(:02)?\\\}', r'(?P<\1>[0-9]{1,9})', re.escape(pattern)))
