r"""Compares `vit_jax.fit` with eight settings that are tried by hand, on small sets of photos.

    python benchmarks/own_photos.py make OUT --cifar10=DIR
    python benchmarks/own_photos.py fit DATA WEIGHTS OUT [--minutes=N]
    python benchmarks/own_photos.py hand DATA WEIGHTS OUT [--epochs=N]
    python benchmarks/own_photos.py table OUT...
    python benchmarks/own_photos.py suspects OUT

`make` writes three sets: `digits` (scikit-learn's handwritten digits as PNG files), `cifar10` (50
to 500 training photos of each class of CIFAR-10, and 100 test photos; DIR is CIFAR-10 as
SPLIT/CLASS/IMAGE) and `two_digits` (pictures of two digits, each with two labels in a table).
`fit` runs `vit_jax.fit`. `hand` trains the eight settings from the same WEIGHTS, on the splits that
`fit` uses, and scores them on its test split. `table` prints both. `suspects` changes 5 % of the
training labels of the fit in OUT, ranks all labels, and prints the share of the changed ones among
the first tenth. A command that is stopped resumes when it is repeated.
"""

import argparse
import csv
import glob
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
from PIL import Image
from sklearn import datasets

from vit_jax.data import grouped_split
from vit_jax.fitting import duplicates, probe, suspects

RATES = (0.001, 0.003, 0.01, 0.03)
AUGMENTATION = {
    'augment.randaugment.num_ops': 2,
    'augment.randaugment.magnitude': 10,
    'augment.mixup': 0.2,
}
BATCH_SIZE = 32
RARE, FREQUENT = 50, 500  # training photos of the rarest and of the most frequent class
NUM_PAIRS = 1500  # pictures of two digits
CHANGED = 0.05  # share of the training labels that are changed


def main():
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True)
    make = commands.add_parser('make')
    make.add_argument('out')
    make.add_argument('--cifar10', required=True)
    for name in ('fit', 'hand'):
        command = commands.add_parser(name)
        command.add_argument('data')
        command.add_argument('weights')
        command.add_argument('out')
    commands.choices['fit'].add_argument('--minutes', default='30')
    commands.choices['hand'].add_argument('--epochs', type=float, default=8.0)
    table = commands.add_parser('table')
    table.add_argument('outs', nargs='+', metavar='OUT')
    commands.add_parser('suspects').add_argument('out')
    options = parser.parse_args()
    if options.command == 'make':
        make_digits(os.path.join(options.out, 'digits'))
        make_cifar10(options.cifar10, os.path.join(options.out, 'cifar10'))
        make_two_digits(os.path.join(options.out, 'two_digits'))
    elif options.command == 'fit':
        fit(options.data, options.weights, options.out, options.minutes)
    elif options.command == 'hand':
        train_by_hand(options.weights, options.out, options.epochs)
    elif options.command == 'suspects':
        find_changed_labels(options.out)
    else:
        for out in options.outs:
            print_table(out)


def make_digits(folder):
    """Writes the digits as PNG files, without splits."""
    digits = datasets.load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = os.path.join(folder, str(label), f'{index:04d}.png')
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _as_picture(image).resize((64, 64), Image.Resampling.NEAREST).save(path)


def _as_picture(image):
    """A digit of values from 0 to 16 as a grey picture."""
    return Image.fromarray((image * 255 / 16).astype(np.uint8))


def make_cifar10(source, folder):
    """Copies 50 to 500 training photos and 100 test photos of each class."""
    class_names = sorted(os.listdir(os.path.join(source, 'train')))
    counts = np.geomspace(RARE, FREQUENT, len(class_names)).round().astype(int)
    for name, count in zip(class_names, counts, strict=True):
        for split, number in (('train', count), ('test', 100)):
            target = os.path.join(folder, split, name)
            os.makedirs(target, exist_ok=True)
            photos = sorted(glob.glob(os.path.join(source, split, name, '*.jpg')))
            for photo in photos[:number]:
                shutil.copy(photo, target)


def make_two_digits(folder):
    """Writes pictures of two digits, and photos.csv with the labels of each."""
    digits = datasets.load_digits()
    rng = np.random.default_rng(0)
    os.makedirs(folder, exist_ok=True)
    rows = []
    for index in range(NUM_PAIRS):
        chosen = rng.choice(len(digits.images), 2, replace=False)
        name = f'{index:04d}.png'
        both = np.concatenate([digits.images[k] for k in chosen], axis=1)
        picture = _as_picture(np.pad(both, ((4, 4), (0, 0))))
        picture.resize((64, 64), Image.Resampling.NEAREST).save(os.path.join(folder, name))
        labels = sorted({str(digits.target[k]) for k in chosen})
        rows.append((name, ';'.join(labels)))
    with open(os.path.join(folder, 'photos.csv'), 'w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(('file', 'labels'))
        writer.writerows(rows)


def call(module, *arguments):
    """Runs a command of vit_jax and returns its stdout; exits if it fails."""
    command = [sys.executable, '-m', f'vit_jax.{module}', *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(f'The command failed: {" ".join(command)}')
    return result.stdout


def fit(data, weights, out, minutes):
    """Runs `vit_jax.fit`, and records how long it takes."""
    begin = time.monotonic()
    call('fit', data, f'--pretrained={weights}', f'--minutes={minutes}', f'--workdir={out}/fit')
    path = os.path.join(out, 'seconds.json')
    with open(path, 'w') as file:
        json.dump({'seconds': time.monotonic() - begin, 'minutes': float(minutes)}, file)


def settings():
    """The eight settings: (name, learning rate, fields that augment)."""
    plain = [(f'lr={rate}', rate, {}) for rate in RATES]
    augmented = [(f'lr={rate}, augmented', rate, AUGMENTATION) for rate in RATES]
    return plain + augmented


def train_by_hand(weights, out, epochs):
    """Trains each setting on the splits of the fit, and scores it on the test split."""
    table = os.path.join(out, 'fit', 'photos.csv')
    with open(table, newline='') as file:
        rows = list(csv.DictReader(file))
    num_train = sum(row['split'] == 'train' for row in rows)
    is_multi_label = 'labels' in rows[0]
    num_steps = max(20, round(epochs * num_train / BATCH_SIZE))
    for name, rate, augmentation in settings():
        workdir = os.path.join(out, 'hand', name.replace(', ', '_'))
        result = os.path.join(workdir, 'test.json')
        if os.path.exists(result):
            continue
        fields = {
            'pretrained': weights,
            'dataset.name': table,
            'dataset.train_split': 'train',
            'dataset.eval_split': 'val',
            'image_size': 224,
            'batch_size': BATCH_SIZE,
            'num_steps': num_steps,
            'optimizer.warmup_steps': num_steps // 10,
            'optimizer.learning_rate': rate,
            'loss.name': 'sigmoid' if is_multi_label else 'softmax',
            'eval_every': num_steps // 4,
            'checkpoint_every': num_steps // 4,
            'report': False,
            **augmentation,
        }
        call(
            'main',
            '--config=configs/finetune.py:ti16,directory',
            f'--workdir={workdir}',
            *(f'--config.{field}={value}' for field, value in fields.items()),
        )
        scores = call('evaluate', f'--workdir={workdir}', '--split=test', '--json').splitlines()[-1]
        with open(result, 'w') as file:
            file.write(scores)


def print_table(out):
    """Prints the held-out scores of the fit and of the eight settings."""
    with open(os.path.join(out, 'fit', 'fit.json')) as file:
        outcome = json.load(file)['outcome']
    with open(os.path.join(out, 'seconds.json')) as file:
        minutes = json.load(file)['seconds'] / 60
    print(f'{os.path.basename(os.path.abspath(out))}: {outcome["num_images"]} held-out photos')
    is_multi_label = outcome['mean_average_precision'] is not None
    score = outcome['mean_average_precision'] if is_multi_label else outcome['accuracy']
    smallest = min(outcome['classes'], key=lambda row: row[2])
    print(
        f'  fit, {minutes:.1f} minutes: {score:.2%}, smallest class {smallest[0]} '
        f'{smallest[1]:.2%}, calibration error {outcome["calibration_error"]:.2%}'
    )
    for name, *_ in settings():
        path = os.path.join(out, 'hand', name.replace(', ', '_'), 'test.json')
        with open(path) as file:
            scores = json.load(file)
        score = scores['mean_average_precision'] if is_multi_label else scores['accuracy']
        recall = scores['classes'][smallest[0]]
        print(f'  {name}: {score:.2%}, {smallest[0]} {recall}')


def find_changed_labels(out):
    """Changes training labels with three seeds, and looks for them among the suspects."""
    features = np.load(os.path.join(out, 'fit', 'features.npz'))['features']
    with open(os.path.join(out, 'fit', 'photos.csv'), newline='') as file:
        rows = list(csv.DictReader(file))
    names, labels = np.unique([row['label'] for row in rows], return_inverse=True)
    train = np.flatnonzero([row['split'] == 'train' for row in rows])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        changed = rng.choice(train, round(CHANGED * len(train)), replace=False)
        given = labels.copy()
        given[changed] += rng.integers(1, len(names), len(changed))
        targets = np.eye(len(names), dtype=bool)[given % len(names)]
        first = rank(features, targets, names)[: len(rows) // 10]
        print(f'seed {seed}: {np.isin(changed, first).mean():.1%} of {len(changed)}')


def rank(features, targets, names):
    """The indices of photos, the most doubtful label first, as `vit_jax.fit` ranks them."""
    pairs = duplicates.near_pairs(features, targets)
    groups = duplicates.groups_of_pairs(len(features), [pair[:2] for pair in pairs])
    folds = grouped_split.cut(targets, groups, [1 / suspects.FOLDS] * suspects.FOLDS)

    def classify(train, train_targets, queries):
        head = probe.fit(train, train_targets, probe.STRENGTH, False, False)
        return probe.probabilities(head.logits(queries), False)

    values = suspects.out_of_fold(features, targets, folds, classify)
    files = [str(k) for k in range(len(features))]
    return [int(suspect.file) for suspect in suspects.ranked(files, targets, values, names)]


if __name__ == '__main__':
    main()
