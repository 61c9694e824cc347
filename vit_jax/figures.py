"""Draws figures of the paper for a model, for runs or for benchmarks.

    python -m vit_jax.figures --pretrained=WEIGHTS --out=DIR [--only=NAME,NAME] IMAGE...
    python -m vit_jax.figures --workdir=RUN --out=DIR [--only=NAME,NAME] IMAGE...
    python -m vit_jax.figures --workdir=RUN --workdir=RUN ... --out=DIR
    python -m vit_jax.figures --benchmark=FILE --benchmark=FILE ... --out=DIR

Each figure is DIR/NAME.png, and its arrays are in DIR/NAME.npz. Without --only the command draws
all possible figures, and prints why others are not possible. The record in the weights says how
images are prepared. Layers, heads, rows and columns count from 0. docs/how-to/figures.md shows
these figures:

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
from vit_jax.files import make_directory, writing
from vit_jax.inspection import arrays, runs
from vit_jax.inspection.subject import Choice, Subject
from vit_jax.models import variants


class Figure(NamedTuple):
    """A figure: how its arrays are computed, and how they are drawn."""

    source: str  # a key of SOURCES
    arrays: Callable[[Any], Mapping[str, np.ndarray]]  # maps the source to arrays
    draw: Callable[[Mapping[str, np.ndarray], str], Any]  # maps (arrays, title) to a figure


# Kinds of sources, with the message for a figure whose source is missing.
SOURCES = {
    'model': 'it needs one model: use one --workdir or --pretrained',
    'runs': 'it needs runs: use --workdir once for each',
    'benchmarks': 'it needs --benchmark files, which vit_jax.benchmark --json prints',
}


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
    make_directory(options.out, '--out')  # an error ends the command at its start
    sources = _sources(options, {FIGURES[name].source for name in names})
    num_drawn = 0
    for name in names:
        try:
            path = _draw(name, sources, options)
        except Inapplicable as error:
            if options.only:
                raise UserError(
                    f'{name} cannot be drawn: {error}.',
                    kind='inapplicable',
                    field='--only',
                    value=name,
                ) from error
            terminal.write(f'{name}: not drawn, because {error}')
        else:
            num_drawn += 1
            terminal.write(f'{name}: {path}.{options.format} and {path}.npz')
    if not num_drawn:
        raise UserError('None of the figures can be drawn.', kind='inapplicable')


def _parser() -> argparse.ArgumentParser:
    lines = []
    for name, figure in FIGURES.items():
        summary = re.split('[.:]', figure.draw.__doc__ or '')[0]
        lines.append(f'    {name:12}{summary}')
    parser = cli.make_parser('figures', __doc__ + '\n'.join(lines))
    parser.add_argument(
        '--workdir',
        action='append',
        default=[],
        dest='workdirs',
        help='workdir of a run, or one of its checkpoints; repeat it for figures of several runs',
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
        help='output of vit_jax.benchmark --json; repeat it for several benchmarks',
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='directory of the figures')
    parser.add_argument(
        '--only', metavar='NAME,...', help=f'names of the figures to draw: {", ".join(FIGURES)}'
    )
    parser.add_argument(
        '--format', default='png', choices=('png', 'pdf', 'svg'), help='file format of the figures'
    )
    parser.add_argument(
        '--layer',
        type=int,
        help='layer for attention and positions; default: the last one for attention, the first '
        'one for positions',
    )
    parser.add_argument(
        '--head', type=int, help='head for attention, in all layers unless --layer is set'
    )
    parser.add_argument(
        '--query',
        metavar='ROW,COLUMN',
        help='patch whose attention is drawn; default: the class token, or the mean over all '
        'patches',
    )
    parser.add_argument(
        '--class',
        dest='target',
        metavar='NAME',
        help='name or number of the class for attribution; default: the likeliest class of each '
        'image',
    )
    parser.add_argument('images', nargs='*', help='image files')
    return parser


def _sources(options, needed_kinds) -> dict[str, Any]:
    """The sources of the figures, by kind; the model is only loaded if a figure needs it."""
    workdirs = tuple(options.workdirs)
    model_paths = list(workdirs)
    if options.pretrained:
        model_paths.append(options.pretrained)
    if not model_paths and not options.benchmark:
        raise UserError(
            'There is nothing to draw: use --workdir, --pretrained or --benchmark.',
            kind='missing',
            field='--workdir',
        )
    sources = {'benchmarks': options.benchmark, 'runs': workdirs}
    if 'model' in needed_kinds and len(model_paths) == 1:
        options.workdir = workdirs[0] if workdirs else None
        choice = Choice(options.layer, options.head, options.query, options.target)
        sources['model'] = Subject(cli.read_model(options), options.images, choice)
    else:
        machine.start_backend()  # figures of runs use JAX too
    return sources


def _draw(name, sources, options):
    """Writes a figure and its arrays, and returns their path without the ending.

    Raises:
      Inapplicable: the sources do not have the figure.
    """
    figure = FIGURES[name]
    if not sources.get(figure.source):
        raise Inapplicable(SOURCES[figure.source])
    arrays_of_figure = figure.arrays(sources[figure.source])
    title = ''
    if figure.source == 'model':
        title = _model_title(sources['model'], options.pretrained or options.workdirs[0])
    path = os.path.join(options.out, name)
    with writing(f'{path}.npz') as temporary, open(temporary, 'wb') as file:
        np.savez_compressed(file, **arrays_of_figure)
    with writing(f'{path}.{options.format}') as temporary:
        picture = figure.draw(arrays_of_figure, title)
        picture.savefig(temporary, format=options.format, dpi=100)
    return path


def _model_title(subject, path):
    """The name of the model, if it has one, and the last part of the path of its weights."""
    source = os.path.basename(os.path.normpath(path))
    name = variants.name_of(subject.loaded.weights.model)
    if name is None:
        return source
    return f'{name} · {source}'


if __name__ == '__main__':
    cli.leave(main())
