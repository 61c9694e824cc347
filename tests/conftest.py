"""Small data sets on disk and a way to run the training command, shared by the tests."""

import contextlib
import gc
import importlib.metadata
import logging
import os
import resource
import signal
import tempfile

# Before JAX starts: tests of sharding spread over eight CPU devices, all others use the first.
# The workers of pytest-xdist find in the environment what this file set in their parent.
if 'PYTEST_XDIST_WORKER' not in os.environ:
    # With all of LLVM's optimizations a step takes three times as long to compile.
    FLAGS = ['--xla_force_host_platform_device_count=8', '--xla_backend_optimization_level=1']
    if importlib.metadata.version('jax').startswith('0.10.'):  # later ones do not know it
        FLAGS.append('--xla_cpu_use_fusion_emitters=false')  # compiles in a third of the time
    os.environ['XLA_FLAGS'] = ' '.join(FLAGS)
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
# With oneDNN, TensorFlow rounds differently on different processors.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
# Tests compile the same steps again and again: they and their workers share what is compiled.
if 'PYTEST_XDIST_WORKER' not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix='vit_jax_test_')
    os.environ['JAX_COMPILATION_CACHE_DIR'] = CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
# Most of the time is compilation. Processes of their own have XLA's optimizations all the same.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'

# A shell that starts the tests in the background has them ignore this signal, and so would every
# process that they start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

from tests.support.datasets import prepare_tfds, write_images  # noqa: E402
from tests.support.runs import arguments, run_here  # noqa: E402
from vit_jax.weights import model as weights_model  # noqa: E402
from vit_jax.workdir import curves  # noqa: E402


def pytest_collection_finish():
    """What is imported stays: looking for garbage in it takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.fixture(autouse=True)
def messages(caplog, monkeypatch):
    """caplog sees the project's log lines, which a command otherwise keeps from the root logger."""
    logger = logging.getLogger('vit_jax')
    monkeypatch.setattr(logger, 'propagate', False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger='vit_jax')
    yield
    logger.removeHandler(caplog.handler)


@pytest.fixture(autouse=True)
def pictures(request, monkeypatch):
    """Runs in this process do without their curves, a tenth of their time, unless marked."""
    if not request.node.get_closest_marker('pictures'):
        monkeypatch.setattr(curves, 'draw', lambda *args: None)


@pytest.fixture(autouse=True, scope='session')
def templates():
    """The shapes of a model are known once computed: tests read weights a thousand times."""
    compute, known = weights_model.templates, {}

    def remembered(model, num_classes, flat, preprocess):
        key = str(
            (
                model,
                num_classes,
                {name: x.shape for name, x in flat.items()},
                (preprocess or {}).get('image_size'),
            )
        )
        if key not in known:
            known[key] = compute(model, num_classes, flat, preprocess)
        return dict(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_model, 'templates', remembered)
        yield


@pytest.fixture(scope='session')
def run_main():
    """Trains in this process, on one device: (workdir, config=, fields=) -> CompletedProcess."""

    def run(workdir, optimized=False, **kwargs):
        return run_here(*arguments(workdir, **kwargs), optimized=optimized)

    return run


@pytest.fixture(scope='session')
def image_directory(tmp_path_factory):
    """DIR/{train,test}/{ant,bee,cat}/*.png: 60 and 12 images of 16x16."""
    root = tmp_path_factory.mktemp('images')
    write_images(root / 'train', ['ant', 'bee', 'cat'], 20, seed=1)
    write_images(root / 'test', ['ant', 'bee', 'cat'], 4, seed=2)
    return root


@pytest.fixture(scope='session')
def tfds_directory(tmp_path_factory):
    """data_dir by file format, each with the prepared set 'dots'."""
    return {
        file_format: prepare_tfds(tmp_path_factory.mktemp(file_format), file_format)
        for file_format in ('tfrecord', 'array_record')
    }


@pytest.fixture
def limited_files():
    """A context in which no file can grow beyond some bytes, as if the disk were full."""

    @contextlib.contextmanager
    def limit(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit
