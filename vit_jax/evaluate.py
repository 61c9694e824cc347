"""Measures the accuracy of a workdir or of weights on a data set, in total and per class.

    python -m vit_jax.evaluate --workdir=DIR [--split=SPLIT] [--json]
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=NAME_OR_DIR --split=SPLIT [--json]
    python -m vit_jax.evaluate --workdir=DIR --csv=FILE.csv
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=DIR --split=val --labels=real.json
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=DIR --split=images --mapping=FILE
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=DATA --split=TEST --fewshot=1,5,10
    python -m vit_jax.evaluate --workdir=DIR --type=PACKAGE.MODULE:FUNCTION --options=NAME=VALUE
    python -m vit_jax.evaluate --workdir=DIR --evals=NAME
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=A --split=val --dataset=B --split=test

Images are prepared as the weights say; --preprocess and --classes add what they do not say. Images
with several labels count as right if the most probable class is one of them. With --fewshot the
classes may be any: classifiers of frozen features learn from some images of each. --type names an
evaluator, the project's (classification, fewshot, knn, linear_probe) or your own (docs/
extending.md); --evals names evaluators in config.evals of the run.
With --json the last line of stdout is one JSON object; of several splits {"results": [...]}.
Several processes, started as those of vit_jax.main, share the images; process 0 has the result.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
from jaxtyping import PyTree

from vit_jax import cli, terminal
from vit_jax.errors import UserError
from vit_jax.models import representation
from vit_jax.processes import consensus, launch
from vit_jax.scoring import classes, evaluators, fewshot, split
from vit_jax.training import device_defaults
from vit_jax.weights import Weights


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    parser = make_parser()
    options = parser.parse_args(argv)
    check_fewshot_options(parser, options)
    targets = named_splits(options)
    cli.join_processes(options, host_devices=device_defaults.devices_for_batch(options.batch_size))
    consensus.check_equal(
        'the command',
        {f'--{name}': value for name, value in vars(options).items() if name != 'process_id'},
    )
    ready = cli.read_model(options)
    loaded = ready.weights
    model = ready.module
    params = ready.params
    consensus.check_equal_arrays('the weights', params)
    results = []
    for result, table in scores(options, targets, (loaded, model, params)):
        results.append(as_json(result))
        if consensus.is_main() and not options.json:
            terminal.write(table(result))
    if consensus.is_main() and options.json:
        terminal.write(json.dumps(results[0] if len(results) == 1 else {'results': results}))
    launch.finish()


def scores(
    options: argparse.Namespace,
    targets: Sequence[tuple[str | None, str | None]],
    weights: tuple[Weights, nn.Module, PyTree],
) -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], str]]]:
    """Each result that the options ask for, and the function that makes a table of it.

    Args:
      targets: of `named_splits`.
      weights: the loaded ones, their model and its parameters.
    """
    if options.evals:
        for name in options.evals.split(','):
            yield score_section(options, name, weights), evaluators.table
        return
    for name, scored in targets:
        dataset = split.dataset_of(
            options.workdir,
            {
                'name': name,
                'data_dir': options.data_dir,
                'eval_split': scored,
                'label': options.label,
            },
            options.pretrained,
        )
        if options.type:
            result = evaluators.score(
                *weights,
                dataset,
                batch_size=options.batch_size,
                name=evaluators.name_of(options.type),
                kind=options.type,
                options=options.options,
                train_split=options.fewshot_split,
                labels=options.labels,
                mapping=options.mapping,
            )
            yield result, evaluators.table
        elif options.fewshot is None:
            result = classes.score(
                *weights,
                dataset,
                batch_size=options.batch_size,
                labels=options.labels,
                mapping=options.mapping,
                save_to=options.save,
                csv_to=options.csv,
            )
            yield result, classes.table
        else:
            result = fewshot.score(
                *weights,
                dataset,
                batch_size=options.batch_size,
                shots=options.fewshot,
                train_split=options.fewshot_split,
                l2=options.fewshot_l2,
                seeds=options.fewshot_seeds,
                name=options.representation,
            )
            yield result, fewshot.table


def score_section(
    options: argparse.Namespace, name: str, weights: tuple[Weights, nn.Module, PyTree]
) -> dict[str, Any]:
    """What the evaluator of that name in the config of the run says of the weights."""
    section = evaluators.section_of(options.workdir, name)
    dataset = split.dataset_of(
        options.workdir,
        {
            'name': section['dataset'] or None,
            'data_dir': options.data_dir,
            'eval_split': section['split'],
        },
    )
    return evaluators.score(
        *weights,
        dataset,
        batch_size=options.batch_size,
        name=name,
        kind=section['type'],
        options=section['options'],
        train_split=section['train_split'] or None,
        labels=section['labels'] or None,
    )


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """A result without NaN, which JSON does not have: the loss of weights that are not finite."""
    return {
        k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in result.items()
    }


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = cli.make_parser('evaluate', __doc__)
    cli.add_weights_options(parser)
    parser.add_argument(
        '--dataset',
        action='append',
        help='TFDS name, directory SPLIT/CLASS/'
        "images, or 'digits'; the default with --workdir is the data set of the "
        'run. This and --split may be repeated: as many of one as of the other, '
        'or one that is for all',
    )
    parser.add_argument('--data_dir', default='', help="of TFDS sets; default: TFDS's own")
    parser.add_argument(
        '--label', help="of a TFDS set, as dataset.label; default: that of the run or the set's own"
    )
    parser.add_argument(
        '--split',
        action='append',
        help='for example test or train[:10%%]; the '
        "default with --workdir is the run's dataset.eval_split",
    )
    parser.add_argument(
        '--labels',
        metavar='FILE.json',
        help='instead of the labels of a '
        'directory: a list of lists of class numbers, one for each image in the '
        "order of file names, such as ImageNet-ReaL's real.json",
    )
    parser.add_argument(
        '--mapping',
        metavar='FILE.json',
        help='for a data set of other classes: '
        '{its class: "class of the weights; another"}, or the directory mappings '
        'that ObjectNet comes with',
    )
    parser.add_argument(
        '--save', metavar='FILE.npz', help='write logits, labels and names of the images'
    )
    parser.add_argument(
        '--csv',
        metavar='FILE.csv',
        help='write path, label, prediction and probability of each image',
    )
    parser.add_argument(
        '--type',
        default='',
        help='another evaluator: classification, fewshot, knn, linear_probe, or '
        'PACKAGE.MODULE:FUNCTION of your own',
    )
    parser.add_argument(
        '--options', default='', metavar='NAME=VALUE,...', help='that the evaluator of --type reads'
    )
    parser.add_argument(
        '--evals',
        default='',
        metavar='NAME,...',
        help='the evaluators of these names in config.evals of the run of --workdir, on their data',
    )
    parser.add_argument('--batch_size', type=int, default=64, help='of all devices')
    parser.add_argument('--json', action='store_true')
    add_fewshot_options(parser)
    cli.add_process_options(parser)
    return parser


def named_splits(options: argparse.Namespace) -> list[tuple[str | None, str | None]]:
    """(data set, split) of each to be scored, None where an option is not given."""
    datasets, splits = options.dataset or [None], options.split or [None]
    number = max(len(datasets), len(splits))
    if not {len(datasets), len(splits)} <= {1, number}:
        raise UserError(
            f'{len(datasets)} --dataset and {len(splits)} --split are given: expected '
            'as many of one as of the other, or one of them, which is for all.'
        )
    if number > 1 and (options.labels or options.mapping or options.save or options.csv):
        raise UserError(
            '--labels, --mapping, --save and --csv are for one split: evaluate the others by '
            'further commands.'
        )
    return list(
        zip(datasets * (number // len(datasets)), splits * (number // len(splits)), strict=True)
    )


def add_fewshot_options(parser: argparse.ArgumentParser) -> None:
    """Adds those that --fewshot, the first of them, gives a meaning."""
    parser.add_argument(
        '--fewshot',
        metavar='1,5,10,25',
        help='few-shot accuracy with so many examples of each class, and with all',
    )
    parser.add_argument(
        '--fewshot_split',
        help='where they come from; the default with --workdir '
        "is the run's dataset.train_split, else train",
    )
    parser.add_argument(
        '--fewshot_l2',
        default='1024',
        metavar='1024,...',
        help='regularisation of the least squares',
    )
    parser.add_argument('--fewshot_seeds', type=int, default=3, help='how often they are drawn')
    parser.add_argument(
        '--representation',
        default='pre_logits',
        help='features: '
        + '; '.join(f'{name}, {meaning}' for name, meaning in representation.NAMES.items()),
    )


def check_fewshot_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raises UserError for options that mean nothing without --fewshot, or with it."""
    check_evaluator_options(parser, options)
    few = ['fewshot_split', 'fewshot_l2', 'fewshot_seeds', 'representation']
    if options.type:
        few.remove('fewshot_split')
    for name in few if options.fewshot is None else ('labels', 'mapping', 'save', 'csv'):
        if getattr(options, name) != parser.get_default(name):
            raise UserError(
                f'--{name} is for few-shot accuracy: add --fewshot=1,5,10,25.'
                if name in few
                else f'--{name} has no meaning with --fewshot.'
            )


def check_evaluator_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raises UserError for options that mean nothing without --type or --evals, or with them."""
    if options.options and not options.type:
        raise UserError('--options is for the evaluator of --type: name one, as --type=knn.')
    if options.evals and not options.workdir:
        raise UserError(
            f'--evals={options.evals} names evaluators of a run: add --workdir=DIR. For weights: '
            '--type=TYPE.'
        )
    chosen = [name for name in ('type', 'evals', 'fewshot') if getattr(options, name)]
    if len(chosen) > 1:
        raise UserError(f'--{chosen[0]} and --{chosen[1]} are two evaluators: give one of them.')
    refused = ['save', 'csv'] if options.type else []
    if options.evals:
        refused = ['dataset', 'split', 'label', 'labels', 'mapping', 'save', 'csv']
    for name in refused:
        if getattr(options, name) != parser.get_default(name):
            raise UserError(f'--{name} has no meaning with --{chosen[0]}.')


if __name__ == '__main__':
    cli.leave(main())
