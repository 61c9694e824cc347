"""The page of a fit has the numbers, the photos and the commands of the fit."""

import dataclasses
import math

import numpy as np
import pytest
from sklearn import metrics

from tests.support import fits
from tests.support.errors import refused
from tests.support.pages import check
from vit_jax.evaluators.calibration import calibration
from vit_jax.reporting import fit_page, pictures

EVIL = '<script>alert(1)</script>'
NAMES = ['Glöckchen', '犬', EVIL]
LINKS = (
    'photos.csv',
    'suspects.csv',
    'mistakes.csv',
    'confusion.csv',
    'run/report.html',
    'tries/report.html',
)


def read(content):
    """The parsed page, and the data of its charts."""
    return check(fit_page.of_fit(content), LINKS)


def percent(share, digits=2):
    return f'{100 * share:.{digits}f} %'


def softmax(logits):
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def table_with(page, header):
    """The rows of the table with a word in its header, without the sort buttons."""
    return next(table for table in page.tables if header in table[0])


@pytest.fixture
def content(tmp_path):
    return fits.content(tmp_path, NAMES)


def test_the_accuracy_has_wilsons_interval(content):
    """The ends are the roots of (p - a)^2 = z^2 p (1 - p) / n: Wilson's own equation."""
    targets, logits = fits.predictions(len(NAMES))
    accuracy = (logits.argmax(axis=1) == targets.argmax(axis=1)).mean()
    share = 1.96**2 / len(targets)
    low, high = sorted(np.roots([1 + share, -(2 * accuracy + share), accuracy**2]))
    label, value, note = fit_page.cards(content)[0]
    assert (label, value.replace('\xa0', ' ')) == ('Accuracy', percent(accuracy))
    assert note == f'95 % interval {100 * low:.1f} to {100 * high:.1f} %'
    assert value.replace('\xa0', ' ') + note in read(content)[0].text
    assert 0 < low < accuracy < high < 1


def test_classes_have_recall_and_precision_and_the_worst_is_first(content):
    targets, logits = fits.predictions(len(NAMES))
    labels = targets.argmax(axis=1)
    predicted = logits.argmax(axis=1)
    precision, recall, _, support = metrics.precision_recall_fscore_support(labels, predicted)
    page, _ = read(content)
    expected = sorted(
        (recall[k], [name, percent(recall[k], 1), percent(precision[k], 1), str(support[k])])
        for k, name in enumerate(NAMES)
    )
    rows = [[cell.strip() for cell in row[:4]] for row in table_with(page, 'recall')[1:]]
    assert rows == [row for _, row in expected]
    worst = next(card for card in fit_page.cards(content) if card[0] == 'Worst class')
    assert worst[2] == f'{expected[0][1][0]}, {expected[0][1][3]} photos'


def test_the_confusion_matrix_of_few_classes_is_a_table(content):
    targets, logits = fits.predictions(len(NAMES))
    matrix = metrics.confusion_matrix(targets.argmax(axis=1), logits.argmax(axis=1))
    page, _ = read(content)
    expected = [['', *NAMES]]
    for name, row in zip(NAMES, matrix, strict=True):
        expected.append([name, *[str(count or '') for count in row]])
    assert expected in page.tables


def test_calibration_is_shown_with_and_without_the_temperature(content):
    targets, logits = fits.predictions(len(NAMES))
    is_right = logits.argmax(axis=1) == targets.argmax(axis=1)
    after, before = (
        calibration(softmax(factor * logits).max(axis=1).astype(np.float32), is_right)
        for factor in (1, fits.TEMPERATURE)
    )
    page, data = read(content)
    assert f'The expected calibration error is {percent(after["expected_error"])}' in page.text
    assert f'It is {percent(before["expected_error"])} before the temperature 1.500' in page.text
    assert after['expected_error'] != pytest.approx(before['expected_error'], abs=1e-3)
    bars = data['charts']['reliability']['layer'][0]['data']['values']
    assert [row['accuracy'] for row in bars] == [row['accuracy'] for row in after['bins']]


def test_mistakes_and_suspects_are_thumbnails(content):
    page, _ = read(content)
    assert len(content.suspects) > fit_page.SHOWN
    num_mistakes = len(content.mistakes)
    assert 0 < num_mistakes < fit_page.SHOWN
    images = page.of('img')
    assert len(images) == num_mistakes + fit_page.SHOWN
    assert all(image['src'].startswith('data:image/jpeg') for image in images)
    assert '30 photos have another class that is more probable' in page.text
    assert f'Here are the first {fit_page.SHOWN}.' in page.text
    first = content.mistakes[0]
    assert f'{first.predicted} {percent(first.confidence, 1)}' in page.text
    assert f'label {first.label}, {percent(first.label_confidence, 1)}' in page.text
    assert page.of('small', title=first.path)
    assert images[0]['src'] == pictures.of_file(first.path, fit_page.SIDE)


def test_names_are_escaped(content):
    source = fit_page.of_fit(
        dataclasses.replace(
            content,
            name=EVIL,
            settings=content.settings | {'data': EVIL},
            scan=content.scan | {'broken': {EVIL: EVIL}, 'left_out': {EVIL: 1}},
            duplicates={'pairs': 1, 'across_splits': [[EVIL, f'{EVIL}\udcff', 1.0]]},
            commands=[(EVIL, EVIL)],
        )
    )
    page, _ = check(source, LINKS)
    assert len(page.scripts) == 3
    assert '<script>alert' not in source
    assert page.text.count(EVIL) >= 8
    source.encode()  # a lone surrogate of a file name that is not UTF-8 is escaped


def test_the_scan_is_shown_with_every_count(content):
    page, data = read(content)
    rows = dict(row for table in page.tables for row in table if len(row) == 2)
    assert rows == {
        'photos that can be read': '1,234',
        'in train': '80',
        'in val': '20',
        'in test': '60',
        'classes': '3',
        'largest class compared with the smallest': '1.5 times: 102 and 100 photos',
        'shorter side': '90 to 4000 pixels, in the median 300',
        'formats': '.jpg 1,230, .png 4',
        'broken files, left out': '1',
        'files of other formats, left out': '.cr2 11',
        'copies of other photos': '7',
        'pairs of near duplicates': '13',
        'copies and near duplicates in different splits': '1',
    }
    assert '/photos/broken.jpg: the file is empty' in page.text
    assert '/a.jpg and /b.jpg' in page.text
    counts = data['charts']['counts']['data']['values']
    assert {row['class']: row['images'] for row in counts} == content.scan['images_per_class']


def test_every_attempt_has_a_row_and_the_model_is_marked(content):
    page, _ = read(content)
    assert table_with(page, 'learning rate')[1:] == [
        ['linear probe', '–', '–', '–', '75.00 %', '2.5', ''],
        ['try lr=0.001', '0.001', '–', '40', '81.25 %', '12.0', ''],
        ['try lr=0.01', '0.01', 'RandAugment and MixUp', '40', 'diverges', '11.0', ''],
        ['long run chosen', '0.001', '–', '400', '87.50 %', '120.0', 'report'],
    ]
    assert page.of('a', href='run/report.html')
    assert page.of('a', href='tries/report.html')
    assert 'There was no time for fine-tuning' not in page.text
    assert "python -m vit_jax.predict '/my photos'" in page.text


def test_the_page_of_a_probe_says_that_nothing_else_was_tried(content):
    probe = content.attempts[0]._replace(is_chosen=True)
    page, _ = read(dataclasses.replace(content, attempts=[probe], comparison=''))
    assert 'There was no time for fine-tuning in 30 minutes' in page.text
    assert not page.of('a', href='tries/report.html')
    assert ('Model', 'linear probe', '75.00\xa0% on val') in fit_page.cards(
        dataclasses.replace(content, attempts=[probe])
    )


def test_several_labels_have_average_precision_and_no_confusion_matrix(tmp_path):
    names = [f'class {k}' for k in range(5)]
    content = fits.content(tmp_path, names, multi_label=True)
    targets, logits = fits.predictions(len(names), multi_label=True)
    precision = metrics.average_precision_score(targets, logits, average=None)
    page, data = read(content)
    label, value, _ = fit_page.cards(content)[0]
    assert (label, value.replace('\xa0', ' ')) == (
        'Mean average precision',
        percent(precision.mean()),
    )
    assert 'Accuracy' not in [card[0] for card in fit_page.cards(content)]
    rows = [[cell.strip() for cell in row] for row in table_with(page, 'average precision')[1:]]
    order = np.argsort(precision)
    assert [row[:3] for row in rows] == [
        [names[k], percent(precision[k], 1), str(targets[:, k].sum())] for k in order
    ]
    labels = next(m.label for m in content.mistakes if ';' in m.label)
    assert labels.replace(';', '; ') in page.text
    assert 'Confusion matrix' not in page.text
    assert 'confusion' not in data['charts']
    assert 'The mean average precision on val chooses the model' in page.text


@pytest.mark.parametrize('num_classes', [2, 200])
def test_page_of_any_number_of_classes(tmp_path, num_classes):
    names = [f'{k:03} a long name of a class ' + 'x' * 60 for k in range(num_classes)]
    content = fits.content(tmp_path, names)
    page, data = read(content)
    assert len(table_with(page, 'recall')) == 1 + min(num_classes, fits.NUM_IMAGES)
    assert ('confusion' in data['charts']) == (num_classes > 20)
    if num_classes > fits.NUM_IMAGES:
        assert 'test has no images of 140 of 200 classes' in page.text
        confused = np.array(content.outcome['confusion'])
        cells = data['charts']['confusion']['data']['values']
        assert sum(cell['images'] for cell in cells) == confused.sum() == fits.NUM_IMAGES
    assert all(math.isfinite(row[1]) for row in content.outcome['classes'])


def test_a_perfect_model_has_neither_mistakes_nor_suspects(content):
    page, _ = read(dataclasses.replace(content, mistakes=[], suspects=[], num_suspects=0))
    assert 'None: every prediction is correct.' in page.text
    assert 'None: the label of every photo is its most probable class.' in page.text
    assert not page.of('img')


def test_a_photo_that_is_gone_is_refused(content, tmp_path):
    (tmp_path / '0.jpg').unlink()
    with refused('unreadable', file=tmp_path / '0.jpg'):
        fit_page.of_fit(content)
