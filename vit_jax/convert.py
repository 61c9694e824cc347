"""Converts weights from one layout to another, or to a program that runs without vit_jax.

    python -m vit_jax.convert SRC DST --to=LAYOUT [--verify] [--dtype=DTYPE] [--inexact]
    python -m vit_jax.convert SRC DST --to=web      # a folder whose page classifies photos
    python -m vit_jax.convert SRC DST.onnx --to=onnx --embed_preprocessing
    python -m vit_jax.convert SRC DST.onnx --to=onnx --dtype=int8 --data=DATA --split=SPLIT
    python -m vit_jax.convert SRC DST --push=ORG/NAME [--dry_run]   # to the Hugging Face Hub

For onnx and stablehlo it prints lines of Python that prepare a photo and run DST. With
--embed_preprocessing the ONNX file prepares a photo itself. --dtype=int8 measures the accuracy on
held-out photos, and writes nothing if it loses more than --max_loss.
SRC is a file, a directory, a workdir of vit_jax or one of its checkpoints, hf:ORG/NAME,
timm:NAME or gs://BUCKET/FILE; its layout is recognised from its content.
With --push DST is a folder for the Hub, with a model card about the data, the accuracy and the use
of the model. It has the layout of transformers, or timm's with --to=timm.
"""

import argparse
import dataclasses
import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax import cli, files, machine, publishing, web, weights
from vit_jax.errors import UserError, counted
from vit_jax.weights import (
    array_files,
    description,
    embedded,
    export,
    preparation,
    published,
    reduced,
)
from vit_jax.weights import verify as verification
from vit_jax.workdir import record

DEFAULT_MAX_LOSS = 1.0  # percentage points

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
        choices=['float32', 'float16', 'bfloat16', 'int8'],
        help='dtype of the arrays in DST; default: the dtypes of SRC. int8 is for onnx',
    )
    parser.add_argument(
        '--embed_preprocessing',
        action='store_true',
        help='for onnx: DST takes a photo of any size, uint8, and returns probabilities',
    )
    parser.add_argument(
        '--data',
        metavar='NAME_OR_DIR',
        help='held-out photos on which --dtype=int8 or float16 for onnx is measured, as --dataset '
        'of vit_jax.evaluate; default for int8: the data set of the run in SRC',
    )
    parser.add_argument(
        '--split',
        help='split of --data; default: dataset.eval_split of the run in SRC',
    )
    parser.add_argument(
        '--max_loss',
        type=float,
        metavar='POINTS',
        help='largest loss of accuracy on --data, in percentage points (default: '
        f'{DEFAULT_MAX_LOSS:g})',
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
    check_onnx_options(options, to)
    held_out = _held_out_photos(options)
    machine.start_backend()
    loaded = _read(options)
    card = None
    if options.push:
        loaded = _with_preprocess(loaded)
        card = _card_maker(options, loaded, to)
    if to == 'onnx':
        written = convert_to_onnx(
            loaded,
            path,
            dtype=options.dtype,
            embeds_preprocessing=options.embed_preprocessing,
            held_out=held_out,
        )
    else:
        written = convert(
            loaded,
            path,
            to,
            dtype=options.dtype,
            inexact=options.inexact,
            runtime=options.runtime,
            card=card,
        )
    _log_conversion(options.source, loaded, written, path, to, options.dtype)
    if to == 'web':
        cli.LOGGER.info(
            'python -m http.server --directory %s, then open http://localhost:8000',
            shlex.quote(path),
        )
    else:
        log_missing_description(written, path, to)
    if to in export.FORMATS and written.channels() == 3:
        cli.LOGGER.info('Python that prepares a photo for %s and runs it:', path)
        if options.embed_preprocessing:
            print(preparation.python_lines_for_photo(path))
        else:
            print(preparation.python_lines(written, path, to))
    if options.verify and options.embed_preprocessing:
        verification.verify_on_photos(loaded, written, path)
    elif options.verify and to == 'web':
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
      to: a key of weights.LAYOUTS, 'stablehlo', or 'web'; see convert_to_onnx for 'onnx'.
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
        export.save(written, path, to)
    return written


class HeldOut(NamedTuple):
    """Photos that measure a file in another dtype.

    Attributes:
      dataset: the section `dataset` of a config; its eval_split has the photos.
      max_loss: the largest loss of accuracy, in percentage points.
    """

    dataset: dict[str, Any]
    max_loss: float


def convert_to_onnx(
    loaded: weights.Weights,
    path: str,
    *,
    dtype: str | None = None,
    embeds_preprocessing: bool = False,
    held_out: HeldOut | None = None,
) -> weights.Weights:
    """Writes weights as an ONNX file, whose metadata include the description of the weights.

    Args:
      loaded: the weights.
      path: a file, which is replaced.
      dtype: 'float32', 'bfloat16', 'float16', 'int8', or None for the dtypes of `loaded`.
      embeds_preprocessing: whether the file takes a photo and returns probabilities.
      held_out: photos on which float16 and int8 are compared with float32; None to not compare.

    Returns:
      The weights with the dtype and description that were written; float32 for int8.

    Raises:
      UserError: if the accuracy falls by more than held_out.max_loss; nothing is written then.
    """
    if embeds_preprocessing:
        _check_classifies_photos(loaded)
    described = description.completed(loaded)
    written = described
    if dtype == 'int8':
        written = _with_dtype(described, 'float32')
    elif dtype:
        written = _with_dtype(described, dtype)
    has_float16 = any(x.dtype == jnp.float16 for x in jax.tree.leaves(written.params))
    if dtype == 'int8' or has_float16:
        program = _reduced_program(described, dtype or 'float16', held_out)
    else:
        program = export.onnx_program(written)
    if embeds_preprocessing:
        program = embedded.with_preparation(program, written)
    export.write_onnx(program, written, path)
    return written


def _check_classifies_photos(loaded):
    """Raises UserError for a model that gives no probabilities of photos."""
    description.check_rgb(loaded)
    if not loaded.num_classes:
        raise UserError(
            f'{loaded.source} has no head and therefore no probabilities: leave '
            '--embed_preprocessing out, or fine-tune first (configs/finetune.py).',
            kind='inapplicable',
            field='--embed_preprocessing',
            file=loaded.source,
        )


def _reduced_program(loaded, dtype, held_out):
    """The ONNX program in float16 or int8; UserError if it loses too much accuracy."""
    original = export.unrolled_onnx_program(_with_dtype(loaded, 'float32'))
    program = reduced.reduced(original, dtype)
    if held_out:
        _check_loss_of_accuracy(original, program, loaded, dtype, held_out)
    return program


def _check_loss_of_accuracy(original, program, loaded, dtype, held_out):
    """Logs the accuracies of two ONNX programs; UserError if the second one is too low."""
    from vit_jax.scoring import exported  # imports the training

    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ('original.onnx', 'reduced.onnx')]
        for path, measured in zip(paths, (original, program), strict=True):
            export.write_onnx(measured, loaded, path)
        (before, after), num_images = exported.accuracies(paths, loaded, held_out.dataset)
    loss = round(100 * (before - after), 6)  # a loss of exactly --max_loss is allowed
    result = (
        f'accuracy {100 * after:.2f} % in {dtype} and {100 * before:.2f} % in float32 on '
        f'{counted(num_images, "photo")} of {held_out.dataset["name"]}, '
        f'{held_out.dataset["eval_split"]}'
    )
    if loss > held_out.max_loss:
        raise UserError(
            f'{result}: --dtype={dtype} loses {loss:.2f} points, more than '
            f'--max_loss={held_out.max_loss:g}. Nothing is written. Use --dtype=float16 or '
            'float32, or allow a larger loss by --max_loss.',
            kind='inapplicable',
            field='--dtype',
            value=dtype,
        )
    cli.LOGGER.info('Measured %s', result)


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
      with_card: whether a model card is written.
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


def check_onnx_options(options: argparse.Namespace, to: str) -> None:
    """Raises UserError for options that are for ONNX files only, or that need each other."""
    is_onnx = to == 'onnx'
    if options.embed_preprocessing and not is_onnx:
        raise UserError(
            '--embed_preprocessing is for --to=onnx only: leave it out.',
            kind='inapplicable',
            field='--embed_preprocessing',
            value=to,
        )
    if options.dtype == 'int8' and not is_onnx:
        raise UserError(
            f'--dtype=int8 is for --to=onnx, and not for {to}: choose another dtype.',
            kind='inapplicable',
            field='--dtype',
            value='int8',
        )
    is_measurable = is_onnx and options.dtype in reduced.DTYPES
    for name in ('data', 'split', 'max_loss'):
        value = getattr(options, name)
        if value is not None and not is_measurable:
            raise UserError(
                f'--{name} is for --to=onnx with --dtype={" or ".join(reduced.DTYPES)}: leave it '
                'out.',
                kind='inapplicable',
                field=f'--{name}',
                value=value,
            )
    if options.max_loss is not None and not 0 <= options.max_loss <= 100:
        raise UserError(
            f'--max_loss is {options.max_loss}: expected percentage points from 0 to 100.',
            kind='value',
            field='--max_loss',
            value=options.max_loss,
        )
    if options.verify and options.dtype == 'int8':
        raise UserError(
            '--verify compares logits, which --dtype=int8 changes: leave --verify out. --data '
            'measures the accuracy.',
            kind='inapplicable',
            field='--verify',
            value='int8',
        )


def _held_out_photos(options):
    """The HeldOut photos that the options name, or None; UserError if int8 has none."""
    workdir = options.source if record.find(options.source) else None
    is_named = options.data is not None or options.split is not None
    if options.dtype != 'int8' and not is_named:
        return None
    if workdir is None and options.data is None:
        raise UserError(
            f'--dtype={options.dtype} loses accuracy, and {options.source} does not name photos '
            'to measure it: add --data=NAME_OR_DIR --split=SPLIT with photos that were not trained '
            'on.',
            kind='missing',
            field='--data',
        )
    if workdir is None and options.split is None:
        raise UserError(
            f'--data={options.data} needs its split: add --split=SPLIT, as of vit_jax.evaluate.',
            kind='missing',
            field='--split',
        )
    from vit_jax.scoring import split  # imports the training

    changes = {'name': options.data, 'eval_split': options.split}
    max_loss = DEFAULT_MAX_LOSS if options.max_loss is None else options.max_loss
    return HeldOut(split.dataset_of(workdir, changes), max_loss)


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


def _log_conversion(source, loaded, written, path, to, dtype):
    arrays = jax.tree.leaves(written.params)
    dtypes = sorted({str(x.dtype) for x in arrays})
    if dtype == 'int8':
        dtypes = ['int8']
    cli.LOGGER.info(
        'Converted %s (%s) to %s (%s): %s parameters, %s, %d classes',
        source,
        loaded.layout,
        path,
        to,
        f'{sum(x.size for x in arrays):,}',
        ' and '.join(dtypes),
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
