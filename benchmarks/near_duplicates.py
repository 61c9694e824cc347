"""Compares the frozen features of photos with those of crops and copies of themselves.

    python benchmarks/near_duplicates.py WEIGHTS FOLDER...

Each FOLDER has CLASS/photo files. The script prints percentiles of three cosine similarities of
each kind of change, and how many pairs of different photos of one class are as similar.
docs/lab-notes/near-duplicates.md explains and archives them.
"""

import argparse
import glob
import os
import random
import tempfile

import numpy as np
from PIL import Image, ImageOps

from vit_jax import weights as weights_lib
from vit_jax.fitting.extraction import BATCH, Extractor

NUM_PHOTOS = 260
NUM_CHANGED = 60
THRESHOLDS = (0.6, 0.65, 0.7, 0.75)
PERCENTILES = (5, 20, 50)


def crop(photo, area, rng):
    """A random part of a photo with a share of its area."""
    side = area**0.5
    left = rng.random() * (1 - side) * photo.width
    top = rng.random() * (1 - side) * photo.height
    return photo.crop((left, top, left + side * photo.width, top + side * photo.height))


CHANGES = {
    'crop of 80 %': (lambda photo, rng: crop(photo, 0.8, rng), 90),
    'crop of 60 %': (lambda photo, rng: crop(photo, 0.6, rng), 90),
    'JPEG of quality 50': (lambda photo, rng: photo, 50),
    'mirrored': (lambda photo, rng: ImageOps.mirror(photo), 90),
}


def cosines(a, b):
    """The cosine of each row of one array with the same row of another."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(axis=1) / np.maximum(lengths, 1e-12)


def compare(extract, folder):
    """Prints the similarities of one folder."""
    files = sorted(glob.glob(os.path.join(folder, '*', '*')))
    random.Random(0).shuffle(files)
    files = files[:NUM_PHOTOS]
    classes = np.array([os.path.basename(os.path.dirname(file)) for file in files])
    features = np.concatenate(list(extract.batches(files)))
    mean = features.mean(axis=0)
    class_means = np.stack([features[classes == name].mean(axis=0) for name in classes])
    changed = slice(NUM_CHANGED)
    print(f'{folder}: {len(files)} photos')
    for name, (change, quality) in CHANGES.items():
        copies = np.concatenate(list(extract.batches(changed_files(files, change, quality))))
        similarities = {
            'raw': cosines(copies, features[changed]),
            'all': cosines(copies - mean, features[changed] - mean),
            'class': cosines(
                copies - class_means[changed], features[changed] - class_means[changed]
            ),
        }
        texts = []
        for kind, values in similarities.items():
            numbers = ', '.join(f'{x:.2f}' for x in np.percentile(values, PERCENTILES))
            texts.append(f'{kind} {numbers}')
        print(f'  {name}: {"; ".join(texts)}')
    first, second = np.triu_indices(len(files), 1)
    is_same = classes[first] == classes[second]
    residuals = features - class_means
    of_pairs = cosines(residuals[first], residuals[second])[is_same]
    for threshold in THRESHOLDS:
        print(f'  pairs with class >= {threshold}: {(of_pairs >= threshold).sum()}')


def changed_files(files, change, quality):
    """Writes changed copies of the first photos, and returns their paths."""
    folder = tempfile.mkdtemp()
    paths = []
    for index, file in enumerate(files[:NUM_CHANGED]):
        photo = Image.open(file).convert('RGB')
        path = os.path.join(folder, f'{index}.jpg')
        change(photo, random.Random(index)).save(path, quality=quality)
        paths.append(path)
    return paths


def main():
    """Compares the photos of each folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('weights')
    parser.add_argument('folders', nargs='+', metavar='FOLDER')
    options = parser.parse_args()
    extract = Extractor(weights_lib.load(options.weights), BATCH)
    for folder in options.folders:
        compare(extract, folder)


if __name__ == '__main__':
    main()
