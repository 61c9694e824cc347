"""Converts weights from one layout to another, or to a program that runs without vit_jax.

    python -m vit_jax.convert SRC DST --to=LAYOUT [--verify] [--dtype=DTYPE] [--inexact]
    python -m vit_jax.convert SRC DST --to=web      # a folder whose page classifies photos
    python -m vit_jax.convert SRC DST --push=ORG/NAME [--dry_run]   # to the Hugging Face Hub

For onnx and stablehlo it prints lines of Python that prepare a photo and run DST.
SRC is a file, a directory, a workdir of vit_jax or one of its checkpoints, hf:ORG/NAME,
timm:NAME or gs://BUCKET/FILE; its layout is recognised from its content.
With --push DST is a folder for the Hub, with a model card about the data, the accuracy and the use
of the model. It has the layout of transformers, or timm's with --to=timm.
"""

import argparse
import dataclasses
import os
import shlex
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vit_jax import cli, files, machine, publishing, web, weights
from vit_jax.errors import UserError
from vit_jax.weights import array_files, description, export, preparation, published
from vit_jax.weights import verify as verification

_PUSHED = ('huggingface', 'timm')  # layouts of folders that the Hub's programs load


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if not (options.to or options.push):
        parser.error('the following arguments are required: --to')
    run(options)


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = cli.make_parser('convert', __doc__)
    parser.add_argument('source', metavar='SRC', help='weights to read')
    parser.add_argument('path', metavar='DST', help='file or directory to write')
    parser.add_argument(
        '--to',
        choices=[*weights.LAYOUTS, *export.FORMATS, 'web'],
        help=f'layout or program of DST; with --push the default is {_PUSHED[0]}',
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
    _add_push_options(parser)
    cli.add_description_options(parser)
    parser.add_argument(
        '--overwrite',
        action='store_true',
        help='replace DST if it exists, and with --push the files on the Hub',
    )
    return parser


def _add_push_options(parser: argparse.ArgumentParser) -> None:
    """Adds --push and the options that need it."""
    parser.add_argument(
        '--push',
        metavar='ORG/NAME',
        help='write a model card to DST, and upload DST to this repository of the Hugging Face Hub',
    )
    parser.add_argument(
        '--dry_run',
        action='store_true',
        help='with --push: write DST, print the card and the files, and upload nothing',
    )
    parser.add_argument(
        '--evaluation',
        metavar='FILE.json',
        help='with --push: scores for the card, as vit_jax.evaluate --json prints them; default: '
        'the scores in the folder of the fit or run',
    )


def run(options: argparse.Namespace) -> None:
    """Reads SRC, writes DST, reports it and verifies it; `options` are from `make_parser`."""
    path = options.path
    to = options.to or _PUSHED[0]
    check_push(options.push, to, path, options.dry_run, options.evaluation)
    check_destination(path, to, options.overwrite, options.runtime, bool(options.push))
    machine.start_backend()
    loaded = _read(options)
    card = None
    if options.push:
        loaded = _with_preprocess(loaded)
        card = _card_maker(options, loaded, to)
    written = convert(
        loaded,
        path,
        to,
        dtype=options.dtype,
        inexact=options.inexact,
        runtime=options.runtime,
        card=card,
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
    if options.push:
        _publish(path, options.push, options.dry_run, options.overwrite)


def _with_preprocess(loaded):
    """The weights with all fields of `preprocess`; UserError unless they take RGB images."""
    description.check_rgb(loaded)
    preprocess = {'image_size': loaded.image_size(), **description.complete_preprocess(loaded)}
    return dataclasses.replace(loaded, preprocess=preprocess)


def _card_maker(options, loaded, to):
    """A function that makes the model card of the weights that are written."""
    facts = publishing.read(options.source, loaded, options.evaluation)

    def make(written):
        return publishing.make(options.push, loaded, written, to, facts)

    return make


def _publish(folder, name, dry_run, overwrite):
    """Uploads the folder, or prints what would be uploaded."""
    card = os.path.join(folder, publishing.FILE)
    if dry_run:
        print(files.read_text(card))
        print(publishing.listing(folder, name))
        cli.LOGGER.info('Uploaded nothing, because of --dry_run. The folder is %s', folder)
    else:
        address = publishing.upload(folder, name, overwrite)
        cli.LOGGER.info('Uploaded %s to %s', folder, address)
    cli.LOGGER.info(
        'The author must choose a licence: %s names none. Add a line such as '
        '"license: apache-2.0" to the block at its top, here or on the Hub.',
        card,
    )


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
    card: Callable[[weights.Weights], str] | None = None,
) -> weights.Weights:
    """Writes weights in a layout or as a program.

    Args:
      loaded: the weights.
      path: a file or directory, which is replaced.
      to: a key of weights.LAYOUTS, one of export.FORMATS, or 'web'.
      dtype: dtype of the floating-point arrays, None to keep it.
      inexact: whether a layout may change the formula of GELU and epsilons.
      runtime: the package of onnxruntime-web for 'web', see web.save.
      card: makes README.md of a directory from the written weights; None for no such file.

    Returns:
      The weights with the dtype, formulas and description that were written.
    """
    written = loaded
    if dtype:
        written = _with_dtype(written, dtype)
    if to in weights.LAYOUTS:
        written = in_layout(written, path, to, inexact)
        texts = {publishing.FILE: card(written)} if card else None
        weights.save(written, path, to, texts)
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


def check_push(name: str | None, to: str, path: str, dry_run: bool, evaluation: str | None) -> None:
    """Raises UserError for a --push that cannot be, or for options that need --push.

    Args:
      name: ORG/NAME, or None without --push.
      to: the layout.
      path: the destination.
      dry_run: the option --dry_run.
      evaluation: the option --evaluation.
    """
    if name is None:
        given = {'--dry_run': dry_run, '--evaluation': evaluation}
        for option, value in given.items():
            if value:
                raise UserError(
                    f'{option} is for --push only: add --push=ORG/NAME, or leave it out.',
                    kind='inapplicable',
                    field=option,
                    value=value,
                )
        return
    publishing.check_name(name)
    if to not in _PUSHED:
        raise UserError(
            f'--push writes a folder that other programs load, and --to={to} does not: expected '
            f'--to={" or --to=".join(_PUSHED)}.',
            kind='inapplicable',
            field='--to',
            value=to,
        )
    if not array_files.is_directory(path):
        raise UserError(
            f'{path!r} is not a name for --push, which writes a folder: expected a name without '
            'such an ending.',
            kind='value',
            field='DST',
            value=path,
        )


def check_destination(
    path: str, to: str, overwrite: bool, runtime: str | None, with_card: bool = False
) -> None:
    """Raises UserError unless the layout or program `to` can be written to `path`.

    Args:
      path: the destination.
      to: the layout or program.
      overwrite: whether `path` may exist.
      runtime: the option --runtime.
      with_card: whether a model card is written, too.
    """
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
    array_files.check_replaceable(path, _files_of(to, with_card))


def _files_of(to, with_card):
    """The files of a directory that is written."""
    if to == 'web':
        return web.FILES
    if with_card:
        return publishing.FILES
    return array_files.WRITTEN


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
