"""The splits of a sweep: members train and are compared on some, the winner on others.

No image that trains or chooses may also score the winner.
"""

import functools
import logging
import os

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import UserError

log = logging.getLogger(__name__)


def complete(config: ConfigDict) -> ConfigDict:
    """The config with the splits that it leaves open.

    Raises:
      UserError: if a split cannot be used: now, and not after hours of training.
    """
    from vit_jax.data.folders import choose_splits  # imports TensorFlow
    from vit_jax.data.sources import split_name

    config = _cut_in_three(config)
    dataset = config.dataset
    train, scoring = choose_splits(dataset.name, dataset.train_split, dataset.eval_split)
    if '+' in train and not dataset.final_split:
        raise UserError(
            f'dataset.train_split is the sum {train}: name what the best one trains '
            'on by --config.dataset.final_split=SPLIT.'
        )
    config = config_lib.changed(
        config,
        {
            'dataset.train_split': train,
            'dataset.eval_split': scoring,
            'dataset.final_split': dataset.final_split or split_name(train),
        },
    )
    _check_splits(config.dataset)
    return config


def _cut_in_three(config):
    """The config with three parts of the training split, where a directory has no other split.

    Only if the config leaves all splits but that one open; recipes name the test split 'test'.
    """
    from vit_jax.data import folders

    dataset = config.dataset
    train = dataset.train_split
    is_open = not (dataset.eval_split or dataset.final_split) and dataset.test_split in ('', 'test')
    if not is_open or '[' in train or '+' in train or folders.held_out_splits(dataset.name) != []:
        return config
    folders.split_folder(os.path.expanduser(dataset.name), train)  # or it says which one fits
    parts = {
        f'dataset.{field}_split': f'{train}{part}' for field, part in _parts(in_three=True).items()
    }
    log.info(
        "'%s' has no split but %s, which is cut into three parts: members train on %s and are "
        'compared on %s; the winner trains on %s and is scored on %s. To choose other parts, set '
        '%s.',
        dataset.name,
        train,
        *(parts[f'dataset.{field}_split'] for field in ('train', 'eval', 'final', 'test')),
        ', '.join(parts),
    )
    return config_lib.changed(config, parts)


def _parts(in_three):
    """The slices of one split that take its place, by kind of split."""
    if in_three:
        return dict(train='[:80%]', eval='[80%:90%]', final='[:90%]', test='[90%:]')
    return dict(train='[:90%]', eval='[90%:]', final='')


def _test_split_advice(dataset, trained):
    """The options that give a sweep a test split."""
    from vit_jax.data import folders
    from vit_jax.data.sources import split_name

    held_out = folders.held_out_splits(dataset.name)
    others = [name for name in held_out or [] if name != split_name(dataset.eval_split)]
    if held_out is None or others:
        tests = [name for name in others if name not in folders.VALIDATION]
        return f'--config.dataset.test_split={(tests or others or ["test"])[0]}'
    parts = _parts(in_three=True)
    if held_out:  # the held-out split scores the members
        parts = dict(train='[:90%]', final='[:90%]', test='[90%:]')
    return ' '.join(f'--config.dataset.{x}_split={trained}{part}' for x, part in parts.items())


def _check_splits(dataset):
    """Raises UserError, now and not after hours of training, when a split cannot be used.

    That is so where it does not exist, or shares images with those that trained or chose.
    """
    from vit_jax.data import folders
    from vit_jax.data.sources import open_split, shared_split, split_name

    trained = split_name(dataset.train_split.partition('+')[0])
    if not dataset.test_split:
        raise UserError(
            'dataset.test_split is empty: name the split that scores the winner, as in '
            f'{_test_split_advice(dataset, trained)}'
        )
    classes = open_split(dataset, trained).class_names
    opened = functools.cache(functools.partial(open_split, dataset, class_names=classes))
    for field in ('test_split', 'final_split'):
        try:
            opened(dataset[field])
        except UserError as error:
            advice = ''
            if folders.held_out_splits(dataset.name) is not None:
                advice = f'. For a sweep: {_test_split_advice(dataset, trained)}'
            problem = str(error).rstrip('.')
            raise UserError(f'dataset.{field} is {dataset[field]!r}: {problem}{advice}') from error

    for scoring, used, why in (
        ('test_split', 'eval_split', 'choose the winner'),
        ('test_split', 'final_split', 'the winner trains on'),
        ('test_split', 'train_split', 'all members train on'),
        ('eval_split', 'train_split', 'all members train on'),
    ):
        if shared_split(dataset[used], dataset[scoring], opened):
            parts = _parts(in_three=trained in map(split_name, dataset.test_split.split('+')))
            raise UserError(
                f'dataset.{scoring} {dataset[scoring]!r} has images of dataset.{used} '
                f'{dataset[used]!r}, which {why}: hold out a part, as in '
                + ' '.join(
                    f'--config.dataset.{x}_split={trained}{part}' for x, part in parts.items()
                )
            )
