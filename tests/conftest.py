"""Small data sets on disk and a way to run the real command, shared by the tests."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Before JAX starts: tests of sharding spread over eight CPU devices, all others use the first.
# The workers of pytest-xdist find in the environment what this file set in their parent.
SINGLE_DEVICE_FLAGS = re.sub(r' ?--xla_force_host_platform_device_count=\d+', '',
                             os.environ.get('XLA_FLAGS', ''))
os.environ['XLA_FLAGS'] = f'{SINGLE_DEVICE_FLAGS} --xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
# Tests compile the same steps again and again. Processes that they start do without the cache.
CACHE = tempfile.TemporaryDirectory(prefix='vit_jax_test_')
os.environ['JAX_COMPILATION_CACHE_DIR'] = CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
# Most of the time is compilation. What processes of their own run is compiled as for a user.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from PIL import Image  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A model and a run that take seconds, with dropout, augmentation and several epochs.
TINY = {
    'batch_size': 32, 'num_steps': 48, 'num_epochs': 0, 'log_every': 1, 'eval_every': 20,
    'checkpoint_every': 6, 'model.hidden_size': 16, 'model.num_layers': 2, 'model.mlp_dim': 32,
    'model.num_heads': 2, 'model.dropout_rate': 0.2, 'optimizer.warmup_steps': 4,
    'optimizer.schedule': 'constant',
}


def command(workdir, config='configs/quickstart.py', **fields):
    """The argument list of a training run; fields with dots are given as a dict `fields=`."""
    overrides = fields.pop('fields', {}) | fields
    return [sys.executable, '-m', 'vit_jax.main', f'--config={ROOT / config}',
            f'--workdir={workdir}', *(f'--config.{k}={v}' for k, v in overrides.items())]


def environment():
    """The environment of a training process of the tests: one CPU device."""
    return os.environ | {'XLA_FLAGS': SINGLE_DEVICE_FLAGS, 'JAX_ENABLE_COMPILATION_CACHE': 'false',
                         'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'}


@pytest.fixture(scope='session')
def run_main():
    """Runs the training command to its end: (workdir, config=, fields=) -> CompletedProcess."""
    def run(workdir, **kwargs):
        return subprocess.run(command(workdir, **kwargs), cwd=ROOT, env=environment(), text=True,
                              capture_output=True, timeout=300, check=False)
    return run


def write_images(folder, classes, per_class, size=(16, 16), seed=0):
    """DIR/CLASS/NNN.png (lossless, so that tests can compare pixels), coloured by class."""
    rng = np.random.default_rng(seed)
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            image = rng.integers(0, 128, (*size, 3)) + 40 * k
            Image.fromarray(image.astype(np.uint8)).save(folder / name / f'{i:03}.png')


@pytest.fixture(scope='session')
def image_directory(tmp_path_factory):
    """DIR/{train,test}/{ant,bee,cat}/*.png: 60 and 12 images of 16x16."""
    root = tmp_path_factory.mktemp('images')
    write_images(root / 'train', ['ant', 'bee', 'cat'], 20, seed=1)
    write_images(root / 'test', ['ant', 'bee', 'cat'], 4, seed=2)
    return root


def prepare_tfds(data_dir, file_format, num_train=60, num_test=12):
    """Prepares the TFDS set 'dots' (train in 4 files) in data_dir, as a user's script would."""
    import tensorflow_datasets as tfds

    class Dots(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = 'dots'
        VERSION = tfds.core.Version('1.0.0')

        def _info(self):
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict({
                    'image': tfds.features.Image(shape=(16, 16, 3), encoding_format='png'),
                    'label': tfds.features.ClassLabel(names=['ant', 'bee', 'cat'])}),
                supervised_keys=('image', 'label'))

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
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(num_shards=4))
    return data_dir


@pytest.fixture(scope='session')
def tfds_directory(tmp_path_factory):
    """data_dir by file format, each with the prepared set 'dots'."""
    return {file_format: prepare_tfds(tmp_path_factory.mktemp(file_format), file_format)
            for file_format in ('tfrecord', 'array_record')}
