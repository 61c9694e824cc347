"""Labels from a list in the order of file names, as ImageNet-ReaL has them."""

import numpy as np
import pytest

from tests.support.batches import PREPROCESS, encoded, numbers
from vit_jax.data import pipeline, sources
from vit_jax.data.relabelled import relabelled
from vit_jax.errors import UserError

LISTS = [[0], [1, 2], [], [2, 0], [1], [2]]


@pytest.fixture
def root(tmp_path):
    """Files val_0.png ... val_5.png, whose order is not that of their class folders."""
    for number, name in enumerate(['cat', 'ant', 'bee', 'cat', 'bee', 'ant']):
        (tmp_path / 'val' / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / 'val' / name / f'val_{number}.png').write_bytes(encoded(number))
    return str(tmp_path)


def message(source, lists):
    with pytest.raises(UserError) as error:
        relabelled(source, lists, 'real.json')
    return str(error.value)


@pytest.mark.parametrize('names', [('ant', 'bee', 'cat'), ('cat', 'ant', 'bee')])
def test_lists_belong_to_files_and_numbers_to_sorted_classes(names, root):
    """Also where weights have the classes in another order."""
    source = relabelled(sources.open_source(root, 'val', class_names=names), LISTS, 'real.json')
    found = list(
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
    labels = np.concatenate([batch['label'][batch['mask']] for batch in found])
    index = np.concatenate([batch['index'][batch['mask']] for batch in found])
    assert index.tolist() == list(range(6))
    for number, row, k in zip(numbers(found), labels, index, strict=True):
        assert {names[j] for j in np.flatnonzero(row)} == {
            sorted(names)[j] for j in LISTS[int(number)]
        }
        assert source.name_of(k).endswith(f'val_{int(number)}.png')


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (lambda x: x[:-1], '--labels=real.json has 5 lists of labels and the split has 6 images'),
        (
            lambda x: x[:-1] + [[3]],
            'has [3] as number 5, for val_5.png: expected a list of whole numbers from 0 to 2',
        ),
        (lambda x: [1, *x[1:]], 'has 1 as number 0, for val_0.png'),
        (lambda x: [['0'], *x[1:]], "has ['0'] as number 0"),
        (lambda x: [[True], *x[1:]], 'has [True] as number 0'),
        (lambda x: [[-1], *x[1:]], 'has [-1] as number 0'),
    ],
)
def test_wrong_lists(change, expected, root):
    assert expected in message(sources.open_source(root, 'val'), change(LISTS))


def test_sets_without_an_order_of_file_names(root, tmp_path):
    assert 'expected a directory of image files' in message(
        sources.open_source('digits', 'test'), [[0]] * 360
    )
    (tmp_path / 'val' / 'ant' / 'val_0.png').write_bytes(encoded(0))
    assert 'val_0.png occurs more than once' in message(
        sources.open_source(root, 'val'), [*LISTS, [0]]
    )
