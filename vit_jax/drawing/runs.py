"""Figures of several runs, and of the speed of several models."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.drawing import canvas
from vit_jax.drawing.canvas import Arrays

FAMILIES = {'ViT': ('C0', 'o'), 'hybrid': ('C2', 'D'), 'ResNet': ('C7', 's')}


def compute(arrays: Arrays, title: str) -> Any:
    """Accuracy against pre-training compute, a line for each run (figure 5)."""
    figure, (axes,) = canvas.charts(1, f'{title}accuracy against pre-training compute')
    labels = labels_of_runs(arrays)
    for run in _unique(arrays['run']):
        own = _rows(arrays, arrays['run'] == run)
        colour, marker = FAMILIES[own['family'][0]]
        x, y = own['flops'], 100 * own['accuracy']
        axes.plot(x, y, '-', color=colour, alpha=0.35, linewidth=1)
        axes.plot(x[-1:], y[-1:], marker, color=colour)
        axes.annotate(
            labels[run],
            (x[-1], y[-1]),
            xytext=(6, -3),
            fontsize=8,
            textcoords='offset points',
            parse_math=False,
        )
    for family in _unique(arrays['family']):
        axes.plot([], [], FAMILIES[family][1], color=FAMILIES[family][0], label=family)
    axes.set(xscale='log', xlabel='pre-training compute (FLOPs)', ylabel='accuracy (%)')
    canvas.legend(figure, axes)
    return figure


def data_size(arrays: Arrays, title: str) -> Any:
    """Final accuracy against the images of pre-training, a line for each model (figure 4).

    Runs of one model that saw as many images are no line: each has a point and a name of its own.
    """
    last = _rows(arrays, arrays['final'])
    kinds = ['accuracy', *_shots(arrays)[:1]]
    figure, charts = canvas.charts(len(kinds), f'{title}accuracy against pre-training images')
    lines = lines_of_data_size(last)
    for axes, kind in zip(charts, kinds, strict=True):
        for label, own in lines.items():
            order = own['examples'].argsort()
            axes.plot(own['examples'][order], 100 * own[kind][order], 'o-', label=label)
        axes.set(xscale='log', xlabel='images of pre-training', ylabel=f'{_named(kind)} (%)')
        _ticks(axes, last['examples'])
    canvas.legend(figure, charts[0])
    return figure


def fewshot(arrays: Arrays, title: str) -> Any:
    """Few-shot accuracy over epochs and compute, a line for each run (figures 8, 9 and 13)."""
    figure, charts = canvas.charts(2, f'{title}few-shot accuracy of frozen features')
    runs, shots = _unique(arrays['run']), _shots(arrays)
    names = names_of_runs(runs)
    for k, run in enumerate(runs):
        own = _rows(arrays, arrays['run'] == run)
        for name, style in zip(shots, ('-', '--', ':', '-.') * len(shots), strict=False):
            y, deviation = 100 * own[name], 100 * own.get(f'{name}_deviation', 0 * own[name])
            for axes, x in zip(charts, (own['epochs'], own['flops']), strict=True):
                axes.plot(
                    x,
                    y,
                    style,
                    marker='.',
                    color=f'C{k}',
                    label=f'{own["model"][0]} of {names[run]}, {_named(name)}',
                )
                axes.fill_between(
                    x, y - deviation, y + deviation, color=f'C{k}', alpha=0.15, linewidth=0
                )
    charts[0].set(xlabel='epochs', ylabel='few-shot accuracy (%)')
    charts[1].set(xlabel='pre-training compute (FLOPs)', xscale='log')
    canvas.legend(figure, charts[0])
    return figure


def speed(arrays: Arrays, title: str) -> Any:
    """Inference speed and largest batch against image size, a line for each model (figure 12)."""
    figure, (left, right) = canvas.charts(2, f'{title}inference speed and largest batch measured')
    settings = _unique(arrays['setting'])
    for model in _unique(arrays['model']):
        for setting in settings:
            own = _rows(arrays, (arrays['model'] == model) & (arrays['setting'] == setting))
            sizes = np.unique(own['pixels'])
            name = f'{model}, {setting}' if len(settings) > 1 else model
            for axes, kind in ((left, 'images_per_second'), (right, 'batch_size')):
                axes.plot(
                    sizes,
                    [own[kind][own['pixels'] == size].max() for size in sizes],
                    'o-',
                    label=name,
                )
    for axes, what in ((left, 'images per second'), (right, 'images in the batch')):
        axes.set(xlabel='image size (pixels)', ylabel=what, xscale='log', yscale='log')
        _ticks(axes, arrays['pixels'])
    if len(settings) == 1:
        left.set_title(settings[0], fontsize=9)
    canvas.legend(figure, left)
    return figure


def names_of_runs(runs: Sequence[str]) -> dict[str, str]:
    """The end of the path of each run, by its path: two folders, or more where these are equal."""
    folders = {run: os.path.abspath(run).split(os.sep) for run in runs}
    longest = max(len(parts) for parts in folders.values())
    for length in range(2, longest + 1):
        names = {run: '/'.join(parts[-length:]) for run, parts in folders.items()}
        if len(set(names.values())) == len(set(map(tuple, folders.values()))):
            break
    return names


def labels_of_runs(arrays: Arrays) -> dict[str, str]:
    """The model of each run, by the path of the run; with its name where others have the model."""
    models = dict(zip(arrays['run'].tolist(), arrays['model'].tolist(), strict=True))
    names = names_of_runs(list(models))
    runs_of_model = Counter(models.values())
    return {
        run: model if runs_of_model[model] == 1 else f'{model} of {names[run]}'
        for run, model in models.items()
    }


def lines_of_data_size(last: Arrays) -> dict[str, Arrays]:
    """What `data_size` draws of the final rows of runs: the rows of each line, by its label."""
    labels = labels_of_runs(last)
    lines = {}
    for model in _unique(last['model']):
        own = _rows(last, last['model'] == model)
        if len(set(own['examples'].tolist())) == len(own['examples']):
            lines[model] = own
            continue
        for run in own['run'].tolist():
            lines[labels[run]] = _rows(own, own['run'] == run)
    return lines


def _ticks(axes, values):
    """Ticks where there are values, on a logarithmic axis."""
    axes.xaxis.minorticks_off()
    axes.set_xticks(np.unique(values), [f'{value:,.0f}' for value in np.unique(values)])


def _unique(values):
    return list(dict.fromkeys(values.tolist()))


def _rows(arrays, chosen):
    return {name: x[chosen] for name, x in arrays.items()}


def _shots(arrays):
    names = [name for name in arrays if name.endswith('shot')]
    return sorted(names, key=lambda name: (name != 'fewshot/5shot', len(name), name))


def _named(kind):
    return kind.removeprefix('fewshot/').replace('shot', '-shot')
