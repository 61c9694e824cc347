"""The label of an example of a TFDS set: one of its features, or a function of features."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Float32, Int32

from vit_jax.data.host_tensorflow import tf
from vit_jax.errors import Kind, UserError, nearest_names


class Label(NamedTuple):
    """How to compute the label of an example.

    Attributes:
      feature: the name of the feature that the label is computed from.
      of: computes the label from the value of this feature.
      multi_label: whether the label is a list of labels.
    """

    feature: str
    class_names: tuple[str, ...]
    of: Callable[[Any], Int32[tf.Tensor, '*labels']]
    multi_label: bool = False


class _Function(NamedTuple):
    """A label that is computed from the features of a list of objects.

    Attributes:
      needs: the features of each object that the function uses.
      of: computes the label from the features of all objects.
      meaning: a description of the label for messages.
    """

    needs: tuple[str, ...]
    class_names: tuple[str, ...]
    of: Callable[[Mapping[str, tf.Tensor]], tf.Tensor]
    meaning: str


def _bin(value: Float32[tf.Tensor, ''], edges: Sequence[float]) -> Int32[tf.Tensor, '']:
    """The k with edges[k] < value <= edges[k + 1]; -1 or len(edges) - 1 outside the edges."""
    return tf.reduce_sum(tf.cast(tf.constant(edges, tf.float32) < value, tf.int32)) - 1


def _closest_vehicle(objects):
    """The distance of the closest car, van or truck (types 0 to 2); 1000 m if there is none."""
    distance = objects['location'][:, 2][objects['type'] < 3]
    return tf.reduce_min(tf.concat([distance, [1000.0]], 0))


# The labels of the Visual Task Adaptation Benchmark. The thresholds come from clevr.py and kitti.py
# in google-research/task_adaptation. KITTI's distances are in metres.
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
    """Returns the name of the image feature, and the Label that `wanted` names.

    Args:
      wanted: FEATURE, a ClassLabel or a Sequence of ClassLabels; FEATURE/N, which merges its
        classes into N groups of neighbours; one of FUNCTIONS; or '' for the set's own label.

    Raises:
      UserError: if the set has no label of this name. The message lists all labels.
    """
    features = info.features
    image, own_label = _image_and_label_features(info)
    has_image = image in features and isinstance(features[image], tfds.features.Image)
    if has_image:
        label = _label(features, wanted or own_label)
        if label is not None:
            return image, label
    possible = _possible_labels(features)
    if not has_image or not possible:
        kinds = ', '.join(f'{key} ({type(value).__name__})' for key, value in features.items())
        raise UserError(
            f"data set '{info.full_name}' is not an image classification set: expected an "
            'image (Image) and a label (ClassLabel, or a Sequence of them), but its features are: '
            f'{kinds}.',
            kind='content',
            value=info.full_name,
        )
    if wanted:
        kind: Kind = 'unknown'
        problem = f"'{info.full_name}' has no label {wanted!r}. {nearest_names(wanted, possible)}"
    else:
        kind = 'missing'
        problem = f"data set '{info.full_name}' does not state which feature is the label. "
    names = ', '.join(f'{name} ({meaning})' for name, meaning in possible.items())
    raise UserError(
        f'{problem}dataset.label (--label of vit_jax.evaluate) is one of: {names}; '
        'or FEATURE/N, which merges the classes of a feature into N groups of '
        'neighbours. Other features cannot be the label.',
        kind=kind,
        field='dataset.label',
        value=wanted,
    )


def _image_and_label_features(info):
    """The names of the image and the label in the set's own (image, label) pairs.

    They are 'image' and 'label' for a set without such pairs.
    """
    keys = info.supervised_keys or ()
    if len(keys) == 2 and all(isinstance(key, str) and key in info.features for key in keys):
        return keys
    return 'image', 'label'


def _label(features, wanted):
    """The Label with a name; None if there is no such label."""
    if wanted in features:
        classes = _class_label(features[wanted])
        if not classes:
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
    """The label whose classes are merged into groups of neighbours, as equal as possible.

    The groups are the same as in dsprites.py of google-research/task_adaptation.
    """
    if not 2 <= number <= len(names):
        raise UserError(
            f'dataset.label is {feature}/{number}: expected from 2 to {len(names)} groups, because '
            f'{feature} has {len(names)} classes.',
            kind='value',
            field='dataset.label',
            value=f'{feature}/{number}',
        )
    groups = (np.arange(len(names)) * number // len(names)).astype(np.int32)
    group_names = []
    for group in range(number):
        members = [name for name, k in zip(names, groups, strict=True) if k == group]
        if len(members) == 1:
            group_names.append(members[0])
        else:
            group_names.append(f'{members[0]}-{members[-1]}')
    # The first and last entries keep labels outside the classes outside the groups.
    table = tf.constant([-1, *groups, number], tf.int32)
    return Label(
        feature,
        tuple(group_names),
        lambda x: tf.gather(table, tf.clip_by_value(tf.cast(x, tf.int32), -1, len(names)) + 1),
    )


def _possible_labels(features):
    """The names of all labels of a set, each with its meaning."""
    meanings = {}
    for name, feature in sorted(features.items()):
        classes = _class_label(feature)
        if classes:
            meanings[name] = f'{classes.num_classes} classes'
    for name, function in FUNCTIONS.items():
        if _has_objects(features, function):
            meanings[name] = function.meaning
    return meanings


def _has_objects(features, function):
    """Whether a set has a list of objects with the features that a function needs."""
    if 'objects' not in features or not isinstance(features['objects'], tfds.features.Sequence):
        return False
    inner = features['objects'].feature
    if not isinstance(inner, tfds.features.FeaturesDict):
        return False
    return all(name in inner for name in function.needs)


def _class_label(feature):
    """The ClassLabel of a feature that is a ClassLabel or a list of them, else None."""
    if isinstance(feature, tfds.features.Sequence):
        feature = feature.feature
    if isinstance(feature, tfds.features.ClassLabel):
        return feature
    return None
