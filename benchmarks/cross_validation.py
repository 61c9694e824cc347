r"""Compares fine-tuning with logistic regression on the same weights, by cross-validation.

    python benchmarks/cross_validation.py DATA WEIGHTS OUT [--folds=N] [--against=OUT] \
        --config=configs/finetune.py:MODEL,directory [FLAG OF vit_jax.main...]

DATA contains SPLIT/CLASS/IMAGE. The splits are pooled and divided into folds, stratified by class.
For each fold vit_jax.main trains on the other folds, from WEIGHTS and with the given flags, and
vit_jax.predict classifies the photos of the fold. The regression uses the features from
vit_jax.predict --features. Its strength is the best one on the photos that score it, so its
accuracy is an upper bound. --against adds a comparison with another OUT. The same command with the
same OUT resumes an interrupted run.
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
    """Returns the class of a photo, the name of its folder."""
    return os.path.basename(os.path.dirname(path))


def call(module, *arguments):
    """Runs a command of vit_jax, with its log on stderr; exits if it fails."""
    command = [sys.executable, '-m', f'vit_jax.{module}', *arguments]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f'The command failed: {" ".join(command)}')


def link(paths, folder):
    """Links photos as folder/CLASS/SPLIT_IMAGE, because two splits may have the same names."""
    for path in paths:
        split = os.path.basename(os.path.dirname(os.path.dirname(path)))
        target = os.path.join(folder, label(path), f'{split}_{os.path.basename(path)}')
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.islink(target):
            os.symlink(os.path.realpath(path), target)


def fine_tuned(train, test, weights, folder, flags):
    """Fine-tunes on `train` and classifies `test`; returns bool [len(test)], True if correct."""
    data = os.path.join(folder, 'data')
    table = os.path.join(folder, 'predictions.csv')
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
    predictions = {}
    with open(table, encoding='utf-8', newline='') as file:
        for row in csv.DictReader(file):
            path = os.path.realpath(table_cells.text_of(row['image']))
            predictions[path] = table_cells.text_of(row['class1'])
    return np.array([predictions[os.path.realpath(path)] == label(path) for path in test])


def best_regression(paths, folds, weights, data, file):
    """Cross-validates all strengths; returns bool [photos] of the best, True if correct."""
    if not os.path.exists(file):
        call('predict', f'--pretrained={weights}', f'--features={file}', data)
    with np.load(file) as saved:
        rows = dict(zip(saved['path'], saved['representation'], strict=True))
    features = np.stack([rows[path] for path in paths])
    labels = np.array([label(path) for path in paths])
    results = []
    for strength in STRENGTHS:
        correct = np.zeros(len(paths), bool)
        for train, test in folds:
            regression = LogisticRegression(C=strength, max_iter=5000)
            regression.fit(features[train], labels[train])
            correct[test] = regression.predict(features[test]) == labels[test]
        report(f'logistic regression, C={strength}', correct)
        results.append(correct)
    return max(results, key=np.sum)


def keep_command(command, file):
    """Writes the arguments of OUT; exits if OUT exists with other arguments."""
    if os.path.exists(file):
        with open(file, encoding='utf-8') as opened:
            recorded = opened.read()
        if recorded != command:
            raise SystemExit(f'{file} contains {recorded!r}, not {command!r}. Use another OUT.')
    with open(file, 'w', encoding='utf-8') as opened:
        opened.write(command)


def report(name, correct):
    """Prints an accuracy."""
    print(f'{name:32s} {np.mean(correct):7.2%}  ({np.sum(correct)} of {len(correct)})', flush=True)


def compare(other_name, correct, other_correct):
    """Prints a one-sided sign test on the photos that only one of two methods classifies right."""
    gained = int(np.sum(correct & ~other_correct))
    lost = int(np.sum(other_correct & ~correct))
    tail = sum(math.comb(gained + lost, k) for k in range(gained, gained + lost + 1))
    print(
        f'correct only here: {gained}, only by {other_name}: {lost}; '
        f'one-sided sign test: p = {tail / 2 ** (gained + lost):.1g}'
    )


def main():
    """Runs the missing folds, and prints accuracies and comparisons."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ('data', 'weights', 'out'):
        parser.add_argument(name)
    parser.add_argument('--folds', type=int, default=5, help='number of folds')
    parser.add_argument(
        '--against', action='append', default=[], help='OUT of a run to compare with'
    )
    options, flags = parser.parse_known_args()
    os.makedirs(options.out, exist_ok=True)
    keep_command(
        shlex.join([options.data, options.weights, str(options.folds), *flags]),
        os.path.join(options.out, 'command.txt'),
    )
    paths = np.array(sorted(glob.glob(os.path.join(options.data, '*', '*', '*'))))
    splitter = StratifiedKFold(options.folds, shuffle=True, random_state=0)
    folds = list(splitter.split(paths, [label(path) for path in paths]))

    features = os.path.join(options.out, 'features.npz')
    regression_correct = best_regression(paths, folds, options.weights, options.data, features)
    correct = np.zeros(len(paths), bool)
    for fold, (train, test) in enumerate(folds):
        folder = os.path.join(options.out, f'fold{fold}')
        correct[test] = fine_tuned(paths[train], paths[test], options.weights, folder, flags)
        report(f'fold {fold}, vit_jax.main', correct[test])
        report(f'fold {fold}, best regression', regression_correct[test])
    np.save(os.path.join(options.out, 'right.npy'), correct)
    report('all photos, vit_jax.main', correct)
    report('all photos, best regression', regression_correct)
    compare('the regression', correct, regression_correct)
    for out in options.against:
        compare(out, correct, np.load(os.path.join(out, 'right.npy')))


if __name__ == '__main__':
    main()
