"""The cases of the corpus, failures that a campaign once found, do not fail again.

The campaign draws some limits of a machine; a nightly test runs all of them.
"""

import importlib
import operator

import pytest

from tests.campaign import cases, datasets, kills, limits, preparation, signals
from tests.campaign.worker import Worker

ENTRIES = sorted(path.parent for path in cases.CORPUS.glob('*/case.json'))
NOISE = (
    '2026-11-28 10:00:00.123456: E tensorflow/core/lib/jpeg/jpeg_mem.cc:302] Uncompressed image',
    'W0000 00:00:1764500000.123456   12345 cuda_executor.cc:1228] INTERNAL: CUDA Runtime error',
    'E1128 10:00:00.123456   12345 coordination_service_agent.cc:402] Polled an error',
    'F1128 10:00:00.1 123 client.h:80] Terminating process',
    'WARNING: All log messages before absl::InitializeLog() is called are written to STDERR',
    '*** Begin stack trace ***',
    '    @     0x7f52d1e12345  (unknown)',
    'Traceback (most recent call last):',
    "Exception ignored in: <_io.TextIOWrapper name='<stdout>' mode='w' encoding='utf-8'>",
    'terminate called after throwing an instance of std::bad_alloc',
    'Fatal Python error: Aborted',
    '/usr/lib/python3.11/site-packages/numpy/core.py:12: RuntimeWarning: overflow in cast',
    'libpng error: IDAT: CRC error',
    '--- Logging error ---',
)
# Kinds whose intact inputs are trained models: preparing them takes minutes.
TRAINING = (
    'configs',
    'datasets',
    'kills',
    'limits',
    'numbers',
    'outputs',
    'sidecars-hang',
    'signals',
    'weights-hang',
    'workdirs',
)
QUIET = (
    'error: data/train/ant/a.png cannot be read: not an image of BMP, GIF, JPEG, PNG.',
    'Skipped broken image data/a.jpg: Invalid JPEG data, size 12 (1 of 3)',
    'step 8/8  eval accuracy 14.17 %  top-5 54.17 %  loss 2.2985  on 360 images in 5.8 s',
    'photo.cc: there is no image',
    'E1128 10:00:00.1 123 cpu_aot_loader.cc:210] Loading XLA:CPU AOT result',
)


def name_of(entry):
    return entry.name


@pytest.fixture(scope='module')
def bases(tmp_path_factory):
    """Prepares the intact inputs of a kind, once, and returns the directory of all kinds."""
    prepared = set()
    folder = tmp_path_factory.mktemp('bases')

    def get(kind):
        if kind not in prepared:
            preparation.prepare([kind], folder)
            prepared.add(kind)
        return folder

    return get


@pytest.fixture(scope='module')
def worker(tmp_path_factory):
    workers = []

    def get(folder):
        if not workers:
            workers.append(Worker(tmp_path_factory.mktemp('worker'), folder))
        return workers[0]

    yield get
    for opened in workers:
        opened.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    'entry', [entry for entry in ENTRIES if not entry.name.startswith(TRAINING)], ids=name_of
)
def test_case_of_the_corpus_does_not_fail(entry, bases, worker):
    _require_end(worker, bases, cases.kept(entry), entry)


@pytest.mark.nightly
@pytest.mark.parametrize(
    'entry', [entry for entry in ENTRIES if entry.name.startswith(TRAINING)], ids=name_of
)
def test_case_with_training_does_not_fail(entry, bases, worker):
    _require_end(worker, bases, cases.kept(entry), entry)


@pytest.mark.parametrize('line', NOISE)
def test_output_of_libraries_is_a_failure(line):
    failure = cases.noise(f'step 1/8\n{line}\nstep 2/8\n')
    assert failure is not None
    assert failure.args[0] in ('noise', 'traceback')
    assert line[:20] in failure.args[1]


@pytest.mark.parametrize('line', QUIET)
def test_message_is_not_output_of_libraries(line):
    assert cases.noise(f'step 1/8\n{line}\nstep 2/8\n') is None


@pytest.mark.parametrize('kind', cases.KINDS)
def test_kind_has_limits_and_a_quota(kind):
    module = cases.Case(kind, '', ()).module
    assert min(module.SECONDS, module.GIGABYTES, module.QUOTA) > 0


def places():
    """All functions at whose calls a case sends a signal or changes data."""
    names = {*kills.PLACES, *datasets.PLACES}
    for _, _, places_of_scene in signals.SCENES.values():
        names.update(places_of_scene)
    return sorted(names)


@pytest.mark.parametrize('place', places())
def test_place_of_a_signal_exists(place):
    module, _, path = place.partition(':')
    assert callable(operator.attrgetter(path)(importlib.import_module(module)))


@pytest.mark.nightly
@pytest.mark.parametrize('limit', sorted(limits.LIMITS))
@pytest.mark.parametrize('command', limits.COMMANDS)
def test_every_limit_ends_in_the_work_or_one_message(command, limit, bases, worker):
    for amount in limits.LIMITS[limit]:
        change = (command, limit, amount)
        _require_end(worker, bases, cases.Case('limits', 'half', (change,)))


def _require_end(worker, bases, case, entry=None):
    running = worker(bases(case.kind))
    running.start(case, entry)
    outcome = running.wait()
    assert not outcome.failed, f'{case.describe()}: {outcome.word}: {outcome.detail}'
