"""Data sets with other labels: ImageNet-ReaL's lists in the order of files, or mapped classes."""

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
    """The source with the labels that the JSON file at `path` has.

    Args:
      source: a whole split of a directory.
      lists: one list of labels for each image, in the order of the names of the files; a label
        counts the names of the classes in sorted order. Both as in google-research/
        reassessed-imagenet, where images with an empty list are not scored.

    Raises UserError if these are no lists of labels of the classes, one for each image.
    """
    if not isinstance(source, DirectorySource):
        raise UserError(
            f'--labels={path} has labels in the order of file names: expected a '
            'directory of image files as the data set. Of TFDS sets, imagenet2012_real '
            'has the ReaL labels itself.'
        )
    if len(lists) != source.num_examples:
        raise UserError(
            f'--labels={path} has {len(lists)} lists of labels and the split has '
            f'{source.num_examples} images: expected a list for every image of a '
            'whole split, in the order of file names.'
        )
    names = [os.path.basename(source.name_of(k)) for k in range(len(lists))]
    order = sorted(range(len(names)), key=names.__getitem__)
    if twice := [a for a, b in itertools.pairwise(order) if names[a] == names[b]]:
        raise UserError(
            f'--labels={path} goes by the names of files, and {names[twice[0]]} occurs '
            'more than once: give every image a name of its own.'
        )
    standard = sorted(source.class_names)
    labels = {name: label for label, name in enumerate(source.class_names)}
    position = {k: labels[name] for k, name in enumerate(standard)}
    found: list[list[int]] = [[] for _ in lists]
    for number, (index, labels) in enumerate(zip(order, lists, strict=True)):
        if not isinstance(labels, list) or any(
            type(k) is not int or k not in position for k in labels
        ):
            raise UserError(
                f'--labels={path} has {str(labels):.80} as number {number}, for '
                f'{names[index]}: expected a list of whole numbers from 0 to '
                f'{len(standard) - 1}.'
            )
        found[index] = [position[k] for k in labels]
    packed = label_lists.pack(found)
    return RelabelledSource(
        source,
        source.class_names,
        lambda index, _: label_lists.multi_hot(
            label_lists.unpack(tf.gather(packed, index)), len(standard)
        ),
    )


def mapped(
    source: Source, mapping: Mapping[str, Any], class_names: Sequence[str], path: str
) -> Source:
    """The source with the classes of a model that the classes of its own are, as `mapping` says.

    Args:
      mapping: for names of classes of the source those of the model, in a list or with '; '
        between them, as ObjectNet has it; of a name the part before the first comma counts.
        Images of other classes have no label, and are not scored.
      class_names: of the model.
      path: of the mapping, for messages.

    Raises UserError if the mapping names no class of the source, or one that the model lacks.
    """
    position = {_word(name): k for k, name in enumerate(class_names)}
    mapping = {composed(name): names for name, names in mapping.items()}
    targets = np.zeros([len(source.class_names), len(class_names)], np.float32)
    for name, row in zip(source.class_names, targets, strict=True):
        names = mapping.get(composed(name), [])
        names = names.split(';') if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise UserError(
                f'{path} has {str(names):.80} for {name}: expected names of classes, '
                "in a list or with '; ' between them."
            )
        for other in names:
            if _word(other) not in position:
                raise UserError(
                    f'{path} has {other.strip()!r} for {name}, which is no class of '
                    'the weights. ' + nearest_names(_word(other), position)
                )
            row[position[_word(other)]] = 1
    if not targets.any():
        raise UserError(
            f'{path} says nothing of the classes of the data set, such as '
            f'{source.class_names[0]!r}: expected {{"CLASS OF THE DATA SET": "CLASS OF '
            'THE WEIGHTS; ANOTHER", ...}.'
        )
    table = tf.constant(targets)
    return RelabelledSource(source, class_names, lambda _, label: tf.gather(table, label))


def _word(name):
    return composed(name.partition(',')[0].strip().lower())


class RelabelledSource(WrappedSource):
    """A source with the labels that `targets` gives: 0 or 1 for each class."""

    def __init__(
        self,
        source: Source,
        class_names: Sequence[str],
        targets: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    ):
        """`targets` takes the index of an image and its own label."""
        super().__init__(source)
        self.class_names = tuple(class_names)
        self.multi_label = True
        self.labels = None  # known when they are read
        self.label_lists = None
        self._targets = targets

    def load(self, item):
        encoded, label = self.source.load(item)
        return encoded, self._targets(item['index'], label)
