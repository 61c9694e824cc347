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
    texts, others = grids.separate(sys.argv[1:] if argv is None else argv)
    first = [f'--config.{field}={text.partition(",")[0]}' for field, text in texts.items()]
    options, config = cli.parse_with_config(parser, others + first)
    if not texts:
        texts = _grid_of_file(options.config, others)
    grid = grids.read(texts, config)
    launch.refuse_several('vit_jax.sweep', options.num_processes)
    machine.start_backend(
        device_defaults.host_devices(sweep.workdirs(config, grid, options.workdir))
    )
    code = sweep.run(config, grid, options.workdir, options.repeats, options.part)
    if code:
        log.warning('the sweep stops here. To continue, run the same command again.')
    return code


def _grid_of_file(file, others):
    """The texts of the fields that get_grid of a config file names; `others` are arguments."""
    _, has_argument, argument = file.partition(':')
    arguments_of_file = [argument] if has_argument else []
    grid = cli.from_config_file(file, 'get_grid', *arguments_of_file)
    texts = grids.texts_of(grid, file, others)
    log.info('the grid is that of %s', file)
    return texts


if __name__ == '__main__':
    cli.leave(main())
