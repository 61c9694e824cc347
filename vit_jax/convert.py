"""Converts weights from one layout to another, or to a program that runs without vit_jax.

    python -m vit_jax.convert SRC DST --to=LAYOUT [--verify] [--dtype=DTYPE] [--inexact]
    python -m vit_jax.convert SRC DST --to=web      # a folder whose page classifies photos

For onnx and stablehlo it prints lines of Python that prepare a photo and run DST.
SRC is a file, a directory, a workdir of this project or one of its checkpoints, hf:ORG/NAME,
timm:NAME or gs://BUCKET/FILE; its layout is recognised from its content.
"""

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
    parser = cli.make_parser('convert', __doc__)
    parser.add_argument('source', metavar='SRC')
    parser.add_argument('path', metavar='DST')
    parser.add_argument(
        '--to',
        required=True,
        choices=[*weights.LAYOUTS, *export.FORMATS, 'web'],
        help='layout of DST',
    )
    parser.add_argument(
        '--verify', action='store_true', help='run SRC and DST on the same images and compare'
    )
    parser.add_argument(
        '--dtype',
        choices=['float32', 'float16', 'bfloat16'],
        help='of the arrays in DST; that of SRC unless given',
    )
    parser.add_argument(
        '--inexact',
        action='store_true',
        help='allow another formula of GELU or '
        'another epsilon where the layout does not have those of SRC',
    )
    parser.add_argument(
        '--runtime',
        metavar='FILE',
        help='the package of onnxruntime-web for --to=web, where npm cannot fetch it',
    )
    cli.add_description_options(parser)
    parser.add_argument('--overwrite', action='store_true', help='replace DST if it exists')
    convert(**vars(parser.parse_args(argv)))


def convert(
    source: str,
    path: str,
    to: str,
    *,
    verify: bool = False,
    dtype: str | None = None,
    inexact: bool = False,
    overwrite: bool = False,
    preprocess: Sequence[str] = (),
    classes: str | None = None,
    loss: str | None = None,
    model: Sequence[str] = (),
    step: int | None = None,
    allow_nonfinite: bool = False,
    runtime: str | None = None,
) -> None:
    """Does what the command does; the arguments are its options."""
    check_destination(path, to, overwrite, runtime)
    machine.start_backend()
    loaded = given = description.described(
        weights.load(
            source, description.parse_model(model), step=step, allow_nonfinite=allow_nonfinite
        ),
        preprocess,
        classes,
        loss,
    )
    layout = weights.LAYOUTS.get(to)  # None: a program
    if dtype:
        given = dataclasses.replace(
            loaded,
            params=jax.tree.map(
                lambda x: (
                    x.astype(jnp.dtype(dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x
                ),
                loaded.params,
            ),
        )
    if layout:
        given = in_layout(given, path, to, inexact)
        weights.save(given, path, to)
    elif to == 'web':
        web.save(given, path, runtime)
    else:
        if to == 'onnx':  # whose metadata says it
            given = description.completed(given)
        export.save(given, path, to)
    arrays = jax.tree.leaves(given.params)
    cli.LOGGER.info(
        '%s (%s) -> %s (%s): %s parameters, %s, %d classes',
        source,
        loaded.layout,
        path,
        to,
        f'{sum(x.size for x in arrays):,}',
        ' and '.join(sorted({str(x.dtype) for x in arrays})),
        given.num_classes,
    )
    if to == 'web':
        cli.LOGGER.info(
            'python -m http.server --directory %s, then open http://localhost:8000',
            shlex.quote(path),
        )
    elif not (layout and layout.native):
        log_what_is_lost(given, path, to)
    if to in export.FORMATS and given.channels() == 3:
        cli.LOGGER.info('Python that prepares a photo for %s and runs it:', path)
        print(preparation.python_lines(given, path, to))
    if verify:
        verification.verify(
            loaded, given, *((os.path.join(path, web.MODEL), 'onnx') if to == 'web' else (path, to))
        )


def check_destination(path: str, to: str, overwrite: bool, runtime: str | None) -> None:
    """Raises UserError unless something of the kind `to` can be written to `path`."""
    if (to == 'onnx') != path.endswith('.onnx'):
        raise UserError(
            f'{path!r} is not a name for {to}: a name ending in .onnx is for '
            '--to=onnx, and for that only.'
        )
    if to == 'web' and not array_files.is_directory(path):
        raise UserError(
            f'{path!r} is not a name for web, which is a folder: expected a name '
            'without such an ending.'
        )
    if runtime and to != 'web':
        raise UserError(f'--runtime={runtime} is for --to=web, and for that only.')
    for file in (path, f'{path}.data') if to == 'onnx' else (path,):
        if os.path.lexists(file) and not overwrite:
            raise UserError(f'{file} exists already: name another destination, or add --overwrite.')
    files.check_destination(path.rstrip('/'), folder=True)
    array_files.check_replaceable(path, web.FILES if to == 'web' else array_files.WRITTEN)


def in_layout(given: weights.Weights, path: str, to: str, inexact: bool) -> weights.Weights:
    """The weights as the layout can hold them; UserError if that needs --inexact."""
    changed, lines = weights.approximate(given, path, to)
    if lines and inexact:
        return changed
    if not lines or weights.misfits(changed, path, to):
        return given  # which weights.save refuses with all reasons if --inexact would not help
    raise UserError(
        f'layout {to} cannot hold this model exactly:\n  '
        + '\n  '.join(lines)
        + '\nWith --inexact it is written nevertheless; --verify shows what that '
        'changes.'
    )


def log_what_is_lost(given: weights.Weights, path: str, to: str) -> None:
    """Logs what the file, or the directory, at `path` does not say."""
    if to == 'onnx':  # whose metadata has all of it
        return
    lost, preprocess = [], given.preprocess or {}
    if to not in weights.LAYOUTS or not array_files.is_directory(path):
        words = [text] if (text := published.words(preprocess)) else []
        if len(set(size := preprocess.get('image_size', ()))) > 1:
            words.append('image_size={},{}'.format(*size))
        lost += [f'--preprocess={",".join(words)}'] * bool(words)
        lost += ['the names of the classes'] * bool(given.classes)
    if given.loss == 'sigmoid' and not (to == 'huggingface' and array_files.is_directory(path)):
        lost.append('--loss=sigmoid')
    if lost:
        cli.LOGGER.info('%s does not hold %s: say it where the file is used', path, ', '.join(lost))


if __name__ == '__main__':
    cli.leave(main())
