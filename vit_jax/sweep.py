r"""Tries learning rates, chooses on held-out examples, and scores the best one on the test split.

    python -m vit_jax.sweep --config=configs/finetune.py:b16,cifar10 \
        --config.pretrained=WEIGHTS --workdir=DIR \
        --config.optimizer.learning_rate=0.001,0.003,0.01,0.03

Each value trains in DIR/lr=VALUE and is scored on `dataset.eval_split`. The best one then trains on
the whole training split in DIR/final-lr=VALUE, which is scored once, at its end, on
`dataset.test_split` (ViT section 4.1, table 4). A value with which training diverges is not chosen.
The same command again goes on where it was stopped, and with more values trains what they add. The
outcome is logged and stands in DIR/sweep.json.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import sys

from absl import app, flags
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import main as main_lib
from vit_jax.errors import DivergedError, UserError
from vit_jax.processes import hosts
from vit_jax.workdir import logs, metrics
from vit_jax.workdir import record as workdir

log = logs.LOGGER  # __name__ is __main__ here, outside of what logs.to_terminal shows

FLAG = '--config.optimizer.learning_rate'


def learning_rates(argv: list[str]) -> tuple[list[float], list[str]]:
    """The values of FLAG, as FLAG=A,B or FLAG A,B, and the other arguments.

    Raises UserError when it is not there with two different positive numbers or more.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(FLAG, nargs='?', dest='given')
    options, others = parser.parse_known_args(argv)
    try:
        values = sorted({float(value) for value in (options.given or '').split(',')})
    except ValueError:
        values = []
    if len(values) < 2 or not all(0 < value < math.inf for value in values):
        raise UserError(f'a sweep needs {FLAG}=A,B,... with two positive numbers or more'
                        f'{f", and got {options.given!r}" if options.given else ""}.')
    return values, others


def run(config: ConfigDict, values: list[float], directory: str) -> int:
    """Runs the sweep; returns 0, or what train.run returns when a signal came: nothing follows it.

    Raises:
      UserError: there is no split to score the winner on, or a run cannot be done.
      DivergedError: no value is left to choose, or the run of the winner diverges.
    """
    from vit_jax.data.sources import split_name
    from vit_jax.training import loop as train  # imports TensorFlow

    _open_test_split(config.dataset)
    scores = {}
    for value in values:
        config.optimizer.learning_rate = value
        code, scores[value] = _score(config, os.path.join(directory, f'lr={value:g}'))
        if code:
            return code
    eval_split = config.dataset.eval_split
    best = _choose(scores, eval_split)

    final = os.path.join(directory, f'final-lr={best:g}')  # with more values another may win
    config.optimizer.learning_rate = best
    config.dataset.train_split = split_name(config.dataset.train_split)
    config.dataset.num_examples = 0  # was of a part, where the config states it
    config.dataset.eval_split = config.dataset.test_split
    config.eval_every = 0  # the test split is scored once, at the end
    config.keep_best = False
    if code := train.run(config, final):
        return code
    accuracy = last_accuracy(final)
    log.info('learning rate %g, trained on all of %s: %.2f %% accuracy on %s, in %s', best,
             config.dataset.train_split, 100 * accuracy, config.dataset.test_split, final)
    workdir.save(os.path.join(directory, 'sweep.json'), {
        'eval_split': eval_split, 'eval_accuracy': {f'{v:g}': score for v, score in scores.items()},
        'best': best, 'test_split': config.dataset.test_split, 'test_accuracy': accuracy,
        'workdir': final})
    return 0


def _open_test_split(dataset):
    """Raises UserError, now and not after hours of training, when the winner cannot be scored.

    Nor may it be scored on the images that it was chosen on.
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
    classes = open_source(dataset, split_name(dataset.train_split)).class_names
    try:
        open_source(dataset, dataset.test_split, classes)
    except UserError as error:
        raise UserError(f'dataset.test_split is {dataset.test_split!r}: {error}') from error


def _score(config, folder):
    """(exit code of the run in the folder, its accuracy or None where training diverges)."""
    from vit_jax.training import loop as train

    mark = os.path.join(folder, 'diverged.json')  # holds the config that did
    if _read(mark) == _as_json(config):
        log.warning('learning rate %g has diverged before: remove %s to try it again',
                    config.optimizer.learning_rate, mark)
        return 0, None
    try:
        code = train.run(config, folder)
    except DivergedError as error:
        log.warning('learning rate %g diverges and is not chosen: %s',
                    config.optimizer.learning_rate, error)
        with open(mark, 'w', encoding='utf-8') as file:
            file.write(_as_json(config))
        return 0, None
    return code, None if code else last_accuracy(folder)


def _choose(scores, split):
    """The learning rate of the highest score; says how all did. DivergedError when none has one."""
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
    rows = metrics.read(os.path.join(folder, 'metrics.jsonl'))
    return [row['eval/accuracy'] for row in rows if 'eval/accuracy' in row][-1]


def _as_json(config):
    return json.dumps(config_lib.flatten(config), indent=2, sort_keys=True) + '\n'


def _read(path):
    with contextlib.suppress(FileNotFoundError), open(path, encoding='utf-8') as file:
        return file.read()
    return None


def main(argv: list[str], values: list[float]) -> None:
    """Exits with 0, 143 or 130 after a signal, 1 after an error that the last line explains."""
    if argv[1:]:
        sys.exit(f'error: unexpected argument {argv[1]!r}; flags are written --name=value.')
    logs.to_terminal()
    try:
        hosts.refuse_several('vit_jax.sweep', *main_lib.processes())
        code = run(flags.FLAGS.config, values, flags.FLAGS.workdir)
        if code:
            log.warning('the sweep stops here. To continue, run the same command again.')
        sys.exit(code)
    except UserError as error:
        sys.exit(f'error: {error}')


def start() -> None:
    """Takes the learning rates out of the command line, which absl could not read as a number."""
    try:
        values, sys.argv = learning_rates(sys.argv)  # ml_collections looks there, too
    except UserError as error:
        if not any(argument.startswith(('--help', '-help')) for argument in sys.argv):
            sys.exit(f'error: {error}')
        values = []  # absl shows the help, and that is all
    app.run(functools.partial(main, values=values), flags_parser=main_lib.parse)


if __name__ == '__main__':
    start()
