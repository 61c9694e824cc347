r"""Fine-tuning against logistic regression on the same weights, scored on every photo of a set.

    python benchmarks/cross_validation.py DATA WEIGHTS OUT [--folds=N] [--against=OUT] \
        --config=configs/finetune.py:MODEL,directory [FLAG OF vit_jax.main...]

DATA holds SPLIT/CLASS/IMAGE; its splits are pooled and cut into folds, each with its share of every
class. For each fold vit_jax.main trains on the others, from WEIGHTS and with the flags given, and
vit_jax.predict names the photos of the fold. The regression is on what vit_jax.predict --features
writes; of several strengths the one that does best on the very photos that it is scored on, the
most that it could have got. --against compares with another OUT as well.
Started again with the same arguments and OUT, it goes on.
"""

import argparse
import csv
import glob
import math
import os
import shlex
import subprocess
import sys

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from vit_jax.data import table_cells

STRENGTHS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 1.0)  # C, the inverse of the regularisation


def label(path):
    """The class that the folder of a photo names."""
    return os.path.basename(os.path.dirname(path))


def call(module, *arguments):
    """Runs a command of vit_jax, whose log goes to stderr; stops where it does."""
    command = [sys.executable, '-m', f'vit_jax.{module}', *arguments]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f'stopped: {" ".join(command)}')


def link(paths, folder):
    """Links the photos as folder/CLASS/SPLIT_IMAGE, since names may repeat between splits."""
    for path in paths:
        split = os.path.basename(os.path.dirname(os.path.dirname(path)))
        target = os.path.join(folder, label(path), f'{split}_{os.path.basename(path)}')
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.islink(target):
            os.symlink(os.path.realpath(path), target)


def trained(train, test, weights, folder, flags):
    """Which photos of `test` a model trained on `train` names right, bool [len(test)]."""
    data, table = os.path.join(folder, 'data'), os.path.join(folder, 'predictions.csv')
    link(train, os.path.join(data, 'train'))
    link(test, os.path.join(data, 'test'))
    if not os.path.exists(table):
        workdir = os.path.join(folder, 'run')
        call(
            'main',
            *flags,
            f'--config.pretrained={weights}',
            f'--config.dataset.name={data}',
            '--config.dataset.train_split=train',
            '--config.dataset.eval_split=test',
            f'--workdir={workdir}',
        )
        call('predict', f'--workdir={workdir}', '--top=1', f'--csv={table}', f'{data}/test')
    with open(table, encoding='utf-8', newline='') as file:
        named = {
            os.path.realpath(table_cells.text_of(row['image'])): table_cells.text_of(row['class1'])
            for row in csv.DictReader(file)
        }
    return np.array([named[os.path.realpath(path)] == label(path) for path in test])


def best_regression(paths, folds, weights, data, file):
    """Which photos the best strength names right, fitted without them, bool [photos]."""
    if not os.path.exists(file):
        call('predict', f'--pretrained={weights}', f'--features={file}', data)
    with np.load(file) as saved:
        rows = dict(zip(saved['path'], saved['representation'], strict=True))
    features = np.stack([rows[path] for path in paths])
    labels = np.array([label(path) for path in paths])
    results = []
    for strength in STRENGTHS:
        right = np.zeros(len(paths), bool)
        for train, test in folds:
            regression = LogisticRegression(C=strength, max_iter=5000)
            regression.fit(features[train], labels[train])
            right[test] = regression.predict(features[test]) == labels[test]
        report(f'logistic regression, C={strength}', right)
        results.append(right)
    return max(results, key=np.sum)


def keep_command(command, file):
    """Writes what OUT is made with; stops when it was made with something else."""
    if os.path.exists(file):
        with open(file, encoding='utf-8') as opened:
            before = opened.read()
        if before != command:
            raise SystemExit(f'{file} says {before!r}, not {command!r}: take another OUT')
    with open(file, 'w', encoding='utf-8') as opened:
        opened.write(command)


def report(name, right):
    """Prints the share of photos named right."""
    print(f'{name:32s} {np.mean(right):7.2%}  ({np.sum(right)} of {len(right)})', flush=True)


def compare(other_name, right, other):
    """Prints the one-sided sign test on the photos that only one of the two names right."""
    gained, lost = int(np.sum(right & ~other)), int(np.sum(other & ~right))
    tail = sum(math.comb(gained + lost, k) for k in range(gained, gained + lost + 1))
    print(
        f'right only here: {gained}, only by {other_name}: {lost}; '
        f'one-sided sign test: p = {tail / 2 ** (gained + lost):.1g}'
    )


def main():
    """Runs what is missing; prints accuracies, and how they differ from those of others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ('data', 'weights', 'out'):
        parser.add_argument(name)
    parser.add_argument('--folds', type=int, default=5)
    parser.add_argument('--against', action='append', default=[], help='OUT of another run')
    options, flags = parser.parse_known_args()
    os.makedirs(options.out, exist_ok=True)
    keep_command(
        shlex.join([options.data, options.weights, str(options.folds), *flags]),
        os.path.join(options.out, 'command.txt'),
    )
    paths = np.array(sorted(glob.glob(os.path.join(options.data, '*', '*', '*'))))
    splitter = StratifiedKFold(options.folds, shuffle=True, random_state=0)
    folds = list(splitter.split(paths, [label(path) for path in paths]))

    simple = best_regression(
        paths, folds, options.weights, options.data, os.path.join(options.out, 'features.npz')
    )
    right = np.zeros(len(paths), bool)
    for fold, (train, test) in enumerate(folds):
        right[test] = trained(
            paths[train],
            paths[test],
            options.weights,
            os.path.join(options.out, f'fold{fold}'),
            flags,
        )
        report(f'fold {fold}, vit_jax.main', right[test])
        report(f'fold {fold}, best regression', simple[test])
    np.save(os.path.join(options.out, 'right.npy'), right)
    report('all photos, vit_jax.main', right)
    report('all photos, best regression', simple)
    compare('the regression', right, simple)
    for out in options.against:
        compare(out, right, np.load(os.path.join(out, 'right.npy')))


if __name__ == '__main__':
    main()
