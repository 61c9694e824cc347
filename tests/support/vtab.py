"""Small copies of the TFDS sets of VTAB, with real features and sizes but few records."""

import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from tests.support.batches import write_records

# Examples by split, from data/*_test.py of google-research/task_adaptation.
SIZES = {
    'caltech101': {'train': 3060, 'test': 6084},
    'cifar100': {'train': 50_000, 'test': 10_000},
    'dtd': {'train': 1880, 'validation': 1880, 'test': 1880},
    'oxford_flowers102': {'train': 1020, 'validation': 1020, 'test': 6149},
    'oxford_iiit_pet': {'train': 3680, 'test': 3669},
    'sun397/tfds': {'train': 76_128, 'validation': 10_875, 'test': 21_750},
    'svhn_cropped': {'train': 73_257, 'test': 26_032},
    'patch_camelyon': {'train': 262_144, 'validation': 32_768, 'test': 32_768},
    'eurosat/rgb': {'train': 27_000},
    'resisc45': {'train': 31_500},
    'diabetic_retinopathy_detection/btgraham-300': {
        'train': 35_126,
        'validation': 10_906,
        'test': 42_670,
    },
    'clevr': {'train': 70_000, 'validation': 15_000, 'test': 15_000},
    'dmlab': {'train': 65_550, 'validation': 22_628, 'test': 22_735},
    'dsprites': {'train': 737_280},
    'kitti': {'train': 6347, 'validation': 423, 'test': 711},
    'smallnorb': {'train': 24_300, 'test': 24_300},
}


def write(root, name, sizes=None):
    """Writes a set below `root`.

    Args:
      root: the data_dir.
      name: name of the set.
      sizes: number of examples by split. By default each split has 12 examples, but its metadata
        have the real number.

    Returns:
      The first examples of each split.
    """
    builder = tfds.builder(name, data_dir=str(root))
    folder = root / builder.data_path.relative_to(root)
    folder.mkdir(parents=True)
    features = builder.info.features
    rng = np.random.default_rng(0)
    examples = [
        {key: _value(feature, number, rng) for key, feature in features.items()}
        for number in range(max(sizes.values()) if sizes else 12)
    ]
    records = [features.serialize_example(features.encode_example(example)) for example in examples]
    splits = []
    for split, size in (sizes or SIZES[name.split(':')[0]]).items():
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder, dataset_name=builder.name, split=split, filetype_suffix='tfrecord'
        )
        write_records(str(template.sharded_filepaths(1)[0]), records[:size], 'tfrecord')
        splits.append(
            tfds.core.SplitInfo(
                name=split, shard_lengths=[size], num_bytes=0, filename_template=template
            )
        )
    builder.info.set_splits(tfds.core.splits.SplitDict(splits))
    builder.info.write_to_directory(folder)
    return examples


def _value(feature, number, rng):
    """A random value of a feature."""
    if isinstance(feature, tfds.features.Image):
        height, width, channels = (side or 8 for side in feature.shape)
        channels = channels if feature.shape[-1] else 3
        pixels = rng.integers(0, 2, (height, width, channels), np.uint8)
        if feature.shape[-1]:
            return pixels
        return _encoded(pixels)
    if isinstance(feature, tfds.features.ClassLabel):
        return int(rng.integers(feature.num_classes))
    if isinstance(feature, tfds.features.Sequence):
        return [_value(feature.feature, number, rng) for _ in range(3 + number % 8)]
    if isinstance(feature, tfds.features.FeaturesDict):
        return {key: _value(inner, number, rng) for key, inner in feature.items()}
    if isinstance(feature, tfds.features.BBoxFeature):
        return tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
    if isinstance(feature, tfds.features.Text):
        return f'{number}'
    # Distances: 7 to 12 in CLEVR, up to 80 m in KITTI.
    distances = [rng.uniform(7, 12), rng.uniform(1, 80)]
    return rng.choice(distances, size=feature.shape).astype(np.float32)


def _encoded(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'PNG')
    buffer.seek(0)
    return buffer
