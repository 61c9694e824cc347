r"""Tries learning rates, chooses on held-out examples, and scores the best one on the test split.

    python -m vit_jax.sweep --config=configs/finetune.py:b16,cifar10 \
        --config.pretrained=WEIGHTS --workdir=DIR \
        --config.optimizer.learning_rate=0.001,0.003,0.01,0.03

Each value trains in DIR/lr=VALUE and is scored on `dataset.eval_split`. The best one then trains on
the whole training split in DIR/final-lr=VALUE, which is scored once, at its end, on
`dataset.test_split` (ViT section 4.1, table 4). A value with which training diverges is not chosen.
The same command continues a sweep that was stopped, and with more values trains what they add. The
outcome is logged and written to DIR/sweep.json.
"""

import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax import cli, machine
from vit_jax import config as config_lib
from vit_jax.errors import DivergedError, UserError
from vit_jax.processes import launch
from vit_jax.workdir import metrics, record

log = logging.getLogger('vit_jax.sweep')

FLAG = '--config.optimizer.learning_rate'


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 143 or 130 after a signal, 1 after an error that the last line explains."""
    parser = cli.make_parser('sweep', __doc__)
    parser.add_argument('--workdir', required=True, help='for the workdirs of all runs')
    parser.add_argument(FLAG, nargs='?', metavar='A,B,...', dest='learning_rates',
                        help='the values to be tried')
    cli.add_process_options(parser)
    options, config = cli.parse_with_config(parser, argv)
    values = learning_rates(options.learning_rates)
    launch.refuse_several('vit_jax.sweep', options.num_processes)
    machine.check_backend()
    code = run(config, values, options.workdir)
    if code:
        log.warning('the sweep stops here. To continue, run the same command again.')
    return code


def learning_rates(given: str | None) -> list[float]:
    """The values of 'A,B,...'; UserError unless they are two different positive numbers or more."""
    try:
        values = sorted({float(value) for value in (given or '').split(',')})
    except ValueError:
        values = []
    if len(values) < 2 or not all(0 < value < math.inf for value in values):
        raise UserError(f'a sweep needs {FLAG}=A,B,... with two positive numbers or more'
                        f'{f", and got {given!r}" if given else ""}.')
    return values


def run(config: ConfigDict, values: list[float], directory: str) -> int:
    """Runs the sweep; returns 0, or what loop.train returns after a signal, which ends the sweep.

    Raises DivergedError when training diverges with all values, or with the winner.
    """
    from vit_jax.data.folders import choose_splits  # imports TensorFlow
    from vit_jax.data.sources import split_name
    from vit_jax.training import loop

    config = config_lib.changed(config, dict(zip(
        ('dataset.train_split', 'dataset.eval_split'),
        choose_splits(config.dataset.name, config.dataset.train_split, config.dataset.eval_split),
        strict=True)))
    _open_test_split(config.dataset)
    scores = {}
    for value in values:
        code, scores[value] = _score(
            config_lib.changed(config, {'optimizer.learning_rate': value}),
            os.path.join(directory, f'lr={value:g}'))
        if code:
            return code
    dataset = config.dataset
    best = _choose(scores, dataset.eval_split)
    final = os.path.join(directory, f'final-lr={best:g}')  # with more values another may win
    code = loop.train(config_lib.changed(config, {
        'optimizer.learning_rate': best,
        'dataset.train_split': split_name(dataset.train_split),
        'dataset.num_examples': 0,  # the config may state that of a part
        'dataset.eval_split': dataset.test_split,
        'eval_every': 0,  # the test split is scored once, at the end
        'keep_best': False}), final)
    if code:
        return code
    accuracy = last_accuracy(final)
    log.info('learning rate %g, trained on all of %s: %.2f %% accuracy on %s, in %s', best,
             split_name(dataset.train_split), 100 * accuracy, dataset.test_split, final)
    record.write_json(os.path.join(directory, 'sweep.json'), {
        'eval_split': dataset.eval_split,
        'eval_accuracy': {f'{value:g}': score for value, score in scores.items()},
        'best': best, 'test_split': dataset.test_split, 'test_accuracy': accuracy,
        'workdir': final})
    return 0


def _open_test_split(dataset):
    """Raises UserError, now and not after hours of training, when the winner cannot be scored.

    Scoring it on the images that chose it is refused, too.
    """
    from vit_jax.data.sources import open_source, split_name

    if not dataset.test_split:
        raise UserError('dataset.test_split is empty: name the split that scores the winner, as in '
                        '--config.dataset.test_split=test')
    if dataset.test_split in (dataset.eval_split, split_name(dataset.eval_split)):
        raise UserError(
            f'dataset.test_split {dataset.test_split!r} has the images of dataset.eval_split '
            f'{dataset.eval_split!r}, which choose the learning rate: hold out a part of the '
            'training split, as in --config.dataset.train_split=train[:90%] '
            '--config.dataset.eval_split=train[90%:]')
    classes = open_source(dataset.name, split_name(dataset.train_split),
                          dataset.data_dir).class_names
    try:
        open_source(dataset.name, dataset.test_split, dataset.data_dir, classes)
    except UserError as error:
        raise UserError(f'dataset.test_split is {dataset.test_split!r}: {error}') from error


def _score(config, folder):
    """(exit code of the run in the folder, its accuracy or None where training diverges)."""
    from vit_jax.training import loop

    fields = json.dumps(config_lib.flatten(config), indent=2, sort_keys=True) + '\n'
    mark = pathlib.Path(folder, 'diverged.json')  # contains the config with which it did
    if mark.exists() and mark.read_text(encoding='utf-8') == fields:
        log.warning('learning rate %g has diverged before: remove %s to try it again',
                    config.optimizer.learning_rate, mark)
        return 0, None
    try:
        code = loop.train(config, folder)
    except DivergedError as error:
        log.warning('learning rate %g diverges and is not chosen: %s',
                    config.optimizer.learning_rate, error)
        mark.write_text(fields, encoding='utf-8')
        return 0, None
    return code, None if code else last_accuracy(folder)


def _choose(scores, split):
    """The learning rate of the highest score; logs all. DivergedError when none has a score."""
    log.info('learning rates on %s: %s', split, '  '.join(
        f'{value:g}: diverges' if score is None else f'{value:g}: {100 * score:.2f} %'
        for value, score in scores.items()))
    found = {value: score for value, score in scores.items() if score is not None}
    if not found:
        least = min(scores)
        raise DivergedError(
            f'training diverges with all learning rates: {", ".join(f"{v:g}" for v in scores)}. '
            f'Try smaller ones, as in {FLAG}={least / 100:g},{least / 10:g}')
    best = max(found, key=found.get)
    if best in (min(scores), max(scores)):
        log.info('the best, %g, is at an end of those tried: others beyond it may be better', best)
    return best


def last_accuracy(folder: str) -> float:
    """eval/accuracy at the end of a finished run, in [0, 1]."""
    return [row['eval/accuracy'] for row in metrics.read(folder) if 'eval/accuracy' in row][-1]


if __name__ == '__main__':
    sys.exit(main())
