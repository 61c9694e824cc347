"""Classifies images, or writes their features, with a run or with weights of any layout.

    python -m vit_jax.predict --workdir=DIR IMAGE_OR_DIRECTORY...
    python -m vit_jax.predict --pretrained=WEIGHTS --csv=predictions.csv DIRECTORY
    python -m vit_jax.predict --pretrained=WEIGHTS --csv=FILE.csv --all_classes DIRECTORY
    python -m vit_jax.predict --pretrained=WEIGHTS --features=features.npz DIRECTORY

The preprocessing and the class names are recorded with the weights; --preprocess and --classes add
or replace them. The command leaves out unreadable images and logs their names. The exit code is 1
if the command line names an unreadable image itself, not only its directory. With --json the last
line of stdout is one JSON array. Weights trained with the sigmoid loss give an independent
probability for each class, and * marks the classes from 50 %.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax import cli, machine, terminal
from vit_jax.data import images, table_cells
from vit_jax.errors import UserError, check_at_least, counted, one_line
from vit_jax.files import check_destination, writing
from vit_jax.training import device_defaults
from vit_jax.weights import Weights, description, predictor


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0 on success, or 1 after an error that the last line of the log explains."""
    parser = cli.make_parser('predict', __doc__)
    cli.add_weights_options(parser)
    parser.add_argument(
        '--top', type=int, default=5, help='number of classes to show for an image (default: 5)'
    )
    parser.add_argument('--csv', help='table to write, with a row for each image')
    parser.add_argument(
        '--all_classes',
        action='store_true',
        help='with --csv: a column with the probability of each class, instead of the best classes',
    )
    parser.add_argument('--features', help='.npz file to write, with the representations')
    parser.add_argument(
        '--batch_size', type=int, default=32, help='images computed together (default: 32)'
    )
    parser.add_argument(
        '--json', action='store_true', help='print one JSON array as the last line of stdout'
    )
    parser.add_argument('images', nargs='+', help='image files, or directories to search')
    options = parser.parse_args(argv)
    if options.csv and options.csv == options.features:
        parser.error(f'--csv and --features both name {options.csv}: one would replace the other')
    if options.all_classes and not options.csv:
        parser.error('--all_classes applies to a table: add --csv=FILE.csv')
    predict(options)


def predict(options: argparse.Namespace) -> None:
    """Prints or writes the predictions for the images that the options name.

    Raises:
      UserError: if an option or the weights cannot be used, or an image named on the command line
        cannot be read.
    """
    _check(options)
    paths = find_images(options.images)
    batch_size = min(options.batch_size, len(paths))
    machine.use_cpu_as(device_defaults.devices_for_batch(batch_size))
    loaded = cli.read_weights(options)
    needs_classes = options.csv or options.json or not options.features
    if not loaded.num_classes and needs_classes:
        raise UserError(
            f'{loaded.source} has no head and therefore no classes: use --features=FILE.npz '
            'alone, or fine-tune first (configs/finetune.py).',
            kind='inapplicable',
        )
    paths, representations, probabilities = run(loaded, paths, options.batch_size)
    if probabilities is not None:
        report(options, loaded, paths, probabilities)
    if options.features:
        with writing(options.features) as temporary, open(temporary, 'wb') as file:
            np.savez(file, path=np.array(paths), representation=representations)
        cli.LOGGER.info(
            'Wrote %s: %s, %d features',
            options.features,
            counted(len(representations), 'image'),
            representations.shape[1],
        )
    _check_all_read(options.images, paths)


def _check(options):
    """Raises UserError now, not after the work, if an option cannot be used."""
    check_at_least('--top', options.top, 1)
    check_at_least('--batch_size', options.batch_size, 1)
    for path in (options.csv, options.features):
        if path:
            check_destination(path)
    if options.features and not options.features.endswith('.npz'):
        raise UserError(
            f'--features is {options.features}: expected a name that ends in .npz. Use --csv for '
            'a table of classes.',
            kind='value',
            field='--features',
            value=options.features,
        )
    if options.csv and (images.is_image(options.csv) or options.csv in options.images):
        raise UserError(
            f'--csv is {options.csv}, the name of an image that the table would replace: '
            'expected the name of the table, as in --csv=FILE.csv',
            kind='value',
            field='--csv',
            value=options.csv,
        )


def _check_all_read(arguments, read_paths):
    """Raises UserError if an image named on the command line is not among the paths read."""
    named = [path for path in arguments if not os.path.isdir(path)]
    unreadable = [path for path in named if path not in set(read_paths)]
    if unreadable:
        raise UserError(
            f'{len(unreadable)} of the {len(named)} images on the command line cannot be read: '
            f'{", ".join(unreadable)}. The other images are done.',
            kind='unreadable',
            file=unreadable[0],
        )


def find_images(arguments: list[str]) -> list[str]:
    """Returns the given files and, for directories, the sorted image files below them.

    It skips hidden files and directories.

    Raises:
      UserError: if there are no images below a directory, or a directory cannot be listed.
    """
    paths = []
    for path in arguments:
        if not os.path.isdir(path):
            paths.append(path)
            continue
        below = sorted(_images_below(path))
        if not below:
            raise UserError(f'there are no images below {path!r}.', kind='missing', file=path)
        paths += below
    return paths


def _images_below(directory, parents=()):
    """Yields the image files below a directory; follows links, except to one of the parents."""
    real_path = os.path.realpath(directory)
    if real_path in parents:
        return
    try:
        names = os.listdir(directory)
    except PermissionError as error:
        raise UserError(
            f'the folder {directory!r} cannot be listed ({error.strerror}): give this '
            'user the right to read and enter it, or name the other folders.',
            kind='unreadable',
            file=directory,
        ) from error
    for name in names:
        path = os.path.join(directory, name)
        if name.startswith('.'):
            continue
        if os.path.isdir(path):
            yield from _images_below(path, (*parents, real_path))
        elif images.is_image(name):
            yield path


def run(
    loaded: Weights, paths: list[str], batch_size: int
) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """Applies the model to images, and leaves out unreadable files with a warning.

    Args:
      loaded: the weights of the model.
      paths: image files.
      batch_size: images computed together.

    Returns:
      The paths of the readable images, representations [images, features] and class probabilities
      [images, classes], both float32. The probabilities are None without a head.

    Raises:
      UserError: if no image can be read, or a value is not finite.
    """
    description.check_rgb(loaded)
    size = loaded.image_size()
    preprocess = description.complete_preprocess(loaded)
    forward = predictor(loaded)
    read_paths: list[str] = []
    representations = []
    probabilities = []
    batch_size = min(batch_size, len(paths))
    for start in range(0, len(paths), batch_size):
        batch = list(_load_images(paths[start : start + batch_size], size, preprocess))
        if not batch:
            continue
        read_paths += [path for path, _ in batch]
        pixels = np.stack([image for _, image in batch])
        # The model is compiled for one batch size.
        padded = np.pad(pixels, ((0, batch_size - len(batch)), (0, 0), (0, 0), (0, 0)))
        batch_representations, batch_probabilities = forward(padded)
        representations.append(batch_representations[: len(batch)])
        if batch_probabilities is not None:
            probabilities.append(batch_probabilities[: len(batch)])
    if not read_paths:
        raise UserError(
            f'none of the {len(paths)} images can be read.', kind='unreadable', file=paths[0]
        )
    all_representations = np.concatenate(representations)
    all_probabilities = None
    if probabilities:
        all_probabilities = np.concatenate(probabilities)
    _check_finite(loaded, read_paths, all_representations, all_probabilities)
    return read_paths, all_representations, all_probabilities


def _check_finite(loaded, paths, representations, probabilities):
    """Raises UserError for NaN or infinity, which JSON cannot represent."""
    is_finite = np.isfinite(representations.reshape(len(paths), -1)).all(axis=1)
    if probabilities is not None:
        is_finite &= np.isfinite(probabilities).all(axis=1)
    if not is_finite.all():
        raise UserError(
            f'{loaded.source} gives values that are not finite for {np.sum(~is_finite)} of '
            f'{len(paths)} images, first for {paths[is_finite.argmin()]!r}. Nothing is written. '
            'The training of these weights diverged, or their file is damaged.',
            kind='content',
        )


def _load_images(paths, size, preprocess) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, prepared image) for each readable image."""
    for path in paths:
        try:
            yield path, images.load(path, size, preprocess)
        except UserError as error:
            cli.LOGGER.warning('Left out an image: %s', error)


def report(
    options: argparse.Namespace, loaded: Weights, paths: list[str], probabilities: np.ndarray
) -> None:
    """Writes the class probabilities of images to --csv, or prints the best classes.

    Args:
      options: the options of the command.
      loaded: the weights of the model.
      paths: the paths of the images.
      probabilities: [images, classes].
    """
    names = description.class_names(loaded)
    order = np.argsort(-probabilities, axis=-1, kind='stable')[:, : options.top]
    best_classes = [
        [(names[k], float(row[k])) for k in best]
        for row, best in zip(probabilities, order, strict=True)
    ]
    if options.csv:
        if options.all_classes:
            header = ['image', *description.unique_names(names)]
            rows = [[path, *row.tolist()] for path, row in zip(paths, probabilities, strict=True)]
        else:
            header, rows = _best_classes_table(paths, best_classes)
        with (
            writing(options.csv) as temporary,
            # surrogateescape: paths may contain any bytes
            open(temporary, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file,
        ):
            table_cells.write(file, header, rows)
        cli.LOGGER.info('Wrote %s: %s', options.csv, counted(len(paths), 'image'))
    if options.json:
        _print_json(loaded, paths, best_classes)
    elif not (options.csv or options.features):
        _print_lines(loaded, paths, best_classes)


def _best_classes_table(paths, best_classes):
    """Returns the header and the rows of a table of the best classes of each image."""
    header = ['image']
    for number in range(1, len(best_classes[0]) + 1):
        header += [f'class{number}', f'probability{number}']
    rows = []
    for path, classes in zip(paths, best_classes, strict=True):
        row = [path]
        for name, probability in classes:
            row += [name, probability]
        rows.append(row)
    return header, rows


def _print_json(loaded, paths, best_classes):
    """Prints one JSON array; with the activation softmax, probabilities of an image sum to one."""
    predictions = []
    for path, classes in zip(paths, best_classes, strict=True):
        predictions.append(
            {
                'image': path,
                'activation': loaded.loss or 'softmax',
                'classes': [{'class': name, 'probability': p} for name, p in classes],
            }
        )
    terminal.write(json.dumps(predictions))


def _print_lines(loaded, paths, best_classes):
    """Prints each image and its best classes; * marks independent classes from 50 %."""
    for path, classes in zip(paths, best_classes, strict=True):
        lines = [one_line(os.fsencode(path).decode(errors='backslashreplace'))]
        for name, probability in classes:
            mark = ' '
            if loaded.loss == 'sigmoid' and probability >= 0.5:
                mark = '*'
            lines.append(f'{mark} {100 * probability:6.2f} %  {one_line(name)}')
        terminal.write('\n'.join(lines))


if __name__ == '__main__':
    cli.leave(main())
