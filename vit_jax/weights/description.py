"""What must be known of weights besides the arrays: how images are prepared, and names of classes.

Some layouts do not say it. Then the command line does, or, for the images, the defaults.
"""

import argparse
import dataclasses
import json
import logging
from collections.abc import Sequence

from vit_jax import config
from vit_jax.errors import UserError, check_choice
from vit_jax.weights import Weights

log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --preprocess and --classes, whose values `described` takes."""
    parser.add_argument('--preprocess', action='append', default=[], metavar='FIELD=VALUE',
                        help='of images, instead of what the weights say: resize=bicubic, '
                        'crop_ratio=0.9, mean=R,G,B or std=R,G,B; may be repeated')
    parser.add_argument('--classes', metavar='FILE', help='names of the classes, one per line or '
                        'as a JSON array, instead of those in the weights')


def described(loaded: Weights, preprocess: Sequence[str], classes: str | None) -> Weights:
    """The weights with what the command line says of them.

    Args:
      preprocess: see parse_preprocess.
      classes: a file with a name per line, or a JSON array.

    Raises:
      UserError: a field or value is impossible, or there are not as many names as classes.
    """
    if preprocess:
        loaded = dataclasses.replace(
            loaded, preprocess=(loaded.preprocess or {}) | parse_preprocess(preprocess))
    if classes:
        names = _read_names(classes)
        if len(names) != loaded.num_classes:
            raise UserError(f'--classes={classes} has {len(names)} names; {loaded.source} has '
                            f'{loaded.num_classes} classes.')
        loaded = dataclasses.replace(loaded, classes=names)
    return loaded


def check_rgb(loaded: Weights) -> None:
    """Raises UserError where the model takes other images than are read from files."""
    if loaded.channels() != 3:
        raise UserError(f'{loaded.source} takes images of {loaded.channels()} channels; image '
                        'files are read as the 3 of RGB.')


def complete_preprocess(loaded: Weights) -> dict:
    """All fields of `preprocess`; those that the weights do not say, by default, are logged."""
    fields, stated = dict(config.base().preprocess), loaded.preprocess or {}
    missing = sorted(fields.keys() - stated.keys())
    if missing:
        log.info('%s does not say %s of images: taken are %s. To change that, add --preprocess '
                 'FIELD=VALUE.', loaded.source, ', '.join(missing),
                 ' '.join(f'{name}={fields[name]}' for name in missing))
    return {name: stated.get(name, default) for name, default in fields.items()}


def parse_preprocess(given: list[str]) -> dict:
    """Values of `preprocess` from a command line; where a field is given twice, the last counts.

    Args:
      given: such as ['resize=bicubic', 'crop_ratio=0.9', 'mean=0.485,0.456,0.406'].

    Raises:
      UserError: a field is unknown or cannot have the value.
    """
    fields = {}
    for text in given:
        name, _, value = text.partition('=')
        check_choice('the field of --preprocess', name, tuple(config.base().preprocess))
        if name == 'resize':
            check_choice('preprocess.resize', value, config.CHOICES['preprocess.resize'])
            fields[name] = value
            continue
        try:
            numbers = tuple(float(x) for x in value.split(','))
        except ValueError:
            numbers = ()
        count = 1 if name == 'crop_ratio' else 3
        if (len(numbers) != count or not all(0 <= x <= 1 for x in numbers)
                or (name != 'mean' and 0 in numbers)):
            what = 'a number' if count == 1 else 'three numbers (red, green, blue)'
            least = 'from 0' if name == 'mean' else 'above 0 and up'
            raise UserError(f'--preprocess={text}: expected {what} {least} to 1, as in '
                            f'{name}={",".join(["0.5"] * count)}.')
        fields[name] = numbers if count == 3 else numbers[0]
    return fields


def _read_names(path):
    try:
        with open(path, encoding='utf-8') as file:
            text = file.read().strip()
    except (OSError, ValueError) as error:
        raise UserError(f'--classes={path} cannot be read: {error}') from error
    try:
        names = json.loads(text) if text.startswith(('[', '{')) else text.splitlines()
    except ValueError as error:
        raise UserError(f'--classes={path} is no JSON array: {error}') from error
    if not isinstance(names, list):
        raise UserError(f'--classes={path} is a JSON object: expected an array, or a name per '
                        'line, class 0 first.')
    return [str(name) for name in names]
