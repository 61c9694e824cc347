"""Prepares the intact inputs of each kind in its own process, without the limits of the kind."""

import os
import sys

from tests.campaign.cases import Case
from tests.support.forked import CONTEXT


def prepare(kinds, bases):
    """Fills bases/KIND for every kind; bases/KIND.log gets the output."""
    processes = []
    for kind in kinds:
        (bases / kind).mkdir(parents=True)
        processes.append(CONTEXT.Process(target=_prepare, args=(kind, bases)))
        processes[-1].start()
    for kind, process in zip(kinds, processes, strict=True):
        process.join()
        if process.exitcode:
            raise RuntimeError(
                f'the inputs of {kind} cannot be made: '
                f'{(bases / kind).with_suffix(".log").read_text()}'
            )


def _prepare(kind, bases):
    log = os.open(bases / f'{kind}.log', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    Case(kind, '', ()).module.prepare(bases / kind)
