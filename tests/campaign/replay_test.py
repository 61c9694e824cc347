"""What the campaign once found stays mended: every case of the corpus ends as it must."""

import pytest

from tests.campaign import cases, preparation
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


@pytest.mark.parametrize('entry', [pytest.param(
    path, id=path.name, marks=pytest.mark.slow if path.name.startswith(SLOW) else [])
    for path in ENTRIES])
def test_case(entry, bases, worker):
    case = cases.kept(entry)
    running = worker(bases(case.kind))
    running.start(case, entry)
    while (outcome := running.outcome(1)) is None:
        pass
    assert not outcome.failed, f'{case.describe()}: {outcome.word}: {outcome.detail}'
