"""Labels of TFDS sets: features, functions of features, and errors about other labels."""

import io

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.support.batches import Data, encoded, write_tfds_files
from tests.support.errors import refused
from vit_jax.data import sources
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.label_lists import OUT_OF_RANGE

OBJECTS = tfds.features.Sequence(
    {
        'size': tfds.features.ClassLabel(num_classes=2),
        'type': tfds.features.ClassLabel(num_classes=8),
        'location': tfds.features.Tensor(shape=(3,), dtype=np.float32),
        'pixel_coords': tfds.features.Tensor(shape=(3,), dtype=np.float32),
    }
)


def write(root, objects=([],), places=None, supervised_keys=None, features=None):
    """Writes a set 'small' of examples with these lists of objects; places repeat 0 to 4."""
    if places is None:
        places = [number % 5 for number in range(len(objects))]
    features = tfds.features.FeaturesDict(
        features
        or {
            'image': tfds.features.Image(shape=(None, None, 3)),
            'image/file_name': tfds.features.Text(),
            'place': tfds.features.ClassLabel(num_classes=5),
            'kind': tfds.features.ClassLabel(names=['ant', 'bee', 'cat']),
            'objects': OBJECTS,
        }
    )
    examples = [
        {
            'image': io.BytesIO(encoded(k)),
            'image/file_name': 'x',
            'place': place,
            'kind': 1,
            'objects': each,
        }
        for k, (each, place) in enumerate(zip(objects, places, strict=True))
    ]
    shards = [
        [
            features.serialize_example(
                features.encode_example({key: example[key] for key in features})
            )
            for example in examples
        ]
    ]
    write_tfds_files(root, 'small', 'tfrecord', features, shards, supervised_keys)
    return str(root)


def labels(data_dir, label):
    """The class names, and the labels of the examples of the set."""
    source = sources.open_source('small', 'train', data_dir, label=label)
    return source.class_names, [
        int(source.load({'record': record})[1])
        for record in tf.data.TFRecordDataset(source.pieces.filename[0])
    ]


def at(distance, kind=0):
    """An object at a distance, with the features of both CLEVR and KITTI."""
    return {
        'size': 0,
        'type': kind,
        'location': np.float32([0, 0, distance]),
        'pixel_coords': np.float32([0, 0, distance]),
    }


def test_the_label_may_be_a_feature_or_groups_of_its_classes(tmp_path):
    data_dir = write(tmp_path, [[]] * 6)
    assert labels(data_dir, 'place') == (tuple('01234'), [0, 1, 2, 3, 4, 0])
    assert labels(data_dir, 'kind') == (('ant', 'bee', 'cat'), [1] * 6)
    assert labels(data_dir, 'kind/2') == (('ant-bee', 'cat'), [0] * 6)
    assert labels(data_dir, 'place/2') == (('0-2', '3-4'), [0, 0, 0, 1, 1, 0])
    assert labels(data_dir, 'place/5') == (tuple('01234'), [0, 1, 2, 3, 4, 0])


@pytest.mark.parametrize(
    ('label', 'rows'),
    [
        ('clevr_count', [([at(9)] * count, str(count)) for count in range(3, 11)]),
        (
            'clevr_distance',
            [
                ([at(11), at(distance)], name)
                for distance, name in (
                    (7, '0-8'),
                    (8, '0-8'),
                    (8.25, '8-8.5'),
                    (9, '8.5-9'),
                    (9.25, '9-9.5'),
                    (10, '9.5-10'),
                    (10.5, '10-100'),
                    (50, '10-100'),
                )
            ],
        ),
        (
            'kitti_distance',
            [
                ([at(3, kind=3), at(9, kind=2), at(30)], '8-20'),
                ([at(8, kind=1)], 'below 8'),
                ([at(-1)], 'below 8'),
                ([at(20.5)], 'above 20'),
                ([at(5, kind=3)], 'no vehicle'),
                ([], 'no vehicle'),
            ],
        ),
        (
            'kitti_object_distance',
            [
                ([at(30), at(distance, kind=7)], name)
                for distance, name in (
                    (5, 'below 5.6'),
                    (6, '5.6-8.4'),
                    (10, '8.4-13.4'),
                    (20, '13.4-23.4'),
                    (24, 'above 23.4'),
                )
            ],
        ),
    ],
)
def test_functions_of_objects_have_the_thresholds_of_the_benchmark(label, rows, tmp_path):
    objects, expected = zip(*rows, strict=True)
    names, numbers = labels(write(tmp_path, objects), label)
    assert [names[number] for number in numbers] == list(expected)


@pytest.mark.parametrize('kind', ['training', 'evaluation'])
def test_a_label_outside_the_classes_is_an_error(kind, tmp_path):
    """The image does not count as broken."""
    data = Data(
        'small', write(tmp_path, [[]] * 6, [0, 1, 2, 3, 4, -1], ('image', 'place')), batch_size=2
    )
    with refused('content', field='dataset.label', value=-1) as caught:
        if kind == 'training':
            data.batches(3)
        else:
            data.evaluated()
    assert str(caught.value).endswith(
        '-train.tfrecord-00000-of-00001 record 5 has the label -1: expected 0 to 4. If examples '
        'have no label, as in the test split of some sets, use another split or another '
        'dataset.label.'
    )


@pytest.mark.parametrize(
    ('label', 'objects', 'place', 'number'),
    [
        ('place/2', [], -1, -1),
        ('clevr_count', [at(9)] * 2, 0, -1),
        ('clevr_count', [], 0, -3),
        ('clevr_count', [at(9)] * 11, 0, 8),
        ('clevr_distance', [at(101)], 0, 6),
        ('clevr_distance', [], 0, 6),
    ],
)
def test_labels_of_functions_are_not_clipped_to_the_classes(
    label, objects, place, number, tmp_path
):
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf'{OUT_OF_RANGE}\W+?{number}\b'):
        labels(write(tmp_path, [objects], [place]), label)


@pytest.mark.parametrize(
    ('label', 'kind'),
    [
        ('image/file_name', 'unknown'),
        ('objects', 'unknown'),
        ('objects/3', 'unknown'),
        ('place/x', 'unknown'),
        ('', 'missing'),
        ('place/1', 'value'),
        ('place/6', 'value'),
    ],
)
def test_other_labels_are_errors(label, kind, tmp_path):
    data_dir = write(tmp_path)
    with refused(kind, field='dataset.label', value=label):
        labels(data_dir, label)


def test_the_error_about_an_unknown_label_lists_all_labels(tmp_path):
    data_dir = write(tmp_path)
    with refused('unknown', field='dataset.label', value='plcae') as caught:
        labels(data_dir, 'plcae')
    assert str(caught.value) == (
        "'small/1.0.0' has no label 'plcae'. Did you mean place? dataset.label (--label of "
        'vit_jax.evaluate) is one of: kind (3 classes), place (5 classes), clevr_count (the number '
        'of objects), clevr_distance (the distance of the closest object), kitti_distance (the '
        'distance of the closest vehicle), kitti_object_distance (the distance of the closest '
        'object); or FEATURE/N, which merges the classes of a feature into N groups of neighbours. '
        'Other features cannot be the label.'
    )


def test_functions_of_missing_objects_are_not_suggested(tmp_path):
    features = {
        'image': tfds.features.Image(shape=(None, None, 3)),
        'kind': tfds.features.ClassLabel(names=['ant', 'bee', 'cat']),
    }
    data_dir = write(tmp_path, features=features, supervised_keys=('image', 'kind'))
    with refused('unknown', field='dataset.label') as caught:
        labels(data_dir, 'clevr_count')
    assert 'is one of: kind (3 classes); or' in str(caught.value)
    assert labels(data_dir, '') == labels(data_dir, 'kind')


@pytest.mark.parametrize('name', ['digits', 'directory'])
def test_only_tfds_sets_have_a_choice_of_labels(name, tmp_path):
    name = name if name == 'digits' else str(tmp_path)
    with refused('inapplicable', field='dataset.label', value='place'):
        sources.open_source(name, 'train', label='place')
