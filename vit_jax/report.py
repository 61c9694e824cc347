"""Writes a page about one run, or a page that compares several: report.html, one file.

    python -m vit_jax.report WORKDIR [--out=FILE.html]
    python -m vit_jax.report WORKDIR WORKDIR... [--out=FILE.html]
    python -m vit_jax.report DIR [--out=FILE.html]

The page of one run shows its result, its curves, the fields that differ from the recipe, the data,
predictions and attention maps. The page of several runs, or of all runs in DIR, shows their
results, their curves and their differing fields. A finished run writes its own page; a
sweep and vtab write a page of all their runs.
"""

import os
from collections.abc import Sequence

from vit_jax import cli, machine, reporting
from vit_jax.errors import check_at_least
from vit_jax.files import check_destination, write_text
from vit_jax.processes import launch


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0 on success, or 1 after an error that the last line of the log explains."""
    parser = cli.make_parser('report', __doc__)
    parser.add_argument('workdirs', nargs='+', metavar='WORKDIR', help='workdirs of runs')
    parser.add_argument(
        '--out',
        metavar='FILE.html',
        help='file to write; default: report.html in WORKDIR or DIR, or in the current directory '
        'for several of them',
    )
    parser.add_argument(
        '--images',
        type=int,
        default=reporting.IMAGES,
        help='largest number of images of dataset.eval_split to evaluate for each run '
        '(default: %(default)s); 0: use neither the model nor the data',
    )
    options = parser.parse_args(argv)
    check_at_least('--images', options.images, 0)
    launch.refuse_several('vit_jax.report')
    from vit_jax.reporting import collect, page

    notes: dict[str, str] = {}  # by workdir
    for argument in options.workdirs:
        notes |= collect.workdirs(argument)
    for workdir in notes:  # errors now, not after the work
        collect.read(workdir)
    if options.images:
        machine.start_backend()
    out = options.out
    if not out:
        directory = '.'
        if len(options.workdirs) == 1:
            directory = options.workdirs[0]
        out = os.path.join(directory, reporting.FILE)
    check_destination(out, '.html', '.htm')
    runs = [collect.run(workdir, options.images) for workdir in notes]
    write_text(out, page.of_any(runs, list(notes.values())))
    cli.LOGGER.info('Wrote %s (%.1f MB): open it in a browser', out, os.path.getsize(out) / 1e6)


if __name__ == '__main__':
    cli.leave(main())
