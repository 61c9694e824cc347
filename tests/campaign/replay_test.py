"""What the campaign once found stays mended: every case of the corpus ends as it must.

There are so few limits of a machine that all of them are tried at night; a campaign draws some.
"""

import pytest

from tests.campaign import cases, limits, preparation
from tests.campaign.worker import Worker

ENTRIES = sorted(path.parent for path in cases.CORPUS.glob('*/case.json'))
SLOW = ('configs', 'workdirs', 'kills', 'limits', 'sidecars-hang', 'weights-hang')  # most train


@pytest.fixture(scope='module')
def bases(tmp_path_factory):
    """The intact inputs of a kind, made once: kind -> the directory of all of them."""
    made, folder = set(), tmp_path_factory.mktemp('bases')

    def get(kind):
        if kind not in made:
            preparation.prepare([kind], folder)
            made.add(kind)
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
    for each in workers:
        each.close()


@pytest.mark.parametrize(
    'entry',
    [
        pytest.param(
            path, id=path.name, marks=pytest.mark.slow if path.name.startswith(SLOW) else []
        )
        for path in ENTRIES
    ],
)
def test_case(entry, bases, worker):
    _require_end(worker, bases, cases.kept(entry), entry)


@pytest.mark.nightly
@pytest.mark.parametrize('limit', sorted(limits.LIMITS))
@pytest.mark.parametrize('command', limits.COMMANDS)
def test_every_limit(command, limit, bases, worker):
    for amount in limits.LIMITS[limit]:
        change = (command, limit, amount)
        _require_end(worker, bases, cases.Case('limits', 'half', (change,)))


def _require_end(worker, bases, case, entry=None):
    running = worker(bases(case.kind))
    running.start(case, entry)
    while (outcome := running.outcome(1)) is None:
        pass
    assert not outcome.failed, f'{case.describe()}: {outcome.word}: {outcome.detail}'
