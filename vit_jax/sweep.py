r"""Tries values of fields, chooses on held-out images, and scores the best on the test split.

    python -m vit_jax.sweep --config=configs/finetune.py:b16,cifar10 \
        --config.pretrained=WEIGHTS --workdir=DIR
    python -m vit_jax.sweep --config=configs/finetune.py:b16,cifar10 \
        --config.pretrained=WEIGHTS --workdir=DIR --repeats=3 \
        --config.optimizer.learning_rate=0.003,0.01 --config.optimizer.weight_decay=0,0.1

The sweep tries all combinations of the fields with values A,B,... Without any, it tries the grid of
the config file (its function get_grid; configs/finetune.py has the grid of ViT table 4). A number,
a switch or a choice of words can be swept. In text, such as dataset.name, and in fields of several
values, such as image_size, a comma is part of one value.

Each member trains in DIR/lr=VALUE (for other fields DIR/FIELD=VALUE) and is scored on
`dataset.eval_split` by `best_metric` (default: accuracy). The best one then trains on
`dataset.final_split`, by default the whole training split, in DIR/final-lr=VALUE. It is scored
once, at its end, on `dataset.test_split` (ViT section 4.1). The sweep does not choose a member
whose training diverges. The same command resumes a stopped sweep; with more values it trains only
the additional members. The sweep logs the outcome, draws it in DIR/sweep.png and writes it to
DIR/sweep.json; DIR/report.html compares all runs.

With --folds=K the sweep is cross-validated. `dataset.final_split` is cut into K folds. Each member
trains K times, each time without one fold, and is scored on this fold. The member with the best
mean wins.
"""

import logging
import sys
from collections.abc import Sequence

from vit_jax import cli, machine
from vit_jax.campaigns import grids, sweep
from vit_jax.processes import launch
from vit_jax.training import device_defaults

log = logging.getLogger(__name__)


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 on success, 143 or 130 after a signal, 1 after an error that the log explains."""
    parser = cli.make_parser('sweep', __doc__)
    parser.add_argument('--workdir', required=True, help='directory for the workdirs of all runs')
    parser.add_argument(
        '--repeats',
        type=int,
        default=1,
        metavar='N',
        help='number of final runs, with the seeds seed, seed + 1, ...; the sweep reports their '
        'mean and standard deviation (default: 1)',
    )
    parser.add_argument(
        '--folds',
        type=int,
        default=0,
        metavar='K',
        help='number of folds, 2 to 20: train each member K times, each time without one fold of '
        'dataset.final_split, and compare the means over the folds. dataset.train_split and '
        'dataset.eval_split are not used (default: train each member once)',
    )
    parser.add_argument(
        '--part',
        default='1/1',
        metavar='I/N',
        help='train only part I of N of the runs of the members. Several processes or hosts that '
        'share DIR can train one part each, on separate devices; afterwards the command without '
        'this option chooses the winner and trains the final runs',
    )
    cli.add_process_options(parser)
    if argv is None:
        argv = sys.argv[1:]
    texts, others = grids.separate(argv)
    # The config is checked with the first value of each swept field.
    first = [f'--config.{field}={text.partition(",")[0]}' for field, text in texts.items()]
    options, config = cli.parse_with_config(parser, others + first)
    if not texts:
        texts = _grid_of_file(options.config, others)
    grid = grids.read(texts, config)
    launch.refuse_several('vit_jax.sweep', options.num_processes)
    workdirs = sweep.workdirs(config, grid, options.workdir, options.folds)
    machine.start_backend(device_defaults.host_devices(workdirs))
    code = sweep.run(config, grid, options.workdir, options.repeats, options.part, options.folds)
    if code:
        log.warning('The sweep stops here. Run the same command again to resume.')
    return code


def _grid_of_file(file, others):
    """Returns the texts of the grid of a config file; `others` are the other arguments."""
    _, has_argument, argument = file.partition(':')
    arguments_of_file = []
    if has_argument:
        arguments_of_file.append(argument)
    grid = cli.from_config_file(file, 'get_grid', *arguments_of_file)
    texts = grids.texts_of(grid, file, others)
    log.info('The sweep tries the grid of %s', file)
    return texts


if __name__ == '__main__':
    cli.leave(main())
