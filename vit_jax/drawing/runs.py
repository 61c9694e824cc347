"""Figures of the results of several runs, and of the speed of several models."""

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.drawing import canvas
from vit_jax.drawing.canvas import Arrays

LINE_STYLES = ('-', '--', ':', '-.')
FAMILIES = {'ViT': ('C0', 'o'), 'hybrid': ('C2', 'D'), 'ResNet': ('C7', 's')}


def compute(arrays: Arrays, title: str) -> Any:
    """Accuracy against pre-training compute, a line for each run (figure 5)."""
    figure, (axes,) = canvas.charts(1, f'{title}accuracy against pre-training compute')
    labels = labels_of_runs(arrays)
    for run in _unique(arrays['run']):
        rows = _rows(arrays, arrays['run'] == run)
        colour, marker = FAMILIES[rows['family'][0]]
        x = rows['flops']
        y = 100 * rows['accuracy']
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
        colour, marker = FAMILIES[family]
        axes.plot([], [], marker, color=colour, label=family)
    axes.set(xscale='log', xlabel='pre-training compute (FLOPs)', ylabel='accuracy (%)')
    canvas.legend(figure, axes)
    return figure


def data_size(arrays: Arrays, title: str) -> Any:
    """Final accuracy against the number of pre-training images, a line per model (figure 4).

    If two runs of a model have the same number of images, each run of this model is a labelled
    point.
    """
    final_rows = _rows(arrays, arrays['final'])
    metrics = ['accuracy', *_shots(arrays)[:1]]
    figure, charts = canvas.charts(len(metrics), f'{title}accuracy against pre-training images')
    lines = lines_of_data_size(final_rows)
    for axes, metric in zip(charts, metrics, strict=True):
        for label, rows in lines.items():
            order = rows['examples'].argsort()
            axes.plot(rows['examples'][order], 100 * rows[metric][order], 'o-', label=label)
        axes.set(xscale='log', xlabel='pre-training images', ylabel=f'{_shown_name(metric)} (%)')
        _ticks(axes, final_rows['examples'])
    canvas.legend(figure, charts[0])
    return figure


def fewshot(arrays: Arrays, title: str) -> Any:
    """Few-shot accuracy over epochs and compute, a line for each run (figures 8, 9 and 13)."""
    figure, charts = canvas.charts(2, f'{title}few-shot accuracy of frozen features')
    by_epochs, by_flops = charts
    runs = _unique(arrays['run'])
    run_names = names_of_runs(runs)
    for k, run in enumerate(runs):
        rows = _rows(arrays, arrays['run'] == run)
        for metric, style in zip(_shots(arrays), itertools.cycle(LINE_STYLES), strict=False):
            label = f'{rows["model"][0]} of {run_names[run]}, {_shown_name(metric)}'
            line = {'linestyle': style, 'color': f'C{k}', 'label': label}
            _plot_with_deviation(by_epochs, rows['epochs'], rows, metric, line)
            _plot_with_deviation(by_flops, rows['flops'], rows, metric, line)
    by_epochs.set(xlabel='epochs', ylabel='few-shot accuracy (%)')
    by_flops.set(xlabel='pre-training compute (FLOPs)', xscale='log')
    canvas.legend(figure, charts[0])
    return figure


def _plot_with_deviation(axes, x, rows, metric, line):
    """Plots a line of percentages, and a band of its standard deviation if it is known."""
    y = 100 * rows[metric]
    axes.plot(x, y, marker='.', **line)
    deviation = 100 * rows.get(f'{metric}_deviation', np.zeros_like(y))
    band = {'color': line['color'], 'alpha': 0.15, 'linewidth': 0}
    axes.fill_between(x, y - deviation, y + deviation, **band)


def speed(arrays: Arrays, title: str) -> Any:
    """Inference speed and largest batch against image size, a line for each model (figure 12)."""
    figure, charts = canvas.charts(2, f'{title}inference speed and largest batch measured')
    columns = {'images_per_second': 'images per second', 'batch_size': 'images in the batch'}
    settings = _unique(arrays['setting'])
    for axes, (column, label) in zip(charts, columns.items(), strict=True):
        for model in _unique(arrays['model']):
            for setting in settings:
                is_shown = (arrays['model'] == model) & (arrays['setting'] == setting)
                rows = _rows(arrays, is_shown)
                sizes = np.unique(rows['pixels'])
                largest = [rows[column][rows['pixels'] == size].max() for size in sizes]
                name = model if len(settings) == 1 else f'{model}, {setting}'
                axes.plot(sizes, largest, 'o-', label=name)
        axes.set(xlabel='image size (pixels)', ylabel=label, xscale='log', yscale='log')
        _ticks(axes, arrays['pixels'])
    if len(settings) == 1:
        charts[0].set_title(settings[0], fontsize=9)
    canvas.legend(figure, charts[0])
    return figure


def names_of_runs(runs: Sequence[str]) -> dict[str, str]:
    """Returns names of runs by path: the last two folders, or more if these are not unique."""
    folders = {run: os.path.abspath(run).split(os.sep) for run in runs}
    longest = max(len(parts) for parts in folders.values())
    for length in range(2, longest + 1):
        names = {run: '/'.join(parts[-length:]) for run, parts in folders.items()}
        if len(set(names.values())) == len(set(map(tuple, folders.values()))):
            break
    return names


def labels_of_runs(arrays: Arrays) -> dict[str, str]:
    """Returns labels of runs by path: the model, and the name of the run if models are equal."""
    models = dict(zip(arrays['run'].tolist(), arrays['model'].tolist(), strict=True))
    names = names_of_runs(list(models))
    runs_of_model = Counter(models.values())
    labels = {}
    for run, model in models.items():
        labels[run] = model if runs_of_model[model] == 1 else f'{model} of {names[run]}'
    return labels


def lines_of_data_size(final_rows: Arrays) -> dict[str, Arrays]:
    """Returns the rows of each line of `data_size`, by its label."""
    labels = labels_of_runs(final_rows)
    lines = {}
    for model in _unique(final_rows['model']):
        rows = _rows(final_rows, final_rows['model'] == model)
        if len(np.unique(rows['examples'])) == len(rows['examples']):
            lines[model] = rows
            continue
        for run in rows['run'].tolist():
            lines[labels[run]] = _rows(rows, rows['run'] == run)
    return lines


def _ticks(axes, values):
    """Sets a tick for each of the values on a logarithmic axis."""
    axes.xaxis.minorticks_off()
    axes.set_xticks(np.unique(values), [f'{value:,.0f}' for value in np.unique(values)])


def _unique(values):
    return list(dict.fromkeys(values.tolist()))


def _rows(arrays, mask):
    return {name: column[mask] for name, column in arrays.items()}


def _shots(arrays):
    names = [name for name in arrays if name.endswith('shot')]
    return sorted(names, key=lambda name: (name != 'fewshot/5shot', len(name), name))


def _shown_name(metric):
    return metric.removeprefix('fewshot/').replace('shot', '-shot')
