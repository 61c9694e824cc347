"""The splits of a sweep: for training and comparing the members, and for the winner's final runs.

No image that trains or ranks the runs may also score the winner.
"""

import functools
import logging
import os

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import UserError

log = logging.getLogger(__name__)


def complete(config: ConfigDict, num_folds: int = 0) -> ConfigDict:
    """Fills in the splits that the config leaves open, and checks all of them.

    Args:
      config: a config with `dataset`.
      num_folds: if not 0, the sweep is cross-validated on folds of dataset.final_split, and
        dataset.train_split and dataset.eval_split are not used.

    Raises:
      UserError: if a split cannot be used. The check comes before hours of training.
    """
    from vit_jax.data.folders import choose_splits  # imports TensorFlow
    from vit_jax.data.sources import split_name

    config = _cut_open_splits(config, num_folds)
    dataset = config.dataset
    train = dataset.train_split
    scoring = ''
    if not num_folds:
        train, scoring = choose_splits(dataset.name, train, dataset.eval_split)
    if '+' in train and not dataset.final_split:
        raise UserError(
            f'dataset.train_split is the sum {train}: state the training split of the winner '
            'with --config.dataset.final_split=SPLIT.',
            kind='missing',
            field='dataset.final_split',
        )
    config = config_lib.changed(
        config,
        {
            'dataset.train_split': train,
            'dataset.eval_split': scoring,
            'dataset.final_split': dataset.final_split or split_name(train),
        },
    )
    _check_splits(config.dataset, num_folds)
    return config


def fold(config: ConfigDict, number: int, num_folds: int) -> ConfigDict:
    """Returns the config that trains without one fold of dataset.final_split and is scored on it.

    Args:
      config: a config that `complete` returned.
      number: of the fold, from 1 to num_folds.
      num_folds: number of folds.
    """
    from vit_jax.data import folds

    split = config.dataset.final_split
    return config_lib.changed(
        config,
        {
            'dataset.train_split': folds.rest(split, number, num_folds),
            'dataset.eval_split': folds.held_out(split, number, num_folds),
            'dataset.num_examples': 0,  # the config may state the number of another split
        },
    )


def _cut_open_splits(config, num_folds):
    """Cuts the training split into parts if a directory has no other split.

    It applies only if the config leaves all other splits open; recipes name the test split 'test'.
    """
    from vit_jax.data import folders

    dataset = config.dataset
    train = dataset.train_split
    is_open = not dataset.final_split and dataset.test_split in ('', 'test')
    if dataset.eval_split and not num_folds:
        is_open = False
    if not is_open or '[' in train or '+' in train or folders.held_out_splits(dataset.name) != []:
        return config
    folders.split_folder(os.path.expanduser(dataset.name), train)  # raises if it does not exist
    parts = {
        f'dataset.{field}_split': f'{train}{part}' for field, part in _parts(in_three=True).items()
    }
    if num_folds:
        log.info(
            "'%s' has no split except %s, so the sweep cuts it into two parts: members are "
            'cross-validated on %s, on which the winner trains, and the winner is scored on %s. '
            'To choose other parts, set dataset.final_split and dataset.test_split.',
            dataset.name,
            train,
            parts['dataset.final_split'],
            parts['dataset.test_split'],
        )
        return config_lib.changed(config, parts)
    log.info(
        "'%s' has no split except %s, so the sweep cuts it into three parts: members train on %s "
        'and are compared on %s; the winner trains on %s and is scored on %s. To choose other '
        'parts, set %s.',
        dataset.name,
        train,
        *(parts[f'dataset.{field}_split'] for field in ('train', 'eval', 'final', 'test')),
        ', '.join(parts),
    )
    return config_lib.changed(config, parts)


def _parts(in_three):
    """Returns the slices that replace the training split, by kind of split."""
    if in_three:
        return dict(train='[:80%]', eval='[80%:90%]', final='[:90%]', test='[90%:]')
    return dict(train='[:90%]', eval='[90%:]', final='')


def _options(parts, split):
    """Returns the command-line options that select slices of a split."""
    return ' '.join(f'--config.dataset.{kind}_split={split}{part}' for kind, part in parts.items())


def _test_split_advice(dataset, train):
    """Returns options that select a test split for a sweep; `train` is the training split."""
    from vit_jax.data import folders
    from vit_jax.data.sources import split_name

    held_out = folders.held_out_splits(dataset.name)  # None unless it is a directory
    if held_out is None:
        return '--config.dataset.test_split=test'
    others = [name for name in held_out if name != split_name(dataset.eval_split)]
    tests = [name for name in others if name not in folders.VALIDATION]
    if others:
        return f'--config.dataset.test_split={(tests or others)[0]}'
    if held_out:  # the only held-out split compares the members
        return _options(dict(train='[:90%]', final='[:90%]', test='[90%:]'), train)
    return _options(_parts(in_three=True), train)


def _check_splits(dataset, num_folds):
    """Raises UserError if a split does not exist, or if two splits share images but must not."""
    from vit_jax.data import folders
    from vit_jax.data.sources import open_split, shared_split, split_name

    train = split_name(dataset.train_split.partition('+')[0])
    if not dataset.test_split:
        raise UserError(
            'dataset.test_split is empty: name the split that scores the winner, as in '
            f'{_test_split_advice(dataset, train)}',
            kind='missing',
            field='dataset.test_split',
        )
    classes = open_split(dataset, train).class_names
    opened = functools.cache(functools.partial(open_split, dataset, class_names=classes))
    for field in ('test_split', 'final_split'):
        try:
            opened(dataset[field])
        except UserError as error:
            advice = ''
            if folders.held_out_splits(dataset.name) is not None:
                advice = f'. For a sweep: {_test_split_advice(dataset, train)}'
            problem = str(error).rstrip('.')
            raise UserError(
                f'dataset.{field} is {dataset[field]!r}: {problem}{advice}',
                kind='value',
                field=f'dataset.{field}',
                value=dataset[field],
            ) from error

    uses = [('test_split', 'final_split', 'trains the winner')]
    if not num_folds:
        uses = [
            ('test_split', 'eval_split', 'chooses the winner'),
            *uses,
            ('test_split', 'train_split', 'trains all members'),
            ('eval_split', 'train_split', 'trains all members'),
        ]
    for scoring, used, purpose in uses:
        if shared_split(dataset[used], dataset[scoring], opened):
            is_tested = train in map(split_name, dataset.test_split.split('+'))
            raise UserError(
                f'dataset.{scoring} {dataset[scoring]!r} shares images with dataset.{used} '
                f'{dataset[used]!r}, which {purpose}: hold out a part, as in '
                f'{_options(_parts(in_three=is_tested), train)}',
                kind='value',
                field=f'dataset.{scoring}',
                value=dataset[scoring],
            )
