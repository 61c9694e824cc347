"""Makes the intact inputs of kinds of cases, each in a process of its own, without its limits."""

from tests.campaign.cases import Case
from tests.support.forked import CONTEXT


def prepare(kinds, bases):
    """Fills bases/KIND for every kind."""
    processes = []
    for kind in kinds:
        (bases / kind).mkdir(parents=True)
        processes.append(CONTEXT.Process(target=_prepare, args=(kind, bases / kind)))
        processes[-1].start()
    for kind, process in zip(kinds, processes, strict=True):
        process.join()
        if process.exitcode:
            raise RuntimeError(f'the inputs of {kind} cannot be made')


def _prepare(kind, folder):
    Case(kind, '', ()).module.prepare(folder)
