"""Classifies images, or writes their features, with a run or with weights of any layout.

    python -m vit_jax.predict --workdir=DIR IMAGE_OR_DIRECTORY...
    python -m vit_jax.predict --pretrained=WEIGHTS --csv=predictions.csv DIRECTORY
    python -m vit_jax.predict --pretrained=WEIGHTS --csv=FILE.csv --all_classes DIRECTORY
    python -m vit_jax.predict --pretrained=WEIGHTS --features=features.npz DIRECTORY
    python -m vit_jax.predict --workdir=DIR --unsure=FILE.csv DIRECTORY
    python -m vit_jax.predict --workdir=DIR --attention=DIR IMAGE_OR_DIRECTORY...

The preprocessing and the class names are recorded with the weights; --preprocess and --classes add
or replace them. The command leaves out unreadable images and logs their names. The exit code is 1
if the command line names an unreadable image itself, not only its directory. With --json the last
line of stdout is one JSON array. Weights trained with the sigmoid loss give an independent
probability for each class, and * marks the classes from 50 %. --unsure and --attention replace no
file.
"""

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from vit_jax import cli, machine, terminal
from vit_jax.data import images, table_cells
from vit_jax.drawing import photos as drawing
from vit_jax.errors import Inapplicable, UserError, check_at_least, counted, one_line
from vit_jax.files import check_destination, is_special, make_directory, named, writing
from vit_jax.fitting import unsure
from vit_jax.inspection import attention, maps
from vit_jax.training import device_defaults
from vit_jax.weights import Weights, build, description, fastest_model, predictor
from vit_jax.weights.apply import as_pixels

TITLE_WIDTH = 90  # characters in a line of the title of a picture


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
        '--unsure',
        metavar='FILE.csv',
        help='new table to write: the photos to label next, the least certain first',
    )
    parser.add_argument(
        '--attention',
        metavar='DIR',
        help='directory of pictures to write: each photo and its attention rollout',
    )
    parser.add_argument(
        '--batch_size', type=int, default=32, help='images computed together (default: 32)'
    )
    parser.add_argument(
        '--json', action='store_true', help='print one JSON array as the last line of stdout'
    )
    parser.add_argument('images', nargs='+', help='image files, or directories to search')
    options = parser.parse_args(argv)
    _refuse_equal_outputs(parser, options)
    if options.all_classes and not options.csv:
        parser.error('--all_classes applies to a table: add --csv=FILE.csv')
    predict(options)


def _refuse_equal_outputs(parser, options):
    """Ends the command if two options name the same file or directory."""
    for first, second in itertools.combinations(('csv', 'features', 'unsure', 'attention'), 2):
        path = getattr(options, first)
        if path and path == getattr(options, second):
            parser.error(f'--{first} and --{second} both name {path}: one would replace the other')


def predict(options: argparse.Namespace) -> None:
    """Prints or writes the predictions for the images that the options name.

    Raises:
      UserError: if an option or the weights cannot be used, or an image named on the command line
        cannot be read.
    """
    _check(options)
    paths = find_images(options.images)
    pictures = {}
    if options.attention:
        pictures = _new_pictures(options.attention, paths)
    batch_size = min(options.batch_size, len(paths))
    machine.use_cpu_as(device_defaults.devices_for_batch(batch_size))
    loaded = cli.read_weights(options)
    _check_model(options, loaded)
    if options.attention:
        make_directory(options.attention, '--attention')
    if _needs_classes(options) or options.attention:
        loaded = description.completed(loaded)
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
    if options.attention:
        captions = _captions(loaded, paths, probabilities)
        write_attention(loaded, {path: pictures[path] for path in paths}, captions)
    _check_all_read(options.images, paths)


def _needs_classes(options):
    """Whether an output needs the probabilities of classes."""
    is_printed = not (options.features or options.attention)
    return bool(options.csv or options.json or options.unsure or is_printed)


def _check(options):
    """Raises UserError now, not after the work, if an option cannot be used."""
    check_at_least('--top', options.top, 1)
    check_at_least('--batch_size', options.batch_size, 1)
    for path in (options.csv, options.features, options.unsure):
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
    for option, path in (('--csv', options.csv), ('--unsure', options.unsure)):
        if path and (images.is_image(path) or path in options.images):
            raise UserError(
                f'{option} is {path}, the name of an image that the table would replace: '
                f'expected the name of the table, as in {option}=FILE.csv',
                kind='value',
                field=option,
                value=path,
            )
    if options.unsure:
        _check_new_table(options.unsure)


def _check_new_table(path):
    """Raises UserError if --unsure would replace a table, which may contain labels by now."""
    if os.path.exists(path) and not is_special(path) and os.path.getsize(path):
        raise UserError(
            f'--unsure is {path}, a file that exists and may contain your labels: expected a new '
            'name. Choose another name, or rename the file.',
            kind='conflict',
            field='--unsure',
            file=path,
            value=path,
        )


def _check_model(options, loaded):
    """Raises UserError if the model cannot give what the options ask for."""
    if not loaded.num_classes and _needs_classes(options):
        raise UserError(
            f'{loaded.source} has no head and therefore no classes: use --features=FILE.npz '
            'alone, or fine-tune first (configs/finetune.py).',
            kind='inapplicable',
        )
    if options.unsure and loaded.num_classes == 1 and loaded.loss != 'sigmoid':
        raise UserError(
            f'--unsure compares the two most probable classes, and {loaded.source} has one class: '
            'expected weights of at least two classes. If it was trained with the sigmoid loss, '
            'add --loss=sigmoid.',
            kind='inapplicable',
            field='--unsure',
            value=options.unsure,
        )
    if options.attention:
        try:
            attention.check(fastest_model(loaded))
        except Inapplicable as error:
            raise UserError(
                f'--attention cannot be used with {loaded.source}: {error}. Choose weights of a '
                'Vision Transformer, or leave the option out.',
                kind='inapplicable',
                field='--attention',
                value=options.attention,
            ) from error


def _new_pictures(directory, paths):
    """Returns the picture of each photo, by the path of the photo.

    Raises:
      UserError: if a picture exists already.
    """
    pictures = {path: os.path.join(directory, name) for path, name in picture_names(paths).items()}
    existing = [picture for picture in pictures.values() if os.path.lexists(picture)]
    if existing:
        raise UserError(
            f'--attention is {directory}, which contains {len(existing)} of the '
            f'{len(pictures)} pictures already, first {existing[0]}: expected a new directory. '
            'Name another one, or remove these pictures.',
            kind='conflict',
            field='--attention',
            file=existing[0],
            value=directory,
        )
    return pictures


def picture_names(paths: Sequence[str]) -> dict[str, str]:
    """Returns the name of the picture of each photo, by the path of the photo.

    A name is the path of the photo from the folder that contains all photos, with .png in place of
    its ending. If this gives two photos the same name, all names keep the ending of the photo, as
    in photo.jpg.png. Two paths of one photo have the same picture.
    """
    absolute = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(path) for path in absolute])
    stems = {photo: os.path.splitext(photo)[0] for photo in absolute}
    if len(set(stems.values())) < len(stems):
        stems = {photo: photo for photo in stems}
    return {
        path: os.path.relpath(stems[photo], folder) + '.png'
        for path, photo in zip(paths, absolute, strict=True)
    }


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
    """Writes the class probabilities of images to --csv and --unsure, or prints the best classes.

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
    if options.unsure:
        is_multi_label = loaded.loss == 'sigmoid'
        photos = unsure.ranked(paths, probabilities, names, is_multi_label)
        unsure.write(options.unsure, photos, is_multi_label)
        cli.LOGGER.info('Wrote %s: %s', options.unsure, counted(len(photos), 'image'))
    if options.json:
        _print_json(loaded, paths, best_classes)
    elif not (options.csv or options.features or options.unsure or options.attention):
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


def attention_maps(
    loaded: Weights, paths: Sequence[str]
) -> Iterator[tuple[str, UInt8[np.ndarray, 'height width 3'], Float[np.ndarray, 'rows columns']]]:
    """Yields the path, the pixels that the model sees, and the attention rollout of each photo.

    It leaves out unreadable files with a warning.

    Args:
      loaded: the weights of a model with attention.
      paths: image files.
    """
    model = build(loaded)
    preprocess = description.complete_preprocess(loaded)
    observe = attention.observer(model.module)
    # One by one, because the attention weights of large models take gigabytes.
    for path, image in _load_images(paths, loaded.image_size(), preprocess):
        rollout = maps.rollout(observe(model.params, image[None]))
        yield path, as_pixels(image, preprocess), np.asarray(rollout[0])


def write_attention(
    loaded: Weights, pictures: Mapping[str, str], captions: Mapping[str, str]
) -> None:
    """Draws each photo beside its attention rollout, and logs the number of pictures.

    Args:
      loaded: the weights of a model with attention.
      pictures: the PNG file to write, by the path of the photo.
      captions: the second line of the title, by the path of the photo.

    Raises:
      UserError: if a picture cannot be written.
    """
    path_of_picture = {picture: path for path, picture in pictures.items()}
    number = 0
    for path, photo, rollout in attention_maps(loaded, list(path_of_picture.values())):
        picture = pictures[path]
        title = f'{_printed(path)[-TITLE_WIDTH:]}\n{captions[path]}'
        with named(picture):
            os.makedirs(os.path.dirname(picture), exist_ok=True)
        with writing(picture) as temporary:
            drawing.one_rollout(photo, rollout, title).savefig(temporary, format='png', dpi=100)
        number += 1
    cli.LOGGER.info('Wrote %s of attention', counted(number, 'picture'))


def _captions(loaded, paths, probabilities):
    """The most probable class and its probability, by path; '' if the model has no classes."""
    if probabilities is None:
        return dict.fromkeys(paths, '')
    names = description.class_names(loaded)
    captions = {}
    for path, row in zip(paths, probabilities, strict=True):
        best = row.argmax()
        captions[path] = f'{one_line(names[best])[:TITLE_WIDTH]}, {100 * row[best]:.2f} %'
    return captions


def _printed(path):
    """The path in one line, with escapes for bytes that are not UTF-8."""
    return one_line(os.fsencode(path).decode(errors='backslashreplace'))


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
        lines = [_printed(path)]
        for name, probability in classes:
            mark = ' '
            if loaded.loss == 'sigmoid' and probability >= 0.5:
                mark = '*'
            lines.append(f'{mark} {100 * probability:6.2f} %  {one_line(name)}')
        terminal.write('\n'.join(lines))


if __name__ == '__main__':
    cli.leave(main())
