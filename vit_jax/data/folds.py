"""Folds of a split, for cross-validation.

`SPLIT@fold=2/5` is the second of five folds of a split, and `SPLIT@fold!=2/5` is the rest of the
split. SPLIT may be a slice, such as train[:90%]. Every example is in exactly one fold. The folds
depend on the examples only, never on a seed of a run, so that all runs have the same folds.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64

from vit_jax.data import grouped_split
from vit_jax.errors import UserError

_MARK = '@fold'
_FOLD = re.compile(rf'(.+){_MARK}(!?=)(\d+)/(\d+)')


class Fold(NamedTuple):
    """Which examples of a split to use.

    Attributes:
      number: of the fold, from 1.
      num_folds: number of folds of the split.
      is_rest: whether to use all other folds instead of this one.
    """

    number: int
    num_folds: int
    is_rest: bool

    def numbers(self) -> set[int]:
        """The numbers of the folds that are used, from 1."""
        if self.is_rest:
            return set(range(1, self.num_folds + 1)) - {self.number}
        return {self.number}


def held_out(split: str, number: int, count: int) -> str:
    """The name of a fold of a split; `number` is from 1 to `count`."""
    return f'{split}{_MARK}={number}/{count}'


def rest(split: str, number: int, count: int) -> str:
    """The name of a split without one of its folds; `number` is from 1 to `count`."""
    return f'{split}{_MARK}!={number}/{count}'


def parse(split: str) -> tuple[str, Fold | None]:
    """The split without its fold, and the fold; None if it has none.

    Raises:
      UserError: if the fold cannot be read.
    """
    if _MARK not in split:
        return split, None
    match = _FOLD.fullmatch(split)
    if match is not None:
        base, sign, number, count = match.groups()
        fold = Fold(int(number), int(count), sign == '!=')
        if 1 <= fold.number <= fold.num_folds and fold.num_folds >= 2:
            return base, fold
    raise UserError(
        f"the fold of the split '{split}' cannot be read: expected a form such as "
        f"'{held_out('train', 2, 5)}', the second of five folds of train, or "
        f"'{rest('train', 2, 5)}', the other four.",
        kind='value',
        value=split,
    )


def are_disjoint(fold: Fold | None, other: Fold | None) -> bool:
    """Whether two folds of one split are known to share no example."""
    if fold is None or other is None or fold.num_folds != other.num_folds:
        return False
    return not fold.numbers() & other.numbers()


def by_class(labels: Int[np.ndarray, ' examples'], count: int) -> Int64[np.ndarray, ' examples']:
    """The number of the fold of each example, from 1.

    The sizes of two folds differ by one at most, and so do the numbers of examples of a class.
    """
    folds = np.empty(len(labels), np.int64)
    folds[np.argsort(labels, kind='stable')] = 1 + np.arange(len(labels)) % count
    return folds


def by_group(
    targets: Bool[np.ndarray, 'examples classes'], groups: Sequence[str], count: int
) -> Int64[np.ndarray, ' examples']:
    """The number of the fold of each example, from 1. Each class is about in proportion.

    Args:
      targets: whether an example has a class.
      groups: examples with the same text stay in one fold; '' is no group.
      count: number of folds.
    """
    return 1 + grouped_split.cut(targets, _group_numbers(groups), [1 / count] * count)


def _group_numbers(groups):
    """A number for each example, equal within groups only."""
    names = np.asarray(groups, str)
    _, numbers = np.unique(names, return_inverse=True)
    is_alone = names == ''
    numbers[is_alone] = len(names) + np.arange(is_alone.sum())
    return numbers


def positions(
    fold: Fold, fold_of_example: Int64[np.ndarray, ' examples'], split: str
) -> Int64[np.ndarray, ' k']:
    """The positions in a split of the examples that a fold uses, in the order of the split.

    Raises:
      UserError: if one of the folds has no example. `split` is the name in the message.
    """
    require_full(fold, len(np.unique(fold_of_example)), split)
    return np.flatnonzero(np.isin(fold_of_example, list(fold.numbers())))


def require_full(fold: Fold, most: int, split: str) -> None:
    """Raises UserError if a split has more folds than the `most` that it has examples for."""
    if fold.num_folds > most:
        raise UserError(
            f"the split '{split}' has {fold.num_folds} folds, and its images and groups are enough "
            f'for {most}. Use fewer folds or a larger split.',
            kind='value',
            value=split,
        )
