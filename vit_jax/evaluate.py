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

Images are preprocessed as the weights state; --preprocess and --classes add missing values. An
image with several labels counts as right if the most probable class is one of them. --fewshot
accepts any classes: classifiers of frozen features learn from some images of each class. --type
names an evaluator, a built-in one (classification, fewshot, knn, linear_probe) or your own
(docs/how-to/add-a-metric.md); --evals names evaluators in config.evals of the run.
With --json the last line of stdout is one JSON object, or {"results": [...]} for several results.
Several processes, started as for vit_jax.main, share the images; process 0 prints the result.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vit_jax import cli, terminal
from vit_jax.errors import UserError
from vit_jax.models import representation
from vit_jax.processes import consensus, launch
from vit_jax.scoring import classes, evaluators, fewshot, split
from vit_jax.training import device_defaults
from vit_jax.weights import Loaded


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; the exit code is 0, or 1 after an error that the last line explains."""
    parser = make_parser()
    options = parser.parse_args(argv)
    check_fewshot_options(parser, options)
    targets = named_splits(options)
    cli.join_processes(options, host_devices=device_defaults.devices_for_batch(options.batch_size))
    consensus.check_equal(
        'the command',
        {f'--{name}': value for name, value in vars(options).items() if name != 'process_id'},
    )
    loaded = cli.read_model(options)
    consensus.check_equal_arrays('the weights', loaded.params)
    results = []
    for result, table in scores(options, targets, loaded):
        results.append(as_json(result))
        if consensus.is_main() and not options.json:
            terminal.write(table(result))
    if consensus.is_main() and options.json:
        terminal.write(json.dumps(results[0] if len(results) == 1 else {'results': results}))
    launch.finish()


def scores(
    options: argparse.Namespace,
    targets: Sequence[tuple[str | None, str | None]],
    loaded: Loaded,
) -> Iterator[tuple[dict[str, Any], Callable[[dict[str, Any]], str]]]:
    """Yields each result of the command, with the function that makes a table of it.

    Args:
      options: the options of the command.
      targets: the targets from `named_splits`.
      loaded: the weights and their model.
    """
    if options.evals:
        for name in options.evals.split(','):
            yield score_section(options, name, loaded), evaluators.table
        return
    for name, eval_split in targets:
        dataset = split.dataset_of(
            options.workdir,
            {
                'name': name,
                'data_dir': options.data_dir,
                'eval_split': eval_split,
                'label': options.label,
            },
            options.pretrained,
        )
        if options.type:
            section = evaluators.Section(
                name=evaluators.name_of(options.type),
                kind=options.type,
                options=options.options,
                train_split=options.fewshot_split,
                labels=options.labels,
                mapping=options.mapping,
            )
            yield (
                evaluators.score(loaded, dataset, section, options.batch_size),
                evaluators.table,
            )
        elif options.fewshot is None:
            result = classes.score(
                loaded,
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
                loaded,
                dataset,
                batch_size=options.batch_size,
                shots=options.fewshot,
                train_split=options.fewshot_split,
                l2=options.fewshot_l2,
                seeds=options.fewshot_seeds,
                name=options.representation,
            )
            yield result, fewshot.table


def score_section(options: argparse.Namespace, name: str, loaded: Loaded) -> dict[str, Any]:
    """The result of the evaluator `name` in config.evals of the run."""
    fields = evaluators.section_of(options.workdir, name)
    dataset = split.dataset_of(
        options.workdir,
        {
            'name': fields['dataset'] or None,
            'data_dir': options.data_dir,
            'eval_split': fields['split'],
        },
    )
    section = evaluators.Section(
        name=name,
        kind=fields['type'],
        options=fields['options'],
        train_split=fields['train_split'] or None,
        labels=fields['labels'] or None,
    )
    return evaluators.score(loaded, dataset, section, options.batch_size)


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """The result with None for NaN and infinity, which JSON does not have."""
    values = {}
    for name, value in result.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        values[name] = value if is_finite else None
    return values


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = cli.make_parser('evaluate', __doc__)
    cli.add_weights_options(parser)
    parser.add_argument(
        '--dataset',
        action='append',
        help="name of a TFDS set, directory SPLIT/CLASS/images, or 'digits'; the default with "
        '--workdir is the data set of the run. This option and --split may be repeated: equally '
        'often, or one of them once for all',
    )
    parser.add_argument(
        '--data_dir', default='', help="directory of TFDS sets; default: TFDS's own"
    )
    parser.add_argument(
        '--label',
        help='label of a TFDS set, as dataset.label; the default is the label of the run, or the '
        'one of the set',
    )
    parser.add_argument(
        '--split',
        action='append',
        help='split to score, such as test or train[:10%%]; the default with --workdir is '
        "the run's dataset.eval_split",
    )
    parser.add_argument(
        '--labels',
        metavar='FILE.json',
        help='labels that replace the labels of a directory: a list of lists of class numbers, '
        "one for each image in the order of file names, such as ImageNet-ReaL's real.json",
    )
    parser.add_argument(
        '--mapping',
        metavar='FILE.json',
        help='classes of the weights for a data set with other classes: '
        '{its class: "class of the weights; another"}, or the directory mappings of ObjectNet',
    )
    parser.add_argument(
        '--save', metavar='FILE.npz', help='write logits, labels and names of the images'
    )
    parser.add_argument(
        '--csv',
        metavar='FILE.csv',
        help='write path, label, prediction and probability of each image',
    )
    _add_evaluator_options(parser)
    parser.add_argument(
        '--batch_size', type=int, default=64, help='number of images in a batch, over all devices'
    )
    parser.add_argument(
        '--json', action='store_true', help='print the result as JSON instead of a table'
    )
    add_fewshot_options(parser)
    cli.add_process_options(parser)
    return parser


def _add_evaluator_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose another evaluator."""
    parser.add_argument(
        '--type',
        default='',
        help='another evaluator: classification, fewshot, knn, linear_probe, or your own '
        'PACKAGE.MODULE:FUNCTION',
    )
    parser.add_argument(
        '--options',
        default='',
        metavar='NAME=VALUE,...',
        help='options of the evaluator of --type',
    )
    parser.add_argument(
        '--evals',
        default='',
        metavar='NAME,...',
        help='evaluators in config.evals of the run of --workdir, which score their own data',
    )


def named_splits(options: argparse.Namespace) -> list[tuple[str | None, str | None]]:
    """(data set, split) of each target; None for an option that is not given.

    Raises:
      UserError: if --dataset and --split are repeated differently, or an option for one split is
        given with several.
    """
    datasets = options.dataset or [None]
    splits = options.split or [None]
    number = max(len(datasets), len(splits))
    if len(datasets) not in (1, number) or len(splits) not in (1, number):
        raise UserError(
            f'--dataset is given {len(datasets)} times and --split {len(splits)} times: expected '
            'both equally often, or one of them once for all.',
            kind='value',
            field='--split',
            value=options.split,
        )
    for name in ('labels', 'mapping', 'save', 'csv'):
        if number > 1 and getattr(options, name):
            raise UserError(
                f'--{name} is for one split: score the others by further commands.',
                kind='value',
                field=f'--{name}',
                value=getattr(options, name),
            )
    if len(datasets) < number:
        datasets = datasets * number
    if len(splits) < number:
        splits = splits * number
    return list(zip(datasets, splits, strict=True))


def add_fewshot_options(parser: argparse.ArgumentParser) -> None:
    """Adds --fewshot and the options that it needs."""
    parser.add_argument(
        '--fewshot',
        metavar='1,5,10,25',
        help='few-shot accuracy with these numbers of examples of each class, and with all',
    )
    parser.add_argument(
        '--fewshot_split',
        help="split of the examples; the default with --workdir is the run's "
        'dataset.train_split, else train',
    )
    parser.add_argument(
        '--fewshot_l2',
        default='1024',
        metavar='1024,...',
        help='regularisation of the least squares',
    )
    parser.add_argument(
        '--fewshot_seeds', type=int, default=3, help='number of draws of the examples'
    )
    parser.add_argument(
        '--representation',
        default='pre_logits',
        help='features: '
        + '; '.join(f'{name}, {meaning}' for name, meaning in representation.NAMES.items()),
    )


def check_fewshot_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raises UserError for options that need --fewshot, or that --fewshot excludes."""
    check_evaluator_options(parser, options)
    if options.fewshot is not None:
        _refuse_options(parser, options, ['labels', 'mapping', 'save', 'csv'], '--fewshot')
        return
    names = ['fewshot_l2', 'fewshot_seeds', 'representation']
    if not options.type:
        names.insert(0, 'fewshot_split')
    for name in names:
        if _is_given(parser, options, name):
            raise UserError(
                f'--{name} is for few-shot accuracy: add --fewshot=1,5,10,25.',
                kind='missing',
                field='--fewshot',
            )


def check_evaluator_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raises UserError for options that need --type or --evals, or that these exclude."""
    if options.options and not options.type:
        raise UserError(
            '--options is for the evaluator of --type: name one, as in --type=knn.',
            kind='missing',
            field='--type',
        )
    if options.evals and not options.workdir:
        raise UserError(
            f'--evals={options.evals} names evaluators of a run: add --workdir=DIR. For weights: '
            '--type=TYPE.',
            kind='missing',
            field='--workdir',
        )
    chosen = [name for name in ('type', 'evals', 'fewshot') if getattr(options, name)]
    if len(chosen) > 1:
        raise UserError(
            f'--{chosen[0]} and --{chosen[1]} name two evaluators: give one of them.',
            kind='value',
            field=f'--{chosen[1]}',
            value=getattr(options, chosen[1]),
        )
    if options.type:
        _refuse_options(parser, options, ['save', 'csv'], '--type')
    if options.evals:
        names = ['dataset', 'split', 'label', 'labels', 'mapping', 'save', 'csv']
        _refuse_options(parser, options, names, '--evals')


def _refuse_options(parser, options, names, other):
    """Raises UserError if one of the options is given, because the option `other` excludes it."""
    for name in names:
        if _is_given(parser, options, name):
            raise UserError(
                f'--{name} has no effect with {other}: leave it out.',
                kind='inapplicable',
                field=f'--{name}',
                value=getattr(options, name),
            )


def _is_given(parser, options, name):
    return getattr(options, name) != parser.get_default(name)


if __name__ == '__main__':
    cli.leave(main())
