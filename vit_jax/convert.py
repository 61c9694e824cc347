"""Converts weights from one layout to another, or to a program that runs without vit_jax.

    python -m vit_jax.convert SRC DST --to=LAYOUT [--verify] [--dtype=DTYPE] [--inexact]
    python -m vit_jax.convert SRC DST --to=web      # a folder whose page classifies photos

For onnx and stablehlo it prints lines of Python that prepare a photo and run DST.
SRC is a file, a directory, a workdir of vit_jax or one of its checkpoints, hf:ORG/NAME,
timm:NAME or gs://BUCKET/FILE; its layout is recognised from its content.
"""

import argparse
import dataclasses
import os
import shlex
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vit_jax import cli, files, machine, web, weights
from vit_jax.errors import UserError
from vit_jax.weights import array_files, description, export, preparation, published
from vit_jax.weights import verify as verification


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    run(make_parser().parse_args(argv))


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = cli.make_parser('convert', __doc__)
    parser.add_argument('source', metavar='SRC', help='weights to read')
    parser.add_argument('path', metavar='DST', help='file or directory to write')
    parser.add_argument(
        '--to',
        required=True,
        choices=[*weights.LAYOUTS, *export.FORMATS, 'web'],
        help='layout or program of DST',
    )
    parser.add_argument(
        '--verify', action='store_true', help='run SRC and DST on the same images and compare'
    )
    parser.add_argument(
        '--dtype',
        choices=['float32', 'float16', 'bfloat16'],
        help='dtype of the arrays in DST; default: the dtypes of SRC',
    )
    parser.add_argument(
        '--inexact',
        action='store_true',
        help='allow another GELU or epsilon than in SRC if the layout requires it',
    )
    parser.add_argument(
        '--runtime',
        metavar='FILE',
        help='the package of onnxruntime-web for --to=web, if npm cannot download it',
    )
    cli.add_description_options(parser)
    parser.add_argument('--overwrite', action='store_true', help='replace DST if it exists')
    return parser


def run(options: argparse.Namespace) -> None:
    """Reads SRC, writes DST, reports it and verifies it; `options` are from `make_parser`."""
    path = options.path
    to = options.to
    check_destination(path, to, options.overwrite, options.runtime)
    machine.start_backend()
    loaded = _read(options)
    written = convert(
        loaded, path, to, dtype=options.dtype, inexact=options.inexact, runtime=options.runtime
    )
    _log_conversion(options.source, loaded, written, path, to)
    if to == 'web':
        cli.LOGGER.info(
            'python -m http.server --directory %s, then open http://localhost:8000',
            shlex.quote(path),
        )
    else:
        log_missing_description(written, path, to)
    if to in export.FORMATS and written.channels() == 3:
        cli.LOGGER.info('Python that prepares a photo for %s and runs it:', path)
        print(preparation.python_lines(written, path, to))
    if options.verify and to == 'web':
        verification.verify(loaded, written, os.path.join(path, web.MODEL), 'onnx')
    elif options.verify:
        verification.verify(loaded, written, path, to)


def _read(options):
    """The weights of SRC, completed by the options."""
    loaded = weights.load(
        options.source,
        description.parse_model(options.model),
        step=options.step,
        allow_nonfinite=options.allow_nonfinite,
    )
    return description.described(loaded, options.preprocess, options.classes, options.loss)


def convert(
    loaded: weights.Weights,
    path: str,
    to: str,
    *,
    dtype: str | None = None,
    inexact: bool = False,
    runtime: str | None = None,
) -> weights.Weights:
    """Writes weights in a layout or as a program.

    Args:
      loaded: the weights.
      path: a file or directory, which is replaced.
      to: a key of weights.LAYOUTS, one of export.FORMATS, or 'web'.
      dtype: dtype of the floating-point arrays, None to keep it.
      inexact: whether a layout may change the formula of GELU and epsilons.
      runtime: the package of onnxruntime-web for 'web', see web.save.

    Returns:
      The weights with the dtype, formulas and description that were written.
    """
    written = loaded
    if dtype:
        written = _with_dtype(written, dtype)
    if to in weights.LAYOUTS:
        written = in_layout(written, path, to, inexact)
        weights.save(written, path, to)
    elif to == 'web':
        web.save(written, path, runtime)
    else:
        if to == 'onnx':  # its metadata include the description
            written = description.completed(written)
        export.save(written, path, to)
    return written


def _with_dtype(loaded, dtype):
    def cast(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(jnp.dtype(dtype))

    return dataclasses.replace(loaded, params=jax.tree.map(cast, loaded.params))


def check_destination(path: str, to: str, overwrite: bool, runtime: str | None) -> None:
    """Raises UserError unless the layout or program `to` can be written to `path`."""
    if (to == 'onnx') != path.endswith('.onnx'):
        raise UserError(
            f'{path!r} is not a name for {to}: a name ending in .onnx is for '
            '--to=onnx, and for that only.',
            kind='value',
            field='DST',
            value=path,
        )
    if to == 'web' and not array_files.is_directory(path):
        raise UserError(
            f'{path!r} is not a name for web, which is a folder: expected a name '
            'without such an ending.',
            kind='value',
            field='DST',
            value=path,
        )
    if runtime and to != 'web':
        raise UserError(
            f'--runtime={runtime} is for --to=web only: leave it out.',
            kind='inapplicable',
            field='--runtime',
            value=runtime,
        )
    written = [path]
    if to == 'onnx':
        written.append(f'{path}.data')
    for file in written:
        if os.path.lexists(file) and not overwrite:
            raise UserError(
                f'{file} exists already: name another destination, or add --overwrite.',
                kind='conflict',
                file=file,
            )
    files.check_destination(path.rstrip('/'), folder=True)
    array_files.check_replaceable(path, web.FILES if to == 'web' else array_files.WRITTEN)


def in_layout(loaded: weights.Weights, path: str, to: str, inexact: bool) -> weights.Weights:
    """The weights with the formulas of the layout; UserError if they differ without --inexact."""
    changed, differences = weights.approximate(loaded, path, to)
    if differences and inexact:
        return changed
    if not differences or weights.misfits(changed, path, to):
        return loaded  # weights.save reports all reasons if --inexact would not help
    raise UserError(
        f'layout {to} cannot store this model exactly:\n  '
        + '\n  '.join(differences)
        + '\nAdd --inexact to write it nevertheless; --verify shows how that changes logits.',
        kind='inapplicable',
        field='--to',
        file=path,
        value=to,
    )


def _log_conversion(source, loaded, written, path, to):
    arrays = jax.tree.leaves(written.params)
    cli.LOGGER.info(
        'Converted %s (%s) to %s (%s): %s parameters, %s, %d classes',
        source,
        loaded.layout,
        path,
        to,
        f'{sum(x.size for x in arrays):,}',
        ' and '.join(sorted({str(x.dtype) for x in arrays})),
        written.num_classes,
    )


def log_missing_description(loaded: weights.Weights, path: str, to: str) -> None:
    """Logs options for facts that the file or directory at `path` does not state."""
    if to == 'onnx' or (to in weights.LAYOUTS and weights.LAYOUTS[to].native):
        return  # these files state everything
    is_directory = array_files.is_directory(path) and to in weights.LAYOUTS
    missing = []
    if not is_directory:
        missing += _preprocess_option(loaded.preprocess or {})
        if loaded.classes:
            missing.append('the names of the classes')
    if loaded.loss == 'sigmoid' and not (to == 'huggingface' and is_directory):
        missing.append('--loss=sigmoid')
    if missing:
        cli.LOGGER.info(
            '%s does not state %s: add it where you use the file', path, ', '.join(missing)
        )


def _preprocess_option(preprocess):
    """The option --preprocess for these fields, in a list; [] without fields."""
    assignments = []
    text = published.words(preprocess)
    if text:
        assignments.append(text)
    size = preprocess.get('image_size', ())
    if len(set(size)) > 1:  # not a square
        assignments.append('image_size={},{}'.format(*size))
    if not assignments:
        return []
    return [f'--preprocess={",".join(assignments)}']


if __name__ == '__main__':
    cli.leave(main())
