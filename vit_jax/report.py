"""Writes a page that shows a run, or sets several side by side: report.html, one file.

    python -m vit_jax.report WORKDIR [--out=FILE.html]
    python -m vit_jax.report WORKDIR WORKDIR... [--out=FILE.html]
    python -m vit_jax.report DIR [--out=FILE.html]

Of one run it has the result, curves, what differs from the recipe, the data, predictions and what
the model looks at; of several, or of all those in DIR, the results, curves and what differs between
them. A finished run writes its own page, a sweep and vtab one of all their runs.
"""

import os
from collections.abc import Sequence

from vit_jax import cli, machine, reporting
from vit_jax.errors import check_at_least
from vit_jax.files import check_destination, write_text
from vit_jax.processes import launch


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    parser = cli.make_parser('report', __doc__)
    parser.add_argument('workdirs', nargs='+', metavar='WORKDIR')
    parser.add_argument(
        '--out',
        metavar='FILE.html',
        help='default: report.html in WORKDIR or DIR; of several of these, in this directory',
    )
    parser.add_argument(
        '--images',
        type=int,
        default=reporting.IMAGES,
        help='of the split that '
        'scored a run: so many are evaluated, at most (%(default)s); 0: neither '
        'the model nor the data are used',
    )
    options = parser.parse_args(argv)
    check_at_least('--images', options.images, 0)
    launch.refuse_several('vit_jax.report')
    from vit_jax.reporting import collect, page

    workdirs = {
        workdir: note
        for given in options.workdirs
        for workdir, note in collect.workdirs(given).items()
    }
    for workdir in workdirs:  # now, and not after the work; so are the next
        collect.read(workdir)
    if options.images:
        machine.start_backend()
    out = options.out or os.path.join(
        options.workdirs[0] if len(options.workdirs) == 1 else '.', reporting.FILE
    )
    check_destination(out, '.html', '.htm')
    runs = [collect.run(workdir, options.images) for workdir in workdirs]
    write_text(
        out,
        page.of_one(runs[0]) if len(runs) == 1 else page.of_several(runs, list(workdirs.values())),
    )
    cli.LOGGER.info('wrote %s: %.1f MB, open it in a browser', out, os.path.getsize(out) / 1e6)


if __name__ == '__main__':
    cli.leave(main())
