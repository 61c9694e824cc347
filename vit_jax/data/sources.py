"""Where examples come from: the built-in digits, a directory of images, or a TFDS data set.

Every source has `num_examples`, `class_names`, `name_of(index)` for messages, and
`load(item) -> (encoded string scalar, int label)`, which runs inside the input graph for one item.
A source with random access makes items with `fetch(indices)`: int64 [k] -> dict of tensors [k].
A sequential source instead has `pieces`, the runs of records in its files, and its items are
{'record': serialised example}.
"""

import hashlib
import os
import re

import numpy as np
import tensorflow as tf

from vit_jax.errors import UserError

_SUFFIXES = ('.jpg', '.jpeg', '.png', '.gif', '.bmp')


def open_source(dataset, split, class_names=None):
    """Opens `split` ('train', 'train[:90%]', ...) of the data set that config.dataset describes.

    dataset: has `name` ('digits', a directory or a TFDS name) and `data_dir` (TFDS; '' = default).
    class_names: for a directory, the classes whose place in this tuple is the label; give those of
    the train split when opening another one.
    Raises UserError if the data or the split is not there or not usable.
    """
    path = os.path.expanduser(dataset.name)
    if dataset.name == 'digits':
        source = DigitsSource(split)
    elif re.search(r'^\.{0,2}/|[/\\]$', dataset.name) or tf.io.gfile.isdir(path):
        source = DirectorySource(path, split, class_names)
    elif ('/' in dataset.name or os.sep in dataset.name) and not _is_tfds_config(dataset.name):
        source = DirectorySource(path, split, class_names)
    else:
        from vit_jax.data.tfds_source import open_tfds

        source = open_tfds(dataset.name, dataset.data_dir, split)
    if not source.num_examples:
        raise UserError(f"split '{split}' of '{dataset.name}' holds no example; take a larger slice")
    return source
