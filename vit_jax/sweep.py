r"""Tries values of fields, chooses on held-out examples, and scores the best on the test split.

    python -m vit_jax.sweep --config=configs/finetune.py:b16,cifar10 \
        --config.pretrained=WEIGHTS --workdir=DIR
    python -m vit_jax.sweep --config=configs/finetune.py:b16,cifar10 \
        --config.pretrained=WEIGHTS --workdir=DIR --repeats=3 \
        --config.optimizer.learning_rate=0.003,0.01 --config.optimizer.weight_decay=0,0.1

Fields with values A,B,... are swept in all their combinations; without any, the grid of the config
file is (its function get_grid; that of configs/finetune.py is ViT table 4). A number, a switch or
one of several words can be swept. In fields of several values, such as image_size, and in text,
such as dataset.name, a comma belongs to the one value.

Each member trains in DIR/lr=VALUE (for other fields DIR/FIELD=VALUE) and is scored on
`dataset.eval_split`. The best one then trains on `dataset.final_split`, by default the whole
training split, in DIR/final-lr=VALUE, which is scored once, at its end, on `dataset.test_split`
(ViT section 4.1). A member with which training diverges is not chosen. The same command continues a
sweep that was stopped, and with more values trains what they add. The outcome is logged, drawn in
DIR/sweep.png and written to DIR/sweep.json; DIR/report.html shows all runs side by side.
"""

import functools
import itertools
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import cli, machine, reporting
from vit_jax import config as config_lib
from vit_jax.errors import DivergedError, UserError, check_at_least
from vit_jax.files import read_json, write_json
from vit_jax.processes import launch
from vit_jax.training import device_defaults
from vit_jax.workdir import log_file, metrics, outcome, record
from vit_jax.workdir.outcome import RATE, name_of

log = logging.getLogger('vit_jax.sweep')


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 143 or 130 after a signal, 1 after an error that the last line explains."""
    parser = cli.make_parser('sweep', __doc__)
    parser.add_argument('--workdir', required=True, help='for the workdirs of all runs')
    parser.add_argument(
        '--repeats',
        type=int,
        default=1,
        metavar='N',
        help='final runs, with '
        'seeds seed, seed + 1, ...: their mean and standard deviation are reported',
    )
    parser.add_argument(
        '--part',
        default='1/1',
        metavar='I/N',
        help='only train part I of N of '
        'the members: for processes or hosts side by side that share DIR, each '
        'with its own device. The command without it then does the rest',
    )
    cli.add_process_options(parser)
    texts, others = separate(sys.argv[1:] if argv is None else argv)
    first = [f'--config.{field}={text.partition(",")[0]}' for field, text in texts.items()]
    options, config = cli.parse_with_config(parser, others + first)
    grid = read_grid(texts or _grid_of_file(others), config)
    launch.refuse_several('vit_jax.sweep', options.num_processes)
    machine.check_backend(
        device_defaults.host_devices(
            {
                os.path.join(options.workdir, name_of(member)): config_lib.changed(config, member)
                for member in combinations(grid)
            }
        )
    )
    code = run(config, grid, options.workdir, options.repeats, options.part)
    if code:
        log.warning('the sweep stops here. To continue, run the same command again.')
    return code


def separate(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The texts 'A,B,...' of swept fields, by dotted name, and all other arguments."""
    fields, texts, others, rest = config_lib.all_fields(), {}, [], list(arguments)
    while rest:
        argument = rest.pop(0)
        name, is_given, text = argument.partition('=')
        field = re.sub(r'^--?config\.', '', name)
        separately = field != name and not is_given and rest  # --config.FIELD VALUE
        if separately:
            text = rest[0]
        if (
            field == name
            or field not in fields
            or (fields[field].values.has_commas or ',' not in text)
        ):
            others.append(argument)
            continue
        if field in texts:
            raise UserError(f'{name} is given twice: give it once, with all its values.')
        texts[field] = text
        if separately:
            del rest[0]
    for field in texts:
        if any(re.fullmatch(rf'--?config\.{re.escape(field)}(=.*)?', other) for other in others):
            raise UserError(f'--config.{field} is given twice: give it once, with all its values.')
    return texts, others


def _grid_of_file(arguments):
    """The texts of the fields that get_grid of the config file names."""
    file, others = cli.config_file(arguments)
    path, has_argument, argument = file.partition(':')
    need = (
        f'a sweep needs a field with two values or more, as in --config.{RATE}=0.003,0.01. '
        'Commas in fields of several values and in text belong to one value'
    )
    grid = cli.from_config_file(file, 'get_grid', *[argument] if has_argument else [])
    if grid is None or all(len(values) < 2 for values in grid.values()):
        raise UserError(f'{need}. {file} has no grid of its own.')
    if one := [
        field
        for field in grid
        if any(other.partition('=')[0] == f'--config.{field}' for other in others)
    ]:
        raise UserError(
            f'{need}; --config.{one[0]} has one. Without it the grid of {path} is '
            f'taken: {", ".join(map(str, grid[one[0]]))}.'
        )
    log.info('the grid is that of %s', file)
    return {field: ','.join(map(str, values)) for field, values in grid.items()}


def read_grid(texts: Mapping[str, str], config: ConfigDict) -> dict[str, list[Any]]:
    """The values of 'A,B,...' for each field, numbers in rising order.

    Raises UserError unless there are two or more for each, of the type of the field.
    """
    grid = {}
    for field, text in texts.items():
        values = [
            config_lib.flatten(
                cli.override(config_lib.changed(config, {}), [f'--config.{field}={value}'])
            )[field]
            for value in text.split(',')
        ]
        values = list(dict.fromkeys(values))
        if len(values) < 2:
            raise UserError(
                f'--config.{field}={text} has one value, {values[0]}: a sweep needs '
                'two or more, with commas between them.'
            )
        grid[field] = values if isinstance(values[0], str) else sorted(values)
    return grid


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The members of a sweep, each with one of the values of every field."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def run(
    config: ConfigDict,
    grid: Mapping[str, Sequence[Any]],
    directory: str,
    repeats: int = 1,
    part: str = '1/1',
) -> int:
    """Runs the sweep; returns 0, or what loop.train returns after a signal, which ends the sweep.

    Args:
      grid: values by dotted field.
      repeats: number of final runs.
      part: 'I/N': only train each N-th member, from number I.

    Raises DivergedError when training diverges with all members, or with the winner.
    """
    check_at_least('--repeats', repeats, 1)
    members = combinations(grid)
    config = _as_begun(config, [os.path.join(directory, name_of(member)) for member in members])
    config = _with_splits(config)
    final_split, eval_split = config.dataset.final_split, config.dataset.eval_split
    config.dataset.final_split = ''  # a run has nothing to do with it
    configs = [config_lib.changed(config, member) for member in members]
    for each in configs:  # now, and not after hours of training
        config_lib.checked(each)
        config_lib.checked(each, {'seed': each.seed + repeats - 1})
    record.require_no_run(directory)
    record.require_apart(directory, config.dataset)
    _check_largest_batch(members, configs, directory)
    log_file.log_to(directory)
    log.info('the sweep tries %s', '  '.join(map(name_of, members)))
    scores = []
    for member, each in _part(list(zip(members, configs, strict=True)), part):
        code, score = _score(each, name_of(member), os.path.join(directory, name_of(member)))
        if code:
            return code
        scores.append(score)
    if len(scores) < len(members):
        log.info(
            'part %s of the sweep is trained. When all are, the same command without --part '
            'chooses.',
            part,
        )
        return 0
    best = _choose(members, scores, configs, eval_split)
    code, finals = _train_finals(
        configs[best],
        final_split,
        repeats,
        os.path.join(directory, f'final-{name_of(members[best])}'),
    )  # with more values another may win
    if not code:
        found = outcome.Outcome(
            members, scores, best, finals, eval_split, final_split, config.dataset.test_split
        )
        outcome.report(found, directory)
        if config.report:
            reporting.conclude_all(directory, outcome.notes(found, directory))
    return code


def _as_begun(config, workdirs):
    """The config with what the first of the workdirs that has a run began with.

    All members are then compared on the same images, also where an earlier version trained some.
    """
    for workdir in workdirs:
        if os.path.isfile(os.path.join(workdir, record.CONFIG)):
            recorded, _ = record.read(workdir)
            return config_lib.as_begun(config, recorded)
    return config


def _check_largest_batch(members, configs, directory):
    """Raises UserError, before the first member trains, if a batch exceeds the training split."""
    from vit_jax.data.sources import open_split
    from vit_jax.data.subsets import subset
    from vit_jax.training.run import check_batch_size

    largest = max(range(len(configs)), key=lambda number: configs[number].batch_size)
    if record.begun(os.path.join(directory, name_of(members[largest]))):
        return
    dataset = configs[largest].dataset
    train = subset(open_split(dataset, dataset.train_split), dataset.subset, dataset.train_split)
    check_batch_size(configs[largest], train.num_examples)


def _part(members, part):
    """Those members that 'I/N' names."""
    found = re.fullmatch(r'(\d+)/(\d+)', part)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count <= len(members):
        raise UserError(
            f'--part={part}: expected I/N, part I of N, as in 1/2, with N at most the '
            f'number of members, {len(members)}.'
        )
    return members[number - 1 :: count]


def _with_splits(config):
    """The config with the splits that it leaves open; UserError when one cannot be used."""
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
    if held_out:  # which scores the members
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
            raise UserError(f'dataset.{field} is {dataset[field]!r}: {error}{advice}') from error

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


def _score(config, name, folder):
    """(exit code of the run in the folder, its accuracy or None where training diverges)."""
    from vit_jax.training import loop

    fields = config_lib.flatten(config)
    mark = os.path.join(folder, 'diverged.json')  # contains the config with which it did
    if os.path.exists(mark):
        marked = read_json(mark, dict)
        defaults = config_lib.flatten(config_lib.base()) | config_lib.UNRECORDED
        newer = {k: v for k, v in defaults.items() if k in fields}
        if newer | marked == fields:
            log.warning('%s has diverged before: remove %s to try it again', name, mark)
            return 0, None
    try:
        code = loop.train(config, folder)
    except DivergedError as error:
        log.warning('%s diverges and is not chosen: %s', name, error)
        write_json(mark, fields)
        return 0, None
    return code, None if code else metrics.last_accuracy(folder)


def _choose(members, scores, configs, split):
    """The number of the member of the highest score; DivergedError when none has a score."""
    found = [number for number, score in enumerate(scores) if score is not None]
    if not found:
        least = min(config.optimizer.learning_rate for config in configs)
        raise DivergedError(
            f'training diverges with all members: {", ".join(map(name_of, members))}. '
            f'Try smaller learning rates, as in --config.{RATE}={least / 100:g},{least / 10:g}'
        )
    best = max(found, key=scores.__getitem__)
    log.info(
        'the best on %s is %s with %.2f %% accuracy',
        split,
        name_of(members[best]),
        100 * scores[best],
    )
    for field, value in members[best].items():
        values = [member[field] for member in members]
        if not isinstance(value, (str, bool)) and value and value in (min(values), max(values)):
            log.info(
                'its %s, %g, is at an end of those tried: others beyond it may be better',
                field,
                value,
            )
    return best


def _train_finals(config, split, repeats, folder):
    """(exit code, {seed: (accuracy on the test split, workdir)}) of runs on the final split."""
    from vit_jax.training import loop

    finals = {}
    for seed in range(config.seed, config.seed + repeats):
        workdir = folder + (f'_seed={seed}' if finals else '')
        code = loop.train(config_lib.final(config, split, seed), workdir)
        if code:
            return code, finals
        finals[seed] = metrics.last_accuracy(workdir), workdir
    return 0, finals


if __name__ == '__main__':
    cli.leave(main())
