"""The page of a fit: accuracy, mistakes, all tried runs, and the scan."""

import dataclasses
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import one_line
from vit_jax.evaluators import per_class
from vit_jax.reporting import charts, page, pictures
from vit_jax.reporting.rendering import percent, render

TEMPLATE = 'fit.html.j2'
SHOWN = 24  # photos of a gallery
SIDE = 112  # pixels of the longer side of these photos
LISTED = 50  # broken files and pairs of photos in a list
SECTIONS = {
    'result': 'Result',
    'classes': 'Classes',
    'mistakes': 'Mistakes',
    'calibration': 'Calibration',
    'suspects': 'Suspects',
    'photos': 'Photos',
    'tried': 'What was tried',
    'next': 'Next',
}


class Example(NamedTuple):
    """A photo of a gallery.

    Attributes:
      path: of its file.
      label: its class in the data; several classes in one text.
      label_confidence: the probability of the label, from 0 to 1.
      predicted: the predicted class.
      confidence: the probability of the predicted class.
    """

    path: str
    label: str
    label_confidence: float
    predicted: str
    confidence: float


class Attempt(NamedTuple):
    """A model that was trained.

    Attributes:
      name: of the model.
      learning_rate: None for the linear probe.
      is_augmented: whether it trained with RandAugment and MixUp.
      steps: of training; None for the linear probe.
      score: on the validation split, from 0 to 1; None where training diverged.
      seconds: of training and evaluation; None if unknown.
      page: the path of its own page, relative to the page of the fit; '' without one.
      is_chosen: whether it is the model of the fit.
    """

    name: str
    learning_rate: float | None
    is_augmented: bool
    steps: int | None
    score: float | None
    seconds: float | None
    page: str
    is_chosen: bool


@dataclasses.dataclass(frozen=True)
class Content:
    """The content of the page, as plain values.

    Attributes:
      name: the title of the page.
      settings: `data`, `pretrained`, `minutes` and `seed` of the command.
      class_names: in the order of their numbers.
      splits: photos of each split.
      scored_on: the split that `outcome` is about.
      chosen_on: the split that chose the model.
      outcome: the fields of fitting.outcome.Outcome by name.
      mistakes: the most confident first.
      suspects: photos that may have a wrong label, the most suspicious first.
      num_suspects: how many there are in all.
      scan: the fields of fitting.scan.Summary by name, and `imbalance`.
      duplicates: `pairs`, the number of near duplicates, and `across_splits`, the (file, file,
        similarity) of pairs in different splits.
      attempts: all models, in the order of their training.
      comparison: the path of the page that compares them, relative to this page; '' without one.
      files: the names of the tables beside the page.
      commands: (purpose, command) of the next steps.
    """

    name: str
    settings: Mapping[str, Any]
    class_names: Sequence[str]
    splits: Mapping[str, int]
    scored_on: str
    chosen_on: str
    outcome: Mapping[str, Any]
    mistakes: Sequence[Example]
    suspects: Sequence[Example]
    num_suspects: int
    scan: Mapping[str, Any]
    duplicates: Mapping[str, Any]
    attempts: Sequence[Attempt]
    comparison: str
    files: Sequence[str]
    commands: Sequence[tuple[str, str]]

    def is_multi_label(self) -> bool:
        """Whether photos have several labels, so that there is no confusion matrix."""
        return self.outcome['mean_average_precision'] is not None

    def score_words(self) -> str:
        """The name of the score of a model."""
        if self.is_multi_label():
            return 'mean average precision'
        return 'accuracy'


def of_fit(content: Content) -> str:
    """Returns the page as HTML.

    Raises:
      UserError: if a photo of a gallery cannot be read, or the library of the charts is missing.
    """
    outcome = content.outcome
    counts = charts.counts(
        list(content.scan['images_per_class']),
        list(content.scan['images_per_class'].values()),
        'photos',
    )
    reliability = charts.reliability(outcome['bins'])
    values: dict[str, Any] = {
        'fit': content,
        'outcome': outcome,
        'cards': cards(content),
        'class_rows': _class_rows(content),
        'missing_classes': _missing_classes(content),
        'confusion': None,
        'confused': None,
        'reliability': reliability,
        'counts': counts,
        'facts': _facts(content),
        'broken': [(one_line(file), text) for file, text in content.scan['broken'].items()],
        'across': [(one_line(a), one_line(b)) for a, b, _ in content.duplicates['across_splits']],
        'most_listed': LISTED,
        'mistakes': _gallery(content, content.mistakes),
        'suspects': _gallery(content, content.suspects),
        # The pixels of small photos are shown as squares.
        'tiny': content.scan['sides'][1] <= pictures.SMALL,
        'link': urllib.parse.quote,
    }
    specs = {'counts': counts['spec'], 'reliability': reliability['spec']}
    if outcome['confusion'] is not None:
        matrix = np.array(outcome['confusion'])
        values['confusion'] = page.confusion(content.class_names, matrix)
        values['confused'] = charts.pairs(content.class_names, matrix)
        if 'spec' in values['confusion']:
            specs['confusion'] = values['confusion']['spec']
    return render(
        TEMPLATE,
        values,
        content.name,
        one_line(f'{content.settings["data"]} · {content.settings["pretrained"]}'),
        SECTIONS,
        {'charts': specs, 'explorer': None},
    )


def cards(content: Content) -> list[tuple[str, str, str]]:
    """Returns the most important results: (label, value, note) for each card."""
    outcome = content.outcome
    low, high = outcome['interval']
    interval = f'95 % interval {100 * low:.1f} to {100 * high:.1f} %'
    result = []
    if content.is_multi_label():
        precision = percent(outcome['mean_average_precision'])
        result.append(('Mean average precision', precision, f'of {content.scored_on}'))
        result.append(('Most probable class is right', percent(outcome['accuracy']), interval))
    else:
        result.append(('Accuracy', percent(outcome['accuracy']), interval))
    result.append(
        (
            'Scored on',
            f'{outcome["num_images"]:,}',
            f'photos of {content.scored_on}, which neither trained nor chose the model',
        )
    )
    result.append(
        (
            'Calibration error',
            percent(outcome['calibration_error']),
            f'{percent(outcome["calibration_error_before"])} before the temperature '
            f'{outcome["temperature"]:.3f}',
        )
    )
    name, score, num_images, _ = outcome['classes'][0]
    result.append(('Worst class', percent(score, 1), f'{name}, {num_images:,} photos'))
    result.append(('Suspects', f'{content.num_suspects:,}', 'photos may have a wrong label'))
    chosen = next(attempt for attempt in content.attempts if attempt.is_chosen)
    result.append(('Model', chosen.name, f'{percent(chosen.score)} on {content.chosen_on}'))
    return result


def _class_rows(content):
    """Returns the rows of the table of classes, the worst class first."""
    taken_for = {}
    if content.outcome['confusion'] is not None:
        for name, counts in zip(content.class_names, content.outcome['confusion'], strict=True):
            taken_for[name] = _most_often(name, counts, content.class_names)
    rows = []
    for name, score, num_images, precision in content.outcome['classes'][: page.MOST_CLASSES]:
        rows.append(
            {
                'name': name,
                'score': score,
                'precision': precision,
                'num_images': num_images,
                'all_images': content.scan['images_per_class'][name],
                'taken_for': taken_for.get(name, ''),
            }
        )
    return rows


def _most_often(name, counts, class_names):
    """Returns the wrong class that photos of a class have most often, '' if all are right."""
    wrong = [
        (count, other)
        for count, other in zip(counts, class_names, strict=True)
        if other != name and count
    ]
    if not wrong:
        return ''
    return max(wrong, key=lambda item: item[0])[1]


def _missing_classes(content):
    scored = {name for name, *_ in content.outcome['classes']}
    without = [name for name in content.class_names if name not in scored]
    return per_class.missing_classes(without, len(content.class_names))


def _gallery(content, examples):
    """Returns the first examples with their thumbnails."""
    between = ';'
    if content.is_multi_label():
        between = '; '  # so that a line can break there
    return [
        {
            'image': pictures.of_file(example.path, SIDE),
            'name': one_line(os.path.basename(example.path)),
            'path': one_line(example.path),
            'label': example.label.replace(';', between) or 'none',
            'label_confidence': example.label_confidence,
            'predicted': example.predicted,
            'confidence': example.confidence,
        }
        for example in examples[:SHOWN]
    ]


def _facts(content):
    """Returns (words, value) for everything that the scan counts."""
    scan = content.scan
    smallest, median, largest = scan['sides']
    counts = list(scan['images_per_class'].values())
    return [
        ('photos that can be read', f'{sum(scan["formats"].values()):,}'),
        *[(f'in {split}', f'{count:,}') for split, count in content.splits.items()],
        ('classes', f'{len(counts):,}'),
        (
            'largest class compared with the smallest',
            f'{scan["imbalance"]:.1f} times: {max(counts):,} and {min(counts):,} photos',
        ),
        ('shorter side', f'{smallest} to {largest} pixels, in the median {median}'),
        ('formats', _counted(scan['formats'])),
        ('broken files, left out', f'{len(scan["broken"]):,}'),
        ('files of other formats, left out', _counted(scan['left_out'])),
        ('copies of other photos', f'{scan["copies"]:,}'),
        ('pairs of near duplicates', f'{content.duplicates["pairs"]:,}'),
        (
            'copies and near duplicates in different splits',
            f'{len(content.duplicates["across_splits"]):,}',
        ),
    ]


def _counted(counts):
    """Returns '.jpg 12, .png 3', or '0' if there are none."""
    return ', '.join(f'{one_line(name)} {count:,}' for name, count in counts.items()) or '0'
