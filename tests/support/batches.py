"""Small data sets whose images encode their number, and their batches."""

import dataclasses
import io
import itertools
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from vit_jax.data import pipeline, sources, subsets

COUNT = 53  # examples of the small sets; a prime, so that batches and windows are never full
KINDS = ('digits', 'directory', 'tfrecord', 'array_record')
PREPROCESS = MappingProxyType(
    {
        'fit': 'cover',
        'crop_ratio': 0.9,
        'resize': 'bilinear',
        'antialias': True,
        'mean': (0.5, 0.5, 0.5),
        'std': (0.5, 0.5, 0.5),
    }
)


def encoded(value, kind='PNG'):
    """A picture whose colour encodes its number."""
    buffer = io.BytesIO()
    Image.new('RGB', (9, 7), (value, value, value)).save(buffer, kind)
    return buffer.getvalue()


@dataclasses.dataclass
class Data:
    """A data set and its settings."""

    name: str
    data_dir: str = ''
    batch_size: int = 8
    image_size: tuple[int, int] = (6, 5)
    seed: int = 3
    crop: str = 'inception'
    preprocess: Mapping = dataclasses.field(default_factory=lambda: PREPROCESS)
    num_ops: int = 0  # of RandAugment
    balance: float = 0.0
    subset: str = ''
    shuffle_buffer: int = 10
    max_broken_fraction: float = 0.5

    def source(self, split='train'):
        source = sources.open_source(self.name, split, data_dir=self.data_dir)
        return subsets.subset(source, self.subset, split)

    def batches(self, count, start=0, process=0, processes=1, split='train'):
        """The first training batches from step `start`."""
        return list(itertools.islice(self.training(start, process, processes, split), count))

    def training(self, start=0, process=0, processes=1, split='train'):
        augment = {
            'crop': self.crop,
            'min_area': 0.3,
            'pad': 0,
            'flip': True,
            'resize': 'same',
            'randaugment': {'num_ops': self.num_ops, 'magnitude': 10, 'translate': 2, 'cutout': 1},
        }
        settings = pipeline.TrainSettings(
            augment=augment,
            seed=self.seed,
            shuffle_buffer=self.shuffle_buffer,
            share=(process, processes),
            balance=self.balance,
            **self._common(),
        )
        return pipeline.train_batches(self.source(split), settings, start)

    def evaluation(self, process=0, processes=1, split='train'):
        return pipeline.eval_batches(
            self.source(split), share=(process, processes), **self._common()
        )

    def evaluated(self, process=0, processes=1, split='train'):
        """All evaluation batches."""
        return list(self.evaluation(process, processes, split))

    def _common(self):
        return {
            'batch_size': self.batch_size,
            'image_size': self.image_size,
            'preprocess': self.preprocess,
            'files_at_once': 16,
            'max_broken_fraction': self.max_broken_fraction,
        }


def make(kind, root, **settings):
    """Writes the data set of a kind below `root`."""
    if kind == 'digits':
        return Data('digits', batch_size=200, **settings)
    if kind == 'directory':
        return write_directory(root, **settings)
    return write_tfds(root, kind, **settings)


def write_directory(root, count=COUNT, **settings):
    for number in range(count):
        folder = root / 'train' / 'ab'[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{number:03}.png').write_bytes(encoded(number))
    return Data(str(root), **settings)


def write_tfds(root, file_format, count=COUNT, files=5, **settings):
    """Writes a TFDS set whose builder class does not exist."""
    features = tfds.features.FeaturesDict(
        {
            'image': tfds.features.Image(shape=(None, None, 3)),
            'label': tfds.features.ClassLabel(names=['a', 'b']),
            'number': tfds.features.Scalar(np.int64),
        }
    )
    numbers = np.array_split(np.arange(count), files)
    shards = [
        [
            features.serialize_example(
                {'image': io.BytesIO(encoded(i)), 'label': i % 2, 'number': i}
            )
            for i in shard
        ]
        for shard in numbers
    ]
    write_tfds_files(root, 'small', file_format, features, shards, ('image', 'label'))
    return Data('small', str(root), **settings)


def write_tfds_files(root, name, file_format, features, shards, supervised_keys=None):
    path = root / name / '1.0.0'
    path.mkdir(parents=True)
    template = tfds.core.ShardedFileTemplate(
        data_dir=path, dataset_name=name, split='train', filetype_suffix=file_format
    )
    for filename, examples in zip(template.sharded_filepaths(len(shards)), shards, strict=True):
        write_records(str(filename), examples, file_format)
    split = tfds.core.SplitInfo(
        name='train',
        shard_lengths=[len(shard) for shard in shards],
        num_bytes=0,
        filename_template=template,
    )
    tfds.folder_dataset.write_metadata(
        data_dir=path,
        features=features,
        split_infos=[split],
        supervised_keys=supervised_keys,
        check_data=False,  # the check cannot read ArrayRecord
    )


def write_records(filename, examples, file_format):
    if file_format == 'tfrecord':
        with tf.io.TFRecordWriter(filename) as writer:
            for example in examples:
                writer.write(example)
    else:
        from array_record.python import array_record_module

        writer = array_record_module.ArrayRecordWriter(filename, 'group_size:1')
        for example in examples:
            writer.write(example)
        writer.close()


def break_files(data, broken):
    """Damages the files with these numbers in a directory, each in another way."""
    damage = [
        b'',
        b'no image',
        encoded(1)[:50],
        encoded(1, 'JPEG')[:-300],
        encoded(1, 'WEBP')[:-20],
    ]
    for kind, number in enumerate(broken):
        name = f'{data.name}/train/{"ab"[number % 2]}/{number:03}.png'
        with open(name, 'wb') as file:
            file.write(damage[kind % len(damage)])


def break_records(root, broken):
    """Damages the examples with these numbers in tfrecord files."""
    for path in root.glob('small/1.0.0/*.tfrecord-*'):
        damaged = []
        for record in tf.data.TFRecordDataset(str(path)):
            example = tf.train.Example.FromString(record.numpy())
            if example.features.feature['number'].int64_list.value[0] in broken:
                example.features.feature['image'].bytes_list.value[0] = b'damaged'
            damaged.append(example.SerializeToString())
        write_records(str(path), damaged, 'tfrecord')


def numbers(batches):
    """The numbers of the images in batches, see `encoded`, in order."""
    result = []
    for batch in batches:
        images = batch['image'][batch['mask']]
        result += list(np.round(images[:, 0, 0, 0] * 127.5 + 127.5))
    return result


def assert_equal(batches, expected):
    """Asserts that batches are bit-identical."""
    assert len(batches) == len(expected)
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert sorted(batch) == sorted(expected_batch) == ['image', 'label', 'mask']
        for key in batch:
            np.testing.assert_array_equal(batch[key], expected_batch[key])
