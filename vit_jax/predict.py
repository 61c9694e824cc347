"""Classifies images, or writes their features, with a workdir or with weights of any layout.

    python -m vit_jax.predict --workdir=DIR IMAGE_OR_DIRECTORY...
    python -m vit_jax.predict --pretrained=WEIGHTS --csv=predictions.csv DIRECTORY
    python -m vit_jax.predict --pretrained=WEIGHTS --csv=FILE.csv --all_classes DIRECTORY
    python -m vit_jax.predict --pretrained=WEIGHTS --features=features.npz DIRECTORY

Images are prepared as the weights say; --preprocess and --classes add what they do not say. Images
that cannot be read are named and left out; if they were named one by one, and not by a directory,
the exit code is 1. With --json the last line of stdout is one JSON array. Where the weights were
trained with the loss sigmoid, each class has a probability of its own: * marks those from 50 % on.
"""

import argparse
import itertools
import json
import os
from collections.abc import Iterable, Sequence

import numpy as np

from vit_jax import cli, machine, terminal
from vit_jax.data import images, table_cells
from vit_jax.errors import UserError, check_at_least, counted, one_line
from vit_jax.files import check_destination, writing
from vit_jax.training import device_defaults
from vit_jax.weights import Weights, description, predictor


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    parser = cli.make_parser('predict', __doc__)
    cli.add_weights_options(parser)
    parser.add_argument('--top', type=int, default=5, help='classes per image')
    parser.add_argument('--csv', help='write a row per image to this file')
    parser.add_argument(
        '--all_classes',
        '--all-classes',
        action='store_true',
        help='with --csv: a column for the probability of each class, instead of the --top best',
    )
    parser.add_argument('--features', help='write the representations to this .npz file')
    parser.add_argument('--batch_size', type=int, default=32)
    parser.add_argument('--json', action='store_true')
    parser.add_argument('images', nargs='+', help='files, or directories that are searched')
    options = parser.parse_args(argv)
    if options.csv and options.csv == options.features:
        parser.error(f'--csv and --features both name {options.csv}: one would replace the other')
    if options.all_classes and not options.csv:
        parser.error('--all_classes is for a table: add --csv=FILE.csv')
    predict(options)


def predict(options: argparse.Namespace) -> None:
    """Prints or writes the predictions for the images that the options name."""
    check_at_least('--top', options.top, 1)
    check_at_least('--batch_size', options.batch_size, 1)
    for path in filter(None, (options.csv, options.features)):  # now, not after the work
        check_destination(path)
    if options.features and not options.features.endswith('.npz'):
        raise UserError(
            f'--features={options.features}: representations are written as .npz '
            'files; expected a name that ends so. A table of classes is --csv.'
        )
    if options.csv and (images.is_image(options.csv) or options.csv in options.images):
        raise UserError(
            f'--csv={options.csv} names an image, which the table would replace: '
            'expected the name of the table, as in --csv=FILE.csv'
        )
    paths = find_images(options.images)
    machine.use_cpu_as(device_defaults.devices_for_batch(min(options.batch_size, len(paths))))
    loaded = cli.read_weights(options)
    if not loaded.num_classes and (options.csv or options.json or not options.features):
        raise UserError(
            f'{loaded.source} has no head and therefore no classes: ask for '
            '--features=FILE.npz alone, or fine-tune first (configs/finetune.py).'
        )
    named = [path for path in options.images if not os.path.isdir(path)]
    paths, representations, probabilities = run(loaded, paths, options.batch_size)
    if probabilities is not None:
        report(options, loaded, paths, probabilities)
    if options.features:
        with writing(options.features) as temporary, open(temporary, 'wb') as file:
            np.savez(file, path=np.array(paths), representation=representations)
        cli.LOGGER.info(
            'wrote %s: %s, %d features',
            options.features,
            counted(len(representations), 'image'),
            representations.shape[1],
        )
    done = set(paths)
    if missing := [path for path in named if path not in done]:
        raise UserError(
            f'{len(missing)} of the {len(named)} images named cannot be read: '
            f'{", ".join(missing)}. The others are done.'
        )


def find_images(given: list[str]) -> list[str]:
    """The files, and the sorted image files below the directories, hidden ones left out."""
    paths = []
    for path in given:
        found = sorted(_images_below(path)) if os.path.isdir(path) else [path]
        if not found:
            raise UserError(f'there are no images below {path!r}.')
        paths += found
    return paths


def _images_below(directory, above=()):
    """Also in folders that are links, but not again in one that leads to where it is itself."""
    if (real := os.path.realpath(directory)) in above:
        return
    try:
        names = os.listdir(directory)
    except PermissionError as error:
        raise UserError(
            f'the folder {directory!r} cannot be listed ({error.strerror}): give this '
            'user the right to read and enter it, or name the others.'
        ) from error
    for name in names:
        path = os.path.join(directory, name)
        if name.startswith('.'):
            continue
        if os.path.isdir(path):
            yield from _images_below(path, (*above, real))
        elif images.is_image(name):
            yield path


def run(
    loaded: Weights, paths: list[str], batch_size: int
) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """Applies the model to images; other files are left out with a warning.

    Returns the paths of those that could be read, representations [images, features] and class
    probabilities [images, classes], float32; None instead of probabilities without a head. Raises
    UserError if a value is not finite, or no image can be read.
    """
    description.check_rgb(loaded)
    size, preprocess = loaded.image_size(), description.complete_preprocess(loaded)
    forward = predictor(loaded)
    read, features, classes = [], [], []  # of all batches
    batch_size = min(batch_size, len(paths))
    for start in range(0, len(paths), batch_size):
        found = list(_load_images(paths[start : start + batch_size], size, preprocess))
        if found:
            read += [path for path, _ in found]
            batch = np.stack([pixels for _, pixels in found])
            missing = batch_size - len(found)
            batch = np.pad(batch, ((0, missing), (0, 0), (0, 0), (0, 0)))  # compiled for one shape
            representations, probabilities = forward(batch)
            features.append(representations[: len(found)])
            if probabilities is not None:
                classes.append(probabilities[: len(found)])
    if not read:
        raise UserError(f'none of the {len(paths)} images can be read.')
    outputs = np.concatenate(features), np.concatenate(classes) if classes else None
    _check_finite(loaded, read, outputs)
    return read, *outputs


def _check_finite(loaded, paths, outputs):
    """Raises UserError for NaN, which is no prediction, and which JSON does not have."""
    finite = np.all(
        [np.isfinite(x.reshape(len(paths), -1)).all(-1) for x in outputs if x is not None], axis=0
    )
    if not finite.all():
        raise UserError(
            f'{loaded.source} gives values that are not finite for '
            f'{np.sum(~finite)} of {len(paths)} images, {paths[finite.argmin()]!r} the '
            'first: nothing is written. Its training diverged, or it is damaged.'
        )


def _load_images(paths, size, preprocess):
    """Yields (path, pixels) of those that can be read."""
    for path in paths:
        try:
            yield path, images.load(path, size, preprocess)
        except UserError as error:
            cli.LOGGER.warning('left out: %s', error)


def report(
    options: argparse.Namespace, loaded: Weights, paths: list[str], probabilities: np.ndarray
) -> None:
    """Prints the most probable classes of each image, best first, or writes them to --csv.

    JSON says with `activation` whether the probabilities of an image sum to one.
    """
    names = description.class_names(loaded)
    order = np.argsort(-probabilities, axis=-1, kind='stable')[:, : options.top]
    predictions = [
        (path, [(names[k], float(row[k])) for k in best])
        for path, row, best in zip(paths, probabilities, order, strict=True)
    ]
    if options.csv:
        if options.all_classes:
            header = ['image', *description.unique_names(names)]
            rows: Iterable[Sequence[str | float]] = (
                [path, *map(float, row)] for path, row in zip(paths, probabilities, strict=True)
            )
        else:
            header = ['image']
            for number in range(1, order.shape[1] + 1):
                header += [f'class{number}', f'probability{number}']
            rows = ([path, *itertools.chain(*best)] for path, best in predictions)
        with (
            writing(options.csv) as temporary,
            open(temporary, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file,
        ):  # paths may be of any bytes
            table_cells.write(file, header, rows)
        cli.LOGGER.info('wrote %s: %s', options.csv, counted(len(paths), 'image'))
    if options.json:
        terminal.write(
            json.dumps(
                [
                    {
                        'image': path,
                        'activation': loaded.loss or 'softmax',
                        'classes': [{'class': name, 'probability': p} for name, p in best],
                    }
                    for path, best in predictions
                ]
            )
        )
    elif not (options.csv or options.features):
        for path, best in predictions:
            lines = [one_line(os.fsencode(path).decode(errors='backslashreplace'))]
            for name, p in best:
                mark = '*' if loaded.loss == 'sigmoid' and p >= 0.5 else ' '
                lines.append(f'{mark} {100 * p:6.2f} %  {one_line(name)}')
            terminal.write('\n'.join(lines))


if __name__ == '__main__':
    cli.leave(main())
