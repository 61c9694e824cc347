"""TFDS data sets, in tfrecord files (read in sequence) or ArrayRecord files (random access).

Records are read raw and parsed here, so that both kinds share one decoder with the other sources.
"""

import dataclasses
import difflib
import os

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data.host_tensorflow import tf
from vit_jax.errors import UserError


def is_registered(name):
    """Whether TFDS has code for a data set of this name."""
    return name.split(':')[0] in tfds.list_builders(with_community_datasets=False)


def open_tfds(name, data_dir, split):
    """A prepared TFDS data set with an image and a class label.

    Raises UserError for an unknown name, a set that is not prepared, an unknown split, or a set
    without image and label.
    """
    builder = _builder(name, os.path.expanduser(data_dir) or None)
    image_key, label_key = _image_and_label(builder)
    info = _split_info(builder, split)
    parser = _Parser(builder, image_key, label_key)
    # The format of the files, which may be another than the default of the builder.
    files = info.file_instructions
    if all('.array_record' in os.path.basename(file.filename) for file in files):
        return ArrayRecordSource(parser, files)
    return RecordFilesSource(parser, files)


class _Parser:
    """What both kinds of source share: from a serialised example to encoded image and label."""

    def __init__(self, builder, image_key, label_key):
        self.image_key, self.label_key = image_key, label_key
        # Only these two are parsed: other features may be large.
        self.features = tfds.features.FeaturesDict(
            {key: builder.info.features[key] for key in (image_key, label_key)}
        )
        self.class_names = tuple(builder.info.features[label_key].names)

    def __call__(self, record):
        example = self.features.deserialize_example(
            record, decoders={self.image_key: tfds.decode.SkipDecoding()}
        )
        return example[self.image_key], tf.cast(example[self.label_key], tf.int32)


class ArrayRecordSource:
    """A TFDS split in ArrayRecord files: any example at any time."""

    def __init__(self, parser, files):
        from array_record.python import array_record_data_source

        self.class_names, self._parse = parser.class_names, parser
        self._files = files
        self._records = array_record_data_source.ArrayRecordDataSource(files)
        self.num_examples = len(self._records)

    def fetch(self, indices):
        """Items of the examples: int64 [k] -> dict of [k]."""

        def read(indices):
            # The shape is given because numpy would not make an empty list a list of bytes.
            records = self._records.__getitems__(indices.tolist()) if indices.size else []
            return np.array(records, dtype=object)

        records = tf.numpy_function(read, [indices], tf.string, stateful=False)
        return {'record': tf.ensure_shape(records, indices.shape)}

    def load(self, item):
        """Encoded image and label of one item."""
        return self._parse(item['record'])

    def name_of(self, index):
        """How messages call an example."""
        return _record_name(self._files, index)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Runs of records in files; each array has one entry a run.

    filename: bytes; skip: records of the file before the run; take: its length; first: index in
    the split of its first example.
    """

    filename: np.ndarray
    skip: np.ndarray
    take: np.ndarray
    first: np.ndarray

    def share(self, process_index, process_count):
        """The part of one process: contiguous, disjoint, equal in length up to one example."""
        total = int(self.take.sum())
        begin = total * process_index // process_count
        end = total * (process_index + 1) // process_count
        cut = np.maximum(begin - self.first, 0)
        take = np.minimum(self.first + self.take, end) - (self.first + cut)
        keep = take > 0
        return Pieces(
            self.filename[keep],
            (self.skip + cut)[keep],
            take[keep],
            (self.first + cut)[keep],
        )


class RecordFilesSource:
    """A TFDS split in tfrecord files, which can only be read from their beginning."""

    def __init__(self, parser, files):
        self.class_names, self._parse = parser.class_names, parser
        self._files = files
        take = np.array([file.take for file in files], np.int64)
        self.pieces = Pieces(
            filename=np.array([os.fspath(file.filename) for file in files], dtype=object),
            skip=np.array([file.skip for file in files], np.int64),
            take=take,
            first=np.cumsum(take) - take,
        )
        self.num_examples = int(take.sum())

    def load(self, item):
        """Encoded image and label of one item."""
        return self._parse(item['record'])

    def name_of(self, index):
        """How messages call an example."""
        return _record_name(self._files, index)


def _record_name(files, index):
    for file in files:
        if index < file.take:
            return f'{file.filename} record {file.skip + index}'
        index -= file.take
    raise IndexError(index)


def _builder(name, data_dir):
    where = data_dir or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        on_disk = tf.io.gfile.listdir(where) if tf.io.gfile.isdir(where) else []
        names = tfds.list_builders(with_community_datasets=False)
        names += [entry.rstrip('/') for entry in on_disk]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        raise UserError(
            f"no data set '{name}'; TFDS (with data_dir '{where}') knows nothing of that name. "
            f'Nearest names: {", ".join(near) or "none"}. dataset.name may also be a directory '
            "with SPLIT/CLASS/image files (write './NAME' for one here) or 'digits'"
        ) from error
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"TFDS cannot open '{name}' in '{where}': {error}") from error
    if not builder.is_prepared():
        raise UserError(_not_prepared(name, builder, where))
    return builder


def _not_prepared(name, builder, where):
    message = (
        f"data set '{name}' is not prepared: looked in '{builder.data_path}'. To prepare it run\n"
        f'  tfds build {name} --data_dir={where}\n'
        'or set dataset.data_dir to where it is'
    )
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        message += (
            f"\nIts files must first be downloaded by hand to '{where}/downloads/manual' "
            f'(or --manual_dir): {" ".join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())}'
        )
    return message


def _image_and_label(builder):
    features = builder.info.features
    keys = builder.info.supervised_keys or ('image', 'label')
    if len(keys) == 2 and all(isinstance(key, str) and key in features for key in keys):
        image, label = (features[key] for key in keys)
        if isinstance(image, tfds.features.Image) and isinstance(label, tfds.features.ClassLabel):
            return keys
    kinds = ', '.join(f'{key} ({type(value).__name__})' for key, value in features.items())
    raise UserError(
        f"data set '{builder.info.full_name}' is not an image classification set: expected an "
        f'image (Image) and a label (ClassLabel), its features are: {kinds}'
    )


def _split_info(builder, split):
    try:
        return builder.info.splits[split]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"no split '{split}' in '{builder.info.full_name}'; its splits are: "
            f"{', '.join(builder.info.splits)} (a slice such as 'train[:90%]' is allowed)"
        ) from error
