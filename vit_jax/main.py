"""Trains a model.

    python -m vit_jax.main --config=configs/vit.py:b16 [--workdir=DIR] [--config.FIELD=VALUE ...]
"""

from collections.abc import Sequence

from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.processes import consensus, launch
from vit_jax.workdir import record


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when done, 143 or 130 after a signal, 1 after an error; the last line says why."""
    parser = cli.make_parser('main', __doc__, config_lib.help_text)
    parser.add_argument('--workdir', help='for checkpoints, metrics and curves; a run that is '
                        'found there continues. Without it runs/NAME, where NAME is made of '
                        '--config, as in runs/vit-b16')
    cli.add_process_options(parser)
    options, config = cli.parse_with_config(parser, argv)
    workdir = options.workdir or cli.default_workdir(argv)
    from vit_jax.training import loop  # imports TensorFlow, for which --help need not wait

    cli.join_processes(options, continues=True)
    if consensus.is_main():
        record.log_to(workdir)
    code = loop.train(config, workdir)
    launch.finish()
    return code


if __name__ == '__main__':
    cli.leave(main())
