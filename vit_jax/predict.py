"""Names what is on images, with a workdir or with weights of any layout.

    python -m vit_jax.predict --workdir=DIR IMAGE_OR_DIRECTORY...
    python -m vit_jax.predict --pretrained=WEIGHTS --csv=predictions.csv DIRECTORY
    python -m vit_jax.predict --pretrained=WEIGHTS --features=features.npz DIRECTORY

Images are prepared as the weights say; what they do not say, --preprocess and --classes do. Images
of a directory that cannot be read are named and left out. With --json the last line of stdout is
one JSON array.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Collection

import jax
import numpy as np

from vit_jax import models, weights
from vit_jax.data import images
from vit_jax.errors import UserError
from vit_jax.weights import description
from vit_jax.workdir import logs


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 after an error that the last line explains."""
    options = parse(argv)
    logs.to_terminal()
    try:
        if options.top < 1:
            raise UserError(f'--top is {options.top}: expected at least 1.')
        for path in filter(None, (options.csv, options.features)):  # now, not after the work
            if not os.path.isdir(os.path.dirname(path) or '.'):
                raise UserError(f'{path} cannot be written: there is no directory '
                                f'{os.path.dirname(path)}.')
        paths = find_images(options.images)
        loaded = description.described(weights.load(options.workdir or options.pretrained),
                                       options.preprocess, options.classes)
        paths, representations, probabilities = run(loaded, paths, options.batch_size,
                                                    required=options.images)
        if options.features:
            save_features(options.features, paths, representations)
        if probabilities is None:
            if not options.features:
                raise UserError(f'{loaded.source} has no head and so no classes: ask for '
                                '--features=FILE.npz, or fine-tune first (configs/finetune.py).')
            return 0
        report(options, paths, top_classes(loaded, probabilities, options.top))
    except (UserError, OSError) as error:  # OSError: a table cannot be written
        logs.LOGGER.error('error: %s', error)
        return 1
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser('vit_jax.predict', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--workdir', help='of a run')
    source.add_argument('--pretrained', help='weights: file, directory, hf:ORG/NAME, timm:NAME')
    parser.add_argument('--top', type=int, default=5, help='classes per image')
    parser.add_argument('--csv', help='write a row per image to this file')
    parser.add_argument('--features', help='write the representations to this .npz file')
    parser.add_argument('--batch_size', type=int, default=32)
    parser.add_argument('--json', action='store_true')
    description.add_flags(parser)
    parser.add_argument('images', nargs='+', help='files, or directories that are searched')
    options = parser.parse_args(argv)
    if options.csv and options.csv == options.features:
        parser.error(f'--csv and --features both name {options.csv}: one would replace the other')
    return options


def find_images(given: list[str]) -> list[str]:
    """The files, and the image files below the directories, nothing hidden, in sorted order.

    Raises UserError when a directory has none.
    """
    paths = []
    for path in given:
        found = sorted(_images_below(path)) if os.path.isdir(path) else [path]
        if not found:
            raise UserError(f'there are no images below {path!r}.')
        paths += found
    return paths


def _images_below(directory):
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith('.')]
        yield from (os.path.join(folder, name) for name in names
                    if name.lower().endswith(images.SUFFIXES) and not name.startswith('.'))


def run(loaded: weights.Weights, paths: list[str], batch_size: int, required: Collection[str] = ()
        ) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """What the model makes of images.

    Args:
      required: paths that must be images; others are left out with a warning where they are none.

    Returns:
      The paths of those that could be read, representations [images, features] and class
      probabilities [images, classes], float32; without a head there are no probabilities: None.

    Raises:
      UserError: a required image, or none at all, can be read; the model takes no RGB images.
    """
    if batch_size < 1:
        raise UserError(f'--batch_size is {batch_size}: expected at least 1.')
    description.check_rgb(loaded)
    model = models.build(loaded.model, loaded.num_classes)
    size, preprocess = loaded.image_size(), description.complete_preprocess(loaded)
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), loaded.params)

    @jax.jit
    def forward(params, batch):
        logits, outputs = model.apply({'params': params}, batch, return_intermediates=True)
        return outputs['representation'], jax.nn.softmax(logits)

    params, results = jax.device_put(params), []
    batch_size, read = min(batch_size, len(paths)), []
    for start in range(0, len(paths), batch_size):
        part = _load_images(paths[start:start + batch_size], size, preprocess, required)
        if part:
            read += [path for path, _ in part]
            batch = np.stack([pixels for _, pixels in part])
            missing = batch_size - len(part)
            batch = np.pad(batch, ((0, missing), (0, 0), (0, 0), (0, 0)))  # compiled for one shape
            results.append([np.asarray(x)[:len(part)] for x in forward(params, batch)])
    if not read:
        raise UserError(f'none of the {len(paths)} images can be read.')
    representations, probabilities = map(np.concatenate, zip(*results, strict=True))
    return read, representations, probabilities if loaded.num_classes else None


def _load_images(paths, size, preprocess, required):
    """(path, pixels) of those that can be read."""
    result = []
    for path in paths:
        try:
            result.append((path, images.load(path, size, preprocess)))
        except UserError as error:
            if path in required:
                raise
            logs.LOGGER.warning('left out: %s', error)
    return result


def top_classes(loaded: weights.Weights, probabilities: np.ndarray, count: int
                ) -> list[list[tuple[str, float]]]:
    """The likeliest (class, probability) of each image, best first."""
    names = loaded.classes or [f'class {k}' for k in range(loaded.num_classes)]
    order = np.argsort(-probabilities, axis=-1, kind='stable')[:, :count]
    return [[(names[k], float(row[k])) for k in best]
            for row, best in zip(probabilities, order, strict=True)]


def save_features(path: str, paths: list[str], representations: np.ndarray) -> None:
    """Writes `path` [images] and `representation` float32 [images, features] to an .npz file."""
    with open(path, 'wb') as file:
        np.savez(file, path=np.array(paths), representation=representations)
    logs.LOGGER.info('wrote %s: %d images, %d features', path, *representations.shape)


def report(options: argparse.Namespace, paths: list[str], predictions: list) -> None:
    """Prints the predictions, or writes them to --csv."""
    if options.csv:
        with open(options.csv, 'w', newline='', encoding='utf-8') as file:
            writer = csv.writer(file)
            columns = range(1, len(predictions[0]) + 1)
            writer.writerow(['image', *(f'{what}{k}' for k in columns
                                        for what in ('class', 'probability'))])
            for path, best in zip(paths, predictions, strict=True):
                writer.writerow([path, *(x for pair in best for x in pair)])
        logs.LOGGER.info('wrote %s: %d images', options.csv, len(paths))
    if options.json:
        print(json.dumps([{'image': path, 'classes': [{'class': name, 'probability': p}
                                                      for name, p in best]}
                          for path, best in zip(paths, predictions, strict=True)]))
    elif not (options.csv or options.features):
        for path, best in zip(paths, predictions, strict=True):
            print(path)
            for name, p in best:
                print(f'  {100 * p:6.2f} %  {name}')


if __name__ == '__main__':
    sys.exit(main())
