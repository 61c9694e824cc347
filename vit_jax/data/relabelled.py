"""A directory of images with other labels, such as ImageNet-ReaL's: lists in the order of files."""

import os
from typing import Any

from vit_jax.data import label_lists
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.sources import DirectorySource, Source
from vit_jax.errors import UserError


class Relabelled:
    """A source whose images have these lists of labels, by index, and no others."""

    multi_label = True
    labels = None  # known when they are read

    def __init__(self, source: Source, lists: list[list[int]]):
        self.num_examples, self.class_names = source.num_examples, source.class_names
        self.pieces, self.unreadable = source.pieces, source.unreadable
        self.fetch, self.name_of, self._source = source.fetch, source.name_of, source
        self._labels = label_lists.pack(lists)

    def load(self, item: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """As of every source; the item has its index."""
        labels = label_lists.unpack(tf.gather(self._labels, item['index']))
        return self._source.load(item)[0], label_lists.multi_hot(labels, len(self.class_names))


def relabelled(source: Source, lists: list[Any], path: str) -> Relabelled:
    """The source with the labels that the JSON file at `path` has.

    Args:
      source: a whole split of a directory.
      lists: one list of labels for each image, in the order of the names of the files; a label
        counts the names of the classes in sorted order. Both as in google-research/
        reassessed-imagenet, where images with an empty list are not scored.

    Raises UserError if these are no lists of labels of the classes, one for each image.
    """
    if not isinstance(source, DirectorySource):
        raise UserError(f'--labels={path} has labels in the order of file names: expected a '
                        'directory of image files as the data set. Of TFDS sets, imagenet2012_real '
                        'has the ReaL labels itself.')
    if len(lists) != source.num_examples:
        raise UserError(f'--labels={path} has {len(lists)} lists of labels and the split has '
                        f'{source.num_examples} images: expected a list for every image of a '
                        'whole split, in the order of file names.')
    names = [os.path.basename(source.name_of(k)) for k in range(len(lists))]
    order = sorted(range(len(names)), key=names.__getitem__)
    if twice := [a for a, b in zip(order, order[1:], strict=False) if names[a] == names[b]]:
        raise UserError(f'--labels={path} goes by the names of files, and {names[twice[0]]} occurs '
                        'more than once: give every image a name of its own.')
    standard = sorted(source.class_names)
    position = {k: source.class_names.index(name) for k, name in enumerate(standard)}
    found = [[]] * len(lists)
    for number, (index, labels) in enumerate(zip(order, lists, strict=True)):
        if not isinstance(labels, list) or any(type(k) is not int or k not in position
                                               for k in labels):
            raise UserError(f'--labels={path} has {str(labels):.80} as number {number}, for '
                            f'{names[index]}: expected a list of whole numbers from 0 to '
                            f'{len(standard) - 1}.')
        found[index] = [position[k] for k in labels]
    return Relabelled(source, found)
