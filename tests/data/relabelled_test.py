"""Labels from a list in the order of file names, as in ImageNet-ReaL."""

import numpy as np
import pytest

from tests.support.batches import PREPROCESS, encoded, numbers
from tests.support.errors import refused
from vit_jax.data import pipeline, sources
from vit_jax.data.relabelled import relabelled

LISTS = [[0], [1, 2], [], [2, 0], [1], [2]]


@pytest.fixture
def root(tmp_path):
    """Files val_0.png ... val_5.png; sorting by class folder gives another order."""
    for number, name in enumerate(['cat', 'ant', 'bee', 'cat', 'bee', 'ant']):
        (tmp_path / 'val' / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / 'val' / name / f'val_{number}.png').write_bytes(encoded(number))
    return str(tmp_path)


@pytest.mark.parametrize('names', [('ant', 'bee', 'cat'), ('cat', 'ant', 'bee')])
def test_lists_are_in_the_order_of_files_and_numbers_of_sorted_classes(names, root):
    """The order of classes in the weights has no effect."""
    source = relabelled(sources.open_source(root, 'val', class_names=names), LISTS, 'real.json')
    batches = list(
        pipeline.eval_batches(
            source,
            batch_size=4,
            image_size=(6, 5),
            preprocess=PREPROCESS,
            files_at_once=1,
            max_broken_fraction=0.5,
            with_index=True,
        )
    )
    labels = np.concatenate([batch['label'][batch['mask']] for batch in batches])
    index = np.concatenate([batch['index'][batch['mask']] for batch in batches])
    assert index.tolist() == list(range(6))
    for number, row, k in zip(numbers(batches), labels, index, strict=True):
        assert {names[j] for j in np.flatnonzero(row)} == {
            sorted(names)[j] for j in LISTS[int(number)]
        }
        assert source.name_of(k).endswith(f'val_{int(number)}.png')


@pytest.mark.parametrize('labels', [[3], 1, ['0'], [True], [-1]])
def test_wrong_labels_are_errors(labels, root):
    with refused('content', field='--labels', file='real.json', value=labels) as caught:
        relabelled(sources.open_source(root, 'val'), [*LISTS[:-1], labels], 'real.json')
    assert str(caught.value) == (
        f'--labels=real.json has {labels} as number 5, for val_5.png: expected a list of whole '
        'numbers from 0 to 2.'
    )


def test_another_number_of_lists_is_an_error(root):
    with refused('content', field='--labels', file='real.json', value=5):
        relabelled(sources.open_source(root, 'val'), LISTS[:-1], 'real.json')


def test_sets_without_unique_file_names_are_errors(root, tmp_path):
    with refused('inapplicable', field='--labels'):
        relabelled(sources.open_source('digits', 'test'), [[0]] * 360, 'real.json')
    (tmp_path / 'val' / 'ant' / 'val_0.png').write_bytes(encoded(0))
    with refused('content', field='--labels', value='val_0.png'):
        relabelled(sources.open_source(root, 'val'), [*LISTS, [0]], 'real.json')
