"""Fit a classifier to your photos: one command, from a folder to a model with its accuracy.

    python -m vit_jax.fit DIR --pretrained=WEIGHTS [--minutes=30] [--workdir=DIR]

DIR has CLASS/photo or SPLIT/CLASS/photo files. A table (FILE.csv with the columns file, label, and
optionally split and group), digits, and a TFDS set in ArrayRecord files work as well. The command
scans the photos, cuts the splits that are missing, trains a linear probe and then fine-tunes, as
far as the minutes and the held-out photos allow. It writes the best model, calibrated, to
WORKDIR/model.safetensors, and lists its mistakes. The same command resumes a fit
that was stopped.

With --folds=K the linear probe on frozen features is also cross-validated: the photos of train and
val are cut into K folds, and a probe of the other folds predicts each fold. Near duplicates and
groups stay in one fold. fit.json has the mean accuracy over the folds and its standard error. Their
predictions rank the photos in suspects.csv. Fine-tuned models are not cross-validated. The best
penalty on val is used, so that the mean is slightly optimistic.
"""

import os
import time
from collections.abc import Sequence

from vit_jax import cli, machine
from vit_jax.errors import UserError
from vit_jax.processes import launch
from vit_jax.training import device_defaults

_SHORTEST, _LONGEST = 1.0, 60.0 * 24 * 30  # minutes


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 143 or 130 after a signal, 1 after an error that the last line explains."""
    started = time.monotonic()
    parser = cli.make_parser('fit', __doc__)
    parser.add_argument('data', help='a directory of photos, a table FILE.csv, or a data set')
    parser.add_argument(
        '--pretrained', required=True, help='weights of any layout, hf:ORGANISATION/NAME, timm:NAME'
    )
    parser.add_argument('--minutes', type=float, default=30.0, help='time for everything')
    parser.add_argument('--workdir', help='for all results; without it runs/fit-NAME')
    parser.add_argument('--seed', type=int, default=0, help='of the cuts and of training')
    parser.add_argument(
        '--folds',
        type=int,
        default=0,
        metavar='K',
        help='number of folds, 2 to 20, for the cross-validation of the linear probe on the photos '
        'of train and val (default: none)',
    )
    options = parser.parse_args(argv)
    if not _SHORTEST <= options.minutes <= _LONGEST:
        raise UserError(
            f'--minutes is {options.minutes}: expected a number from {_SHORTEST:g} to '
            f'{_LONGEST:g}.',
            kind='value',
            field='--minutes',
            value=options.minutes,
        )
    from vit_jax.fitting import fit, tries  # imports TensorFlow

    launch.refuse_several('vit_jax.fit')
    machine.start_backend(device_defaults.devices_for_batch(32))
    data = options.data.rstrip('/') or '/'  # shells complete the name of a folder with a slash
    settings = fit.Settings(data, options.pretrained, options.minutes, options.seed, options.folds)
    workdir = options.workdir or os.path.join('runs', f'fit-{_name_of(data)}')

    def recipe(argument):
        return cli.read_config_file(f'{tries.RECIPE}:{argument}')

    return fit.run(settings, workdir, recipe, started)


def _name_of(data):
    return os.path.basename(os.path.abspath(data)).removesuffix('.csv')


if __name__ == '__main__':
    cli.leave(main())
