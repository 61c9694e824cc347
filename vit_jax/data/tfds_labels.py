"""What is the label of an example of a TFDS set: one of its features, or a function of one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Float32, Int32

from vit_jax.data.host_tensorflow import tf
from vit_jax.errors import UserError, nearest_names


class Label(NamedTuple):
    """How the label of an example is computed."""

    feature: str  # from which
    class_names: tuple[str, ...]
    of: Callable[[Any], Int32[tf.Tensor, '*labels']]  # from the value of that feature
    multi_label: bool = False  # a list of labels


class _Function(NamedTuple):
    """A label that is computed from the features of a list of objects."""

    needs: tuple[str, ...]  # features of each object
    class_names: tuple[str, ...]
    of: Callable[[Mapping[str, tf.Tensor]], tf.Tensor]
    meaning: str


def _bin(value: Float32[tf.Tensor, ''], edges: Sequence[float]) -> Int32[tf.Tensor, '']:
    """The number k with edges[k] < value <= edges[k + 1]; it may be outside of the bins."""
    return tf.reduce_sum(tf.cast(tf.constant(edges, tf.float32) < value, tf.int32)) - 1


def _closest_vehicle(objects):
    """The distance of the closest car, van or truck, types 0 to 2; 1000 m where there is none."""
    distance = objects['location'][:, 2][objects['type'] < 3]
    return tf.reduce_min(tf.concat([distance, [1000.0]], 0))


# Those of the Visual Task Adaptation Benchmark: clevr.py and kitti.py of
# google-research/task_adaptation, which also has the thresholds. KITTI's distances are in metres.
FUNCTIONS = {
    'clevr_count': _Function(
        ('size',),
        tuple(map(str, range(3, 11))),
        lambda x: tf.size(x['size']) - 3,
        'the number of objects',
    ),
    'clevr_distance': _Function(
        ('pixel_coords',),
        ('0-8', '8-8.5', '8.5-9', '9-9.5', '9.5-10', '10-100'),
        lambda x: _bin(tf.reduce_min(x['pixel_coords'][:, 2]), (0, 8, 8.5, 9, 9.5, 10, 100)),
        'the distance of the closest object',
    ),
    'kitti_distance': _Function(
        ('type', 'location'),
        ('below 8', '8-20', 'above 20', 'no vehicle'),
        lambda x: _bin(_closest_vehicle(x), (-100, 8, 20, 999)),
        'the distance of the closest vehicle',
    ),
    'kitti_object_distance': _Function(
        ('location',),
        ('below 5.6', '5.6-8.4', '8.4-13.4', '13.4-23.4', 'above 23.4'),
        lambda x: _bin(tf.reduce_min(x['location'][:, 2]), (-100, 5.6, 8.4, 13.4, 23.4)),
        'the distance of the closest object',
    ),
}


def image_and_label(info: tfds.core.DatasetInfo, wanted: str) -> tuple[str, Label]:
    """The name of the feature that is the image, and the label.

    Args:
      wanted: FEATURE, a ClassLabel or a Sequence of them; FEATURE/N, whose classes are merged to N
        groups of neighbours; one of FUNCTIONS; '' takes the set's own label.

    Raises UserError, with all labels that there are, if there is none of that name.
    """
    features, keys = info.features, info.supervised_keys or ('image', 'label')
    image, own = (
        keys
        if len(keys) == 2 and all(isinstance(key, str) and key in features for key in keys)
        else ('image', 'label')
    )
    has_image = image in features and isinstance(features[image], tfds.features.Image)
    if has_image and (label := _label(features, wanted or own)):
        return image, label
    kinds = ', '.join(f'{key} ({type(value).__name__})' for key, value in features.items())
    possible = _possible(features)
    if not has_image or not possible:
        raise UserError(
            f"data set '{info.full_name}' is not an image classification set: expected an "
            'image (Image) and a label (ClassLabel, or a Sequence of them), its features are: '
            f'{kinds}'
        )
    names = ', '.join(f'{name} ({meaning})' for name, meaning in possible.items())
    problem = (
        f"'{info.full_name}' has no label {wanted!r}. {nearest_names(wanted, possible)}"
        if wanted
        else f"data set '{info.full_name}' does not say which feature is the label. "
    )
    raise UserError(
        f'{problem}dataset.label (--label of vit_jax.evaluate) is one of: {names}; '
        'or FEATURE/N, which merges the classes of a feature to N groups of '
        'neighbours. Other features are no classes.'
    )


def _label(features, wanted):
    """The Label of a name, None if there is none."""
    if wanted in features:
        if not (classes := _class_label(features[wanted])):
            return None
        return Label(
            wanted,
            tuple(classes.names),
            lambda x: tf.cast(x, tf.int32),
            isinstance(features[wanted], tfds.features.Sequence),
        )
    if wanted in FUNCTIONS and _has_objects(features, FUNCTIONS[wanted]):
        return Label('objects', FUNCTIONS[wanted].class_names, FUNCTIONS[wanted].of)
    feature, _, number = wanted.rpartition('/')
    if (
        feature in features
        and number.isdecimal()
        and isinstance(features[feature], tfds.features.ClassLabel)
    ):
        return _grouped(feature, features[feature].names, int(number))
    return None


def _grouped(feature, names, number):
    """Classes merged to groups of neighbours, as equal as possible (dsprites.py there)."""
    if not 2 <= number <= len(names):
        raise UserError(
            f'dataset.label is {feature}/{number}: {feature} has {len(names)} classes '
            f'to be merged, expected a number of groups from 2 to {len(names)}.'
        )
    groups = (np.arange(len(names)) * number // len(names)).astype(np.int32)
    members = [
        [name for name, group in zip(names, groups, strict=True) if group == k]
        for k in range(number)
    ]
    # A label below 0 or above the last stays one.
    table = tf.constant([-1, *groups, number], tf.int32)
    return Label(
        feature,
        tuple('-'.join(dict.fromkeys([each[0], each[-1]])) for each in members),
        lambda x: tf.gather(table, tf.clip_by_value(tf.cast(x, tf.int32), -1, len(names)) + 1),
    )


def _possible(features):
    """What can be the label, and what it is."""
    found = {
        name: f'{classes.num_classes} classes'
        for name, feature in sorted(features.items())
        if (classes := _class_label(feature))
    }
    return found | {
        name: function.meaning
        for name, function in FUNCTIONS.items()
        if _has_objects(features, function)
    }


def _has_objects(features, function):
    if 'objects' not in features or not isinstance(features['objects'], tfds.features.Sequence):
        return False
    inner = features['objects'].feature
    return isinstance(inner, tfds.features.FeaturesDict) and all(
        name in inner for name in function.needs
    )


def _class_label(feature):
    """The ClassLabel that a feature is or has a list of, None for other features."""
    feature = feature.feature if isinstance(feature, tfds.features.Sequence) else feature
    return feature if isinstance(feature, tfds.features.ClassLabel) else None
