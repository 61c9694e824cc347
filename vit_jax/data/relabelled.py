"""Data sets with other labels: lists in the order of files (ImageNet-ReaL), or mapped classes."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import label_lists
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.source import Source, WrappedSource
from vit_jax.data.sources import DirectorySource
from vit_jax.errors import UserError, nearest_names
from vit_jax.files import composed


def relabelled(source: Source, lists: list[Any], path: str) -> Source:
    """The source with the labels of a JSON file, in the format of ImageNet-ReaL.

    Args:
      source: a whole split of a directory.
      lists: one list of labels for each image, in the order of the file names. A label is a
        position among the sorted names of the classes. Images with an empty list are not scored.
        This is the format of google-research/reassessed-imagenet.
      path: the path of the file, for messages.

    Raises:
      UserError: unless there is one list of valid labels for each image.
    """
    if not isinstance(source, DirectorySource):
        raise UserError(
            f'--labels={path} has labels in the order of file names: expected a '
            'directory of image files as the data set. For ReaL labels without a directory, use '
            'the TFDS set imagenet2012_real.',
            kind='inapplicable',
            field='--labels',
            file=path,
        )
    if len(lists) != source.num_examples:
        raise UserError(
            f'--labels={path} has {len(lists)} lists of labels and the split has '
            f'{source.num_examples} images: expected a list for every image of a '
            'whole split, in the order of file names.',
            kind='content',
            field='--labels',
            file=path,
            value=len(lists),
        )
    order = _order_of_names(source, path)
    labels_by_image: list[list[int]] = [[] for _ in lists]
    label_of_name = {name: label for label, name in enumerate(source.class_names)}
    label_of_position = [label_of_name[name] for name in sorted(source.class_names)]
    for number, (index, positions) in enumerate(zip(order, lists, strict=True)):
        if not _are_positions(positions, len(label_of_position)):
            name = os.path.basename(source.name_of(index))
            raise UserError(
                f'--labels={path} has {str(positions):.80} as number {number}, for {name}: '
                f'expected a list of whole numbers from 0 to {len(label_of_position) - 1}.',
                kind='content',
                field='--labels',
                file=path,
                value=positions,
            )
        labels_by_image[index] = [label_of_position[k] for k in positions]
    packed = label_lists.pack(labels_by_image)
    num_classes = len(source.class_names)

    def targets(index, _):
        return label_lists.multi_hot(label_lists.unpack(tf.gather(packed, index)), num_classes)

    return RelabelledSource(source, source.class_names, targets)


def _order_of_names(source, path):
    """The indices of the images, sorted by file name; UserError if two names are equal."""
    names = [os.path.basename(source.name_of(index)) for index in range(source.num_examples)]
    order = sorted(range(len(names)), key=names.__getitem__)
    for index, following in itertools.pairwise(order):
        if names[index] == names[following]:
            raise UserError(
                f'--labels={path} relies on the names of files, and {names[index]} occurs '
                'more than once: give every image a unique name.',
                kind='content',
                field='--labels',
                file=path,
                value=names[index],
            )
    return order


def _are_positions(value, num_classes):
    """Whether a value of a JSON file is a list of whole numbers from 0 to num_classes - 1."""
    return isinstance(value, list) and all(type(k) is int and 0 <= k < num_classes for k in value)


def mapped(
    source: Source, mapping: Mapping[str, Any], class_names: Sequence[str], path: str
) -> Source:
    """The source with the classes of a model in place of its own classes.

    Args:
      mapping: maps a class name of the source to class names of the model, in a list or in a text
        with '; ' between them, as in ObjectNet. Only the part of a name before the first comma
        counts. Images of classes that are not in `mapping` have no label and are not scored.
      class_names: the classes of the model.
      path: the path of the mapping, for messages.

    Raises:
      UserError: if the mapping has no class of the source, or names a class that is not in
        `class_names`.
    """
    position = {_first_synonym(name): k for k, name in enumerate(class_names)}
    mapping = {composed(name): names for name, names in mapping.items()}
    targets = np.zeros([len(source.class_names), len(class_names)], np.float32)
    for name, row in zip(source.class_names, targets, strict=True):
        for other in _names_in(mapping.get(composed(name), []), name, path):
            synonym = _first_synonym(other)
            if synonym not in position:
                raise UserError(
                    f'{path} has {other.strip()!r} for {name}, which is not a class of '
                    f'the weights. {nearest_names(synonym, position)}'.rstrip(),
                    kind='unknown',
                    file=path,
                    value=other,
                )
            row[position[synonym]] = 1
    if not targets.any():
        raise UserError(
            f'{path} has none of the classes of the data set, such as '
            f'{source.class_names[0]!r}: expected {{"CLASS OF THE DATA SET": "CLASS OF '
            'THE WEIGHTS; ANOTHER", ...}.',
            kind='content',
            file=path,
        )
    table = tf.constant(targets)
    return RelabelledSource(source, class_names, lambda _, label: tf.gather(table, label))


def _names_in(value, name, path):
    """The list of names in a value of the mapping; UserError if the value has another type."""
    names = value.split(';') if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise UserError(
            f'{path} has {str(names):.80} for {name}: expected names of classes, '
            "in a list or with '; ' between them.",
            kind='content',
            file=path,
            value=names,
        )
    return names


def _first_synonym(name):
    return composed(name.partition(',')[0].strip().lower())


class RelabelledSource(WrappedSource):
    """A source with labels from a function `targets`: 0 or 1 for each class."""

    def __init__(
        self,
        source: Source,
        class_names: Sequence[str],
        targets: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    ):
        """`targets` maps the index of an image and its original label to its new label."""
        super().__init__(source)
        self.class_names = tuple(class_names)
        self.multi_label = True
        self.labels = None  # known only when they are read
        self.label_lists = None
        self._targets = targets

    def load(self, item):
        encoded, label = self.source.load(item)
        return encoded, self._targets(item['index'], label)
