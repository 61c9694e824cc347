"""Small data sets on disk, shared by the tests."""

import numpy as np
from PIL import Image


def write_images(folder, classes, per_class, size=(16, 16), seed=0):
    """Writes FOLDER/CLASS/NNN.png, brighter for later classes; PNG keeps the pixels exactly."""
    rng = np.random.default_rng(seed)
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            image = rng.integers(0, 128, (*size, 3)) + 40 * k
            Image.fromarray(image.astype(np.uint8)).save(folder / name / f'{i:03}.png')


def prepare_tfds(data_dir, file_format, num_train=60, num_test=12):
    """Prepares the TFDS set 'dots' (train in 4 files) in data_dir, like a user's script."""
    import tensorflow_datasets as tfds

    class Dots(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = 'dots'
        VERSION = tfds.core.Version('1.0.0')

        def _info(self):
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict(
                    {
                        'image': tfds.features.Image(shape=(16, 16, 3), encoding_format='png'),
                        'label': tfds.features.ClassLabel(names=['ant', 'bee', 'cat']),
                    }
                ),
                supervised_keys=('image', 'label'),
            )

        def _split_generators(self, dl_manager):
            return {'train': self._examples(num_train, 1), 'test': self._examples(num_test, 2)}

        def _generate_examples(self):
            raise AssertionError('the splits have their own generators')

        def _examples(self, number, seed):
            rng = np.random.default_rng(seed)
            for i in range(number):
                image = rng.integers(0, 128, (16, 16, 3)) + 40 * (i % 3)
                yield i, {'image': image.astype(np.uint8), 'label': i % 3}

    builder = Dots(data_dir=str(data_dir), file_format=file_format)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=4))
    return data_dir
