"""TFDS data sets in tfrecord files (read in sequence) or ArrayRecord files (random access).

Images are not decoded by TFDS, so that all sources share one decoder. Labels are known only when
they are read. A fold is therefore a slice of records, which TFDS shuffled when it wrote them.
"""

import functools
import operator
import os
from collections.abc import Sequence

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int32

from vit_jax.data import folds, label_lists, tfds_labels
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.sequential import Pieces
from vit_jax.data.tensorflow_errors import STORAGE_ERRORS
from vit_jax.errors import MissingDataError, UserError, nearest_names

_BINARY = ('dsprites',)  # sets whose pixels are 0 and 1; 1 is shown as white


def is_registered(name: str) -> bool:
    """Whether TFDS has code for a data set of this name."""
    return name.split(':')[0] in tfds.list_builders(with_community_datasets=False)


def split_names(name: str, data_dir: str = '') -> list[str]:
    """The splits of a prepared set, in its own order.

    Raises:
      MissingDataError: if the set is unknown or not prepared.
    """
    return list(_builder(name, os.path.expanduser(data_dir) or None).info.splits)


class TfdsSource:
    """A split of a prepared TFDS data set with an image and one or more class labels.

    Args:
      data_dir: the directory of the TFDS sets; '' is the default of TFDS.
      label: `wanted` of tfds_labels.image_and_label.
    """

    unreadable: dict[int, str] = {}
    labels: Int32[np.ndarray, ' num_examples'] | None = None
    label_lists: Sequence[Sequence[int]] | None = None
    stratified = False

    def __init__(self, name: str, data_dir: str, split: str, label: str):
        info = _builder(name, os.path.expanduser(data_dir) or None).info
        self._image_key, self._label = tfds_labels.image_and_label(info, label)
        # Only these two features are parsed: others may be large.
        self._features = tfds.features.FeaturesDict(
            {key: info.features[key] for key in (self._image_key, self._label.feature)}
        )
        self.multi_label = self._label.multi_label
        self.class_names = self._label.class_names
        self._is_binary = info.name in _BINARY
        files = _files_of_split(info, split)
        self._runs = _runs(files)
        self.num_examples = int(self._runs.take.sum())
        self._full_name = info.full_name
        self._metadata_of_splits = {
            name: (part.num_bytes, list(part.shard_lengths)) for name, part in info.splits.items()
        }
        _check_files(self._runs.filename, info.full_name)
        self.pieces: Pieces | None = self._runs
        # The names of the files decide, because the builder may have another default format.
        names = [os.path.basename(path) for path in self._runs.filename]
        if names and all('.array_record' in name for name in names):
            from array_record.python import array_record_data_source

            self.pieces = None
            self._records = array_record_data_source.ArrayRecordDataSource(files)

    def fetch(self, indices):
        def read(indices):
            records = self._records.__getitems__(indices.tolist()) if indices.size else []
            # With a dtype, because an empty list would become an array of floats.
            return np.array(records, dtype=object)

        records = tf.numpy_function(read, [indices], tf.string, stateful=False)
        return {'record': tf.ensure_shape(records, indices.shape)}

    def load(self, item):
        example = self._features.deserialize_example(
            item['record'], decoders={self._image_key: tfds.decode.SkipDecoding()}
        )
        image = example[self._image_key]
        label = self._label.of(example[self._label.feature])
        if self._is_binary:
            image = tf.io.encode_png(255 * tf.io.decode_png(image))
        if self.multi_label:
            return image, label_lists.multi_hot(label, len(self.class_names))
        return image, label_lists.checked(label, len(self.class_names))

    def name_of(self, index):
        filename, skip, _, first = self._runs
        run = np.searchsorted(first, index, side='right') - 1
        return f'{filename[run]} record {skip[run] + index - first[run]}'

    def restore(self, index):
        return False

    def listing(self):
        for split, (num_bytes, shard_lengths) in sorted(self._metadata_of_splits.items()):
            name = f'records in the files of {split}: {shard_lengths}'
            yield self._full_name, name, num_bytes
        runs = self._runs
        for path, skip, take in zip(runs.filename, runs.skip, runs.take, strict=True):
            yield self._full_name, f'{os.path.basename(path)} from record {skip}', int(take)


def _files_of_split(info, split):
    """The files of a split, with the records to skip and take; UserError if there is none."""
    part, fold = folds.parse(split)
    try:
        if fold is not None:
            folds.require_full(fold, info.splits[part].num_examples, split)
            of_folds = tfds.even_splits(part, fold.num_folds)
            part = functools.reduce(operator.add, [of_folds[k - 1] for k in fold.numbers()])
        files = info.splits[part].file_instructions
    except (KeyError, ValueError) as error:
        sizes = ', '.join(
            f'{name} ({part.num_examples} examples)' for name, part in info.splits.items()
        )
        raise UserError(
            f"no split '{split}' in '{info.full_name}'; its splits are: {sizes}, or slices of "
            "them, such as 'train[:90%]'.",
            kind='unknown',
            value=split,
        ) from error
    return [file for file in files if file.take > 0]  # train[9:3] takes -6 records


def _runs(files):
    take = np.array([file.take for file in files], np.int64)
    return Pieces(
        filename=np.array([os.fspath(file.filename) for file in files], dtype=object),
        skip=np.array([file.skip for file in files], np.int64),
        take=take,
        first=np.cumsum(take) - take,
    )


def _check_files(paths, name):
    """Raises MissingDataError unless all files exist; training may read some only hours later."""
    existing = set()
    for folder in set(map(os.path.dirname, paths)):
        existing.update(os.path.join(folder, file) for file in tf.io.gfile.listdir(folder))
    missing = [path for path in paths if path not in existing]
    if missing:
        raise MissingDataError(
            f"'{name}' has no {missing[0]}: {len(missing)} of {len(paths)} files are missing. Copy "
            'the data set again from an intact copy, or remove its folder and prepare it again.',
            file=missing[0],
            value=len(missing),
        )


def _builder(name, data_dir):
    """The builder of a prepared set; MissingDataError if the set is unknown or not prepared."""
    where = data_dir or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        names = tfds.list_builders(with_community_datasets=False)
        if tf.io.gfile.isdir(where):
            names += [entry.rstrip('/') for entry in tf.io.gfile.listdir(where)]
        raise MissingDataError(
            f"dataset.name is '{name}': TFDS has no data set with this name, and there is none in "
            f"data_dir '{where}'. {nearest_names(name, names)}dataset.name may also be a directory "
            "with SPLIT/CLASS/image files (./NAME in the current directory) or 'digits'.",
            field='dataset.name',
            value=name,
        ) from error
    except STORAGE_ERRORS:
        raise
    except Exception as error:  # the files may be damaged, and the code of a set may raise anything
        raise MissingDataError(
            f"TFDS cannot open '{name}' in '{where}': {error}. If its files are "
            'damaged or incomplete, copy them again, or remove its folder '
            f'and prepare it again:\n  {_prepare_command(name, where)}',
            file=where,
            value=name,
        ) from error
    if builder.is_prepared():
        return builder
    message = (
        f"data set '{name}' is not prepared in '{builder.data_path}'. To prepare it, run\n"
        f'  {_prepare_command(name, where)}\n'
        'or set dataset.data_dir to the directory that contains it.'
    )
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        message += (
            f"\nIts files must first be downloaded by hand to '{where}/downloads/manual' "
            f'(or --manual_dir): {" ".join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())}'
        )
    raise MissingDataError(message, file=builder.data_path, value=name)


def _prepare_command(name, where):
    """The command that prepares a set. `tfds build` would need Apache Beam, which few sets need."""
    return (
        f'python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}, '
        f'data_dir={str(where)!r}).download_and_prepare()"'
    )
