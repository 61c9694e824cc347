"""TFDS data sets in tfrecord files (read in sequence) or ArrayRecord files (random access).

Records are read without TFDS's decoding, so that all sources share one decoder of images.
"""

import os
from collections.abc import Sequence

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int32

from vit_jax.data import label_lists, tfds_labels
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.sequential import Pieces
from vit_jax.data.tensorflow_errors import STORAGE_ERRORS
from vit_jax.errors import MissingDataError, UserError, nearest_names

_BINARY = ('dsprites',)  # sets whose pixels are 0 and 1, which is shown as white


def is_registered(name: str) -> bool:
    """Whether TFDS has code for a data set of this name."""
    return name.split(':')[0] in tfds.list_builders(with_community_datasets=False)


class TfdsSource:
    """A split of a TFDS data set that is prepared and has an image and one or more class labels.

    It is in ArrayRecord files, or in tfrecord files, which are read from their beginning. `label`
    is that of tfds_labels.image_and_label.
    """

    unreadable: dict[int, str] = {}
    labels: Int32[np.ndarray, ' num_examples'] | None = None
    label_lists: Sequence[Sequence[int]] | None = None
    stratified = False

    def __init__(self, name: str, data_dir: str, split: str, label: str):
        info = _builder(name, os.path.expanduser(data_dir) or None).info
        self._image_key, self._label = tfds_labels.image_and_label(info, label)
        # Only these two are parsed: other features may be large.
        self._features = tfds.features.FeaturesDict(
            {key: info.features[key] for key in (self._image_key, self._label.feature)}
        )
        self.multi_label, self.class_names = self._label.multi_label, self._label.class_names
        self._is_binary = info.name in _BINARY
        try:
            files = info.splits[split].file_instructions
        except (KeyError, ValueError) as error:
            sizes = ', '.join(
                f'{name} ({x.num_examples} examples)' for name, x in info.splits.items()
            )
            raise UserError(
                f"no split '{split}' in '{info.full_name}'; its splits are: {sizes}, or slices of "
                "them, such as 'train[:90%]'"
            ) from error
        files = [file for file in files if file.take > 0]  # of train[9:3] it is -6
        take = np.array([file.take for file in files], np.int64)
        self.num_examples = int(take.sum())
        self._runs = Pieces(
            filename=np.array([os.fspath(file.filename) for file in files], dtype=object),
            skip=np.array([file.skip for file in files], np.int64),
            take=take,
            first=np.cumsum(take) - take,
        )
        self._metadata = (
            info.full_name,
            {
                name: (part.num_bytes, list(part.shard_lengths))
                for name, part in info.splits.items()
            },
        )
        _check_files(self._runs.filename, info.full_name)
        self.pieces: Pieces | None = self._runs
        # The files decide, because their format may differ from the default of the builder.
        if take.size and all(
            '.array_record' in os.path.basename(name) for name in self._runs.filename
        ):
            from array_record.python import array_record_data_source

            self.pieces = None
            self._records = array_record_data_source.ArrayRecordDataSource(files)

    def fetch(self, indices):
        def read(indices):
            # With a dtype, because an empty list would become an array of floats.
            records = self._records.__getitems__(indices.tolist()) if indices.size else []
            return np.array(records, dtype=object)

        records = tf.numpy_function(read, [indices], tf.string, stateful=False)
        return {'record': tf.ensure_shape(records, indices.shape)}

    def load(self, item):
        example = self._features.deserialize_example(
            item['record'], decoders={self._image_key: tfds.decode.SkipDecoding()}
        )
        image, label = example[self._image_key], self._label.of(example[self._label.feature])
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
        name, splits = self._metadata
        for split, (num_bytes, shard_lengths) in sorted(splits.items()):
            yield name, f'records in the files of {split}: {shard_lengths}', num_bytes
        for path, skip, take in zip(*self._runs[:3], strict=True):
            yield name, f'{os.path.basename(path)} from record {skip}', int(take)


def _check_files(paths, name):
    """Raises MissingDataError unless all are there: reading may come to the last one much later."""
    folders = set(map(os.path.dirname, paths))
    there = {
        os.path.join(folder, file) for folder in folders for file in tf.io.gfile.listdir(folder)
    }
    if missing := [path for path in paths if path not in there]:
        raise MissingDataError(
            f"'{name}' lacks {len(missing)} of {len(paths)} files, the first of them {missing[0]}: "
            'copy it again from where it is whole, or remove its folder and prepare it again'
        )


def _builder(name, data_dir):
    where = data_dir or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        on_disk = tf.io.gfile.listdir(where) if tf.io.gfile.isdir(where) else []
        names = tfds.list_builders(with_community_datasets=False)
        names += [entry.rstrip('/') for entry in on_disk]
        raise MissingDataError(
            f"dataset.name is '{name}': TFDS knows no data set of that name, and there is none in "
            f"data_dir '{where}'. {nearest_names(name, names)}dataset.name may also be a directory "
            "with SPLIT/CLASS/image files (./NAME in the current directory) or 'digits'"
        ) from error
    except STORAGE_ERRORS:
        raise
    except Exception as error:  # of files that may be damaged, and code of others
        raise MissingDataError(
            f"TFDS cannot open '{name}' in '{where}': {error}. If its files are "
            'damaged or incomplete, copy them again, or remove its folder '
            f'and prepare it again:\n  {_preparing(name, where)}'
        ) from error
    if builder.is_prepared():
        return builder
    message = (
        f"data set '{name}' is not prepared: looked in '{builder.data_path}'. To prepare "
        f'it, run\n  {_preparing(name, where)}\n'
        'or set dataset.data_dir to the directory that contains it'
    )
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        message += (
            f"\nIts files must first be downloaded by hand to '{where}/downloads/manual' "
            f'(or --manual_dir): {" ".join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())}'
        )
    raise MissingDataError(message)


def _preparing(name, where):
    """The command; that of TFDS, `tfds build`, needs Apache Beam, which few data sets do."""
    return (
        f'python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}, '
        f'data_dir={str(where)!r}).download_and_prepare()"'
    )
