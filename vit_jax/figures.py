"""Draws what a model has learned and looks at, and what runs have reached: figures of the paper.

    python -m vit_jax.figures --pretrained=WEIGHTS --out=DIR [--only=NAME,NAME] IMAGE...
    python -m vit_jax.figures --workdir=RUN --out=DIR [--only=NAME,NAME] IMAGE...
    python -m vit_jax.figures --workdir=RUN --workdir=RUN ... --out=DIR
    python -m vit_jax.figures --benchmark=FILE --benchmark=FILE ... --out=DIR

Each figure is DIR/NAME.png, with the arrays behind it in DIR/NAME.npz. Without --only it draws all
that can be drawn, and says why the others cannot. Images are prepared as the weights say. Layers,
heads, rows and columns count from 0. docs/figures.md shows all figures:

"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax import cli, machine, terminal
from vit_jax.drawing import models as of_models
from vit_jax.drawing import photos as of_photos
from vit_jax.drawing import runs as of_runs
from vit_jax.errors import Inapplicable, UserError, check_choice
from vit_jax.files import named, writing
from vit_jax.inspection import arrays, runs
from vit_jax.inspection.subject import Choice, Subject
from vit_jax.models import variants


class Figure(NamedTuple):
    """How its arrays are found, from what, and drawn."""

    source: str  # of SOURCES
    arrays: Callable[[Any], Mapping[str, np.ndarray]]
    draw: Callable[[Mapping[str, np.ndarray], str], Any]


FIGURES = {
    'filters': Figure('model', arrays.filters, of_models.filters),
    'positions': Figure('model', arrays.positions, of_models.positions),
    'distance': Figure('model', arrays.distance, of_models.distance),
    'rollout': Figure('model', arrays.rollout, of_photos.rollout),
    'attention': Figure('model', arrays.attention, of_photos.attention),
    'threshold': Figure('model', arrays.threshold, of_photos.threshold),
    'attribution': Figure('model', arrays.attribution, of_photos.attribution),
    'compare': Figure('model', arrays.compare, of_photos.compare),
    'compute': Figure('runs', runs.with_pretraining, of_runs.compute),
    'data_size': Figure('runs', runs.with_pretraining, of_runs.data_size),
    'fewshot': Figure('runs', runs.with_few_shots, of_runs.fewshot),
    'speed': Figure('benchmarks', runs.speeds, of_runs.speed),
}


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    options = _parser().parse_args(argv)
    names = options.only.split(',') if options.only else list(FIGURES)
    for name in names:
        check_choice('--only', name, FIGURES)
    if os.path.exists(options.out) and not os.path.isdir(options.out):
        raise UserError(f'--out={options.out} is a file: name a directory.')
    with named(options.out):  # now, not after the work
        os.makedirs(options.out, exist_ok=True)
    sources = _sources(options, {FIGURES[name].source for name in names})
    drawn = 0
    for name in names:
        try:
            path = _draw(name, sources, options)
        except Inapplicable as error:
            if options.only:
                raise UserError(f'{name} cannot be drawn: {error}.') from error
            terminal.write(f'{name}: not drawn, because {error}')
        else:
            drawn += 1
            terminal.write(f'{name}: {path}.{options.format} and {path}.npz')
    if not drawn:
        raise UserError('no figure can be drawn of that.')


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser(
        'figures',
        __doc__
        + '\n'.join(
            f'    {name:12}{re.split("[.:]", figure.draw.__doc__ or "")[0]}'
            for name, figure in FIGURES.items()
        ),
    )
    parser.add_argument(
        '--workdir',
        action='append',
        default=[],
        dest='workdirs',
        help='of a run, or one of its checkpoints; several for figures of runs',
    )
    parser.add_argument(
        '--pretrained', help='weights: file, directory, hf:ORG/NAME, timm:NAME, gs://BUCKET/FILE'
    )
    cli.add_description_options(parser)
    parser.add_argument(
        '--benchmark',
        action='append',
        default=[],
        metavar='FILE',
        help='what vit_jax.benchmark --json has printed',
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='for the figures')
    parser.add_argument('--only', metavar='NAME,...', help=f'of {", ".join(FIGURES)}')
    parser.add_argument('--format', default='png', choices=('png', 'pdf', 'svg'))
    parser.add_argument(
        '--layer', type=int, help='of attention and positions; default: the last, and the first'
    )
    parser.add_argument('--head', type=int, help='of attention, alone in all layers')
    parser.add_argument(
        '--query',
        metavar='ROW,COLUMN',
        help='the patch whose attention is drawn; '
        'default: the class token, or the mean over all patches',
    )
    parser.add_argument(
        '--class',
        dest='target',
        metavar='NAME',
        help='for attribution: name or number; default: the likeliest of each image',
    )
    parser.add_argument('images', nargs='*', help='image files')
    return parser


def _sources(options, wanted) -> dict[str, Any]:
    """What the figures are of, by kind: whatever is named and wanted."""
    workdirs = tuple(options.workdirs)
    found = {'benchmarks': options.benchmark, 'runs': workdirs}
    if not (workdirs or options.pretrained or options.benchmark):
        raise UserError('there is nothing to draw: name --workdir, --pretrained or --benchmark.')
    if 'model' in wanted and len(workdirs) + bool(options.pretrained) == 1:
        options.workdir = workdirs[0] if workdirs else None
        found['model'] = Subject(
            cli.read_model(options),
            options.images,
            Choice(options.layer, options.head, options.query, options.target),
        )
    else:
        machine.start_backend()  # figures of runs start JAX, too
    return found


def _draw(name, sources, options):
    """Writes a figure and its arrays to the path returned; Inapplicable where there is none."""
    figure = FIGURES[name]
    if not sources.get(figure.source):
        raise Inapplicable(
            {
                'model': 'it is of one model: give one --workdir or --pretrained',
                'runs': 'it is of runs: give --workdir, once for each',
                'benchmarks': 'it is of --benchmark files, which vit_jax.benchmark --json prints',
            }[figure.source]
        )
    found, title = figure.arrays(sources[figure.source]), ''
    if figure.source == 'model':
        subject = sources['model']
        source = os.path.basename(os.path.normpath(options.pretrained or options.workdirs[0]))
        title = ' · '.join(filter(None, (variants.name_of(subject.loaded.weights.model), source)))
    path = os.path.join(options.out, name)
    with writing(f'{path}.npz') as temporary, open(temporary, 'wb') as file:
        np.savez_compressed(file, **found)
    with writing(f'{path}.{options.format}') as temporary:
        figure.draw(found, title).savefig(temporary, format=options.format, dpi=100)
    return path


if __name__ == '__main__':
    cli.leave(main())
