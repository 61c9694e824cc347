"""Converts weights from one layout to another, or to a program that runs without vit_jax.

    python -m vit_jax.convert SRC DST --to=LAYOUT [--verify] [--dtype=DTYPE] [--inexact]

SRC is a file, a directory, a workdir of this project or one of its checkpoints, hf:ORG/NAME or
timm:NAME; its layout is seen from its content.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

import jax
import numpy as np

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import description, export, files, peers
from vit_jax.workdir import logs

LARGEST_DIFFERENCE = 1e-4  # of logits


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 after an error that the last line explains."""
    options = parse(argv)
    logs.to_terminal()
    try:
        convert(**vars(options))
    except (UserError, OSError) as error:  # OSError: no such directory, a full disk
        logs.LOGGER.error('error: %s', error)
        return 1
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser('vit_jax.convert', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', metavar='SRC')
    parser.add_argument('path', metavar='DST')
    parser.add_argument('--to', required=True, choices=[*weights.LAYOUTS, *export.FORMATS],
                        help='layout of DST')
    parser.add_argument('--verify', action='store_true',
                        help='run SRC and DST on the same images and compare')
    parser.add_argument('--dtype', choices=['float32', 'float16', 'bfloat16'],
                        help='of the arrays in DST; those of SRC unless given')
    parser.add_argument('--inexact', action='store_true', help='allow another formula of GELU or '
                        'another epsilon where the layout does not have those of SRC')
    description.add_flags(parser)
    parser.add_argument('--overwrite', action='store_true', help='replace DST if it is there')
    return parser.parse_args(argv)


def convert(source: str, path: str, to: str, *, verify: bool = False, dtype: str | None = None,
            inexact: bool = False, overwrite: bool = False, preprocess: Sequence[str] = (),
            classes: str | None = None) -> None:
    """Does what the command does; the arguments are its flags.

    Raises:
      UserError: something cannot be read, written or held, or the two sides differ.
    """
    if (to == 'onnx') != path.endswith('.onnx'):
        raise UserError(f'{path!r} is no name for {to}: a name ending in .onnx is for --to=onnx, '
                        'and for that only.')
    if os.path.lexists(path) and not overwrite:
        raise UserError(f'{path} is there already: name another destination, or add --overwrite.')
    files.check_replaceable(path)
    loaded = description.described(weights.load(source), preprocess, classes)
    if to in ('huggingface', 'timm') and files.is_directory(path):  # they would take their own
        loaded = dataclasses.replace(loaded, preprocess={
            'image_size': loaded.image_size(), **description.complete_preprocess(loaded)})
    given = loaded
    if dtype:
        given = dataclasses.replace(given, params=jax.tree.map(lambda x: _cast(x, dtype),
                                                               given.params))
    if to in export.FORMATS:
        export.save(given, path, to)
    else:
        changed, lines = weights.approximate(given, path, to)
        if lines and inexact:
            given = changed
        elif lines and weights.misfits(changed, path, to) == []:
            raise UserError(
                f'layout {to} cannot hold this model exactly:\n  ' + '\n  '.join(lines) + '\nWith '
                '--inexact it is written nevertheless; --verify shows what that changes.')
        weights.save(given, path, to)
    sizes = [x.size for x in jax.tree.leaves(given.params)]
    dtypes = sorted({str(x.dtype) for x in jax.tree.leaves(given.params)})
    logs.LOGGER.info('%s (%s) -> %s (%s): %s parameters, %s, %d classes', source, loaded.layout,
                     path, to, f'{sum(sizes):,}', ' and '.join(dtypes), given.num_classes)
    if to != 'vit_jax' and not os.path.isdir(path):
        _log_what_is_lost(given, path)
    if verify:
        _verify(loaded, given, path, to)


def _log_what_is_lost(given, path):
    """Files of other programs hold arrays only."""
    height, width = given.image_size()
    lost = [f'{name}={value}' for name, value in (given.preprocess or {}).items()
            if name != 'image_size' or height != width]
    lost += ['the names of the classes'] * bool(given.classes)
    if lost:
        logs.LOGGER.info('not in %s, to be said where it is used: %s', path, ', '.join(lost))


def _cast(x, dtype):
    """Only numbers with a fraction."""
    return x.astype(jax.numpy.dtype(dtype)) if jax.numpy.issubdtype(
        x.dtype, jax.numpy.floating) else x


def _verify(loaded, given, path, to):
    """Compares what was written with `given`, and that with `loaded`, on random images."""
    shape = (2, *given.image_size(), given.channels())
    images = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    expected = _logits(given, images)
    try:
        run = export.run(path, to, images) if to in export.FORMATS else (
            peers.logits(given, path, to, images))
    except peers.CannotRunError as reason:
        run = _logits(weights.load(path), images), f'reading back, because {reason}'
    found, how = run
    if found.shape != expected.shape:
        raise UserError(f'{path} gives logits of shape {found.shape}, expected {expected.shape}.')
    difference = np.abs(found - expected).max()
    logs.LOGGER.info('verified by %s: largest difference of logits %.2g, largest logit %.2g', how,
                     difference, np.abs(expected).max())
    if given is not loaded:
        change = np.abs(expected - _logits(loaded, images)).max()
        how = '--dtype' if given.model == loaded.model else '--inexact, with --dtype if given,'
        logs.LOGGER.info('%s changed logits by up to %.2g', how, change)
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(f'{path} gives other logits than {loaded.source}: they differ by up to '
                        f'{difference:.2g}, at most {LARGEST_DIFFERENCE:g} was expected.')


def _logits(w, images):
    model = models.build(w.model, w.num_classes, dtype='float32')
    with jax.default_matmul_precision('highest'):
        return np.asarray(jax.jit(model.apply)({'params': w.params}, images))


if __name__ == '__main__':
    sys.exit(main())
