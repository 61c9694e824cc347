"""Small data sets on disk and a way to run the training command, shared by the tests."""

import contextlib
import gc
import importlib.metadata
import logging
import os
import resource
import signal
import tempfile

# These variables must be set before JAX starts. Tests of sharding use eight CPU devices, all others
# use the first. The workers of pytest-xdist inherit the variables of their parent.
if 'PYTEST_XDIST_WORKER' not in os.environ:
    # With all of LLVM's optimizations a step takes three times as long to compile.
    FLAGS = ['--xla_force_host_platform_device_count=8', '--xla_backend_optimization_level=1']
    if importlib.metadata.version('jax').startswith('0.10.'):  # a flag of 0.10 only
        FLAGS.append('--xla_cpu_use_fusion_emitters=false')  # compiles in a third of the time
    os.environ['XLA_FLAGS'] = ' '.join(FLAGS)
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
# With oneDNN, TensorFlow rounds differently on different processors.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
# Tests compile the same steps again and again, so all processes share one cache of programs.
if 'PYTEST_XDIST_WORKER' not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix='vit_jax_test_')
    os.environ['JAX_COMPILATION_CACHE_DIR'] = CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
# Compilation takes most of the time. Tests in separate processes switch XLA's optimizations on.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'

# A shell that starts the tests in the background makes them ignore SIGINT. Processes that the tests
# start and interrupt would ignore it as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

from tests.support.datasets import prepare_tfds, write_images  # noqa: E402
from tests.support.runs import arguments, run_here  # noqa: E402
from vit_jax.weights import model as weights_model  # noqa: E402
from vit_jax.workdir import curves  # noqa: E402


def pytest_collection_finish():
    """Excludes imported objects from garbage collection, which would take a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.fixture(autouse=True)
def messages(caplog, monkeypatch):
    """Lets caplog see the project's log lines, which commands keep from the root logger."""
    logger = logging.getLogger('vit_jax')
    monkeypatch.setattr(logger, 'propagate', False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger='vit_jax')
    yield
    logger.removeHandler(caplog.handler)


@pytest.fixture(autouse=True)
def pictures(request, monkeypatch):
    """Draws no curves in this process, which takes a tenth of a run, unless a test is marked."""
    if not request.node.get_closest_marker('pictures'):
        monkeypatch.setattr(curves, 'draw', lambda *args: None)


@pytest.fixture(autouse=True, scope='session')
def templates():
    """Computes the shapes of each model only once, because tests read weights a thousand times."""
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
    """A context that limits the size of files, as if the disk were full."""

    @contextlib.contextmanager
    def limit(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit
