"""Damages what the program reads, and kills it, in as many ways as the time allows.

    make campaign MINUTES=30
    python -m tests.campaign --minutes=30 --seed=0 [--only=weights,images] [--corpus=DIR]

Every case must end in an equal result, in a valid one, or in one message that a user can act on,
within time and memory (tests/campaign/cases.py). What fails is made small and written to the
corpus, one case of each mistake; tests/campaign/replay_test.py runs tests/campaign/corpus/. Exit
code 1 if any failed, or a kind had no case.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'  # or every process announces it
os.environ['HF_HUB_OFFLINE'] = '1'
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'  # runs are short, and compile often
os.environ['XLA_FLAGS'] = re.sub(
    r'--xla_force_host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', '')
)
# A worker starts JAX once, with the case that comes first; runs are equal on as many devices only.
os.environ['JAX_NUM_CPU_DEVICES'] = '2'

from tests.campaign import cases, preparation  # noqa: E402
from tests.campaign.cases import KINDS, Case  # noqa: E402
from tests.campaign.worker import Worker, clear  # noqa: E402
from vit_jax import terminal  # noqa: E402

LONG = ('kills', 'limits', 'workdirs', 'datasets', 'signals', 'outputs')  # cases of few changes
GRACE = 300  # seconds that the cases under way have when the time is over


class Scheduler:
    """Which case is next: first every kind has its share of cases, then all have equal time."""

    def __init__(self, kinds, minutes, seed, bases):
        self._rng, self._bases = random.Random(seed), bases
        modules = {kind: Case(kind, '', ()).module for kind in kinds}
        self._modules = modules
        self.quota = {kind: max(1, round(m.QUOTA * minutes / 60)) for kind, m in modules.items()}
        self.begun = collections.Counter()
        self.seconds = collections.Counter()

    def next(self):
        kind = min(
            self.quota,
            key=lambda kind: (min(self.begun[kind] / self.quota[kind], 1), self.seconds[kind]),
        )
        self.begun[kind] += 1
        base, changes = self._modules[kind].draw(self._rng, self._bases / kind)
        return Case(kind, base, tuple(map(tuple, changes)))


def run_all(workers, scheduler, seconds, corpus, seed):
    """Runs cases until the time is over; yields (case, outcome)."""
    end, found = time.monotonic() + seconds, set()
    while time.monotonic() < end or any(w.case for w in workers):
        if time.monotonic() > end + GRACE:
            print(
                'not judged, for want of time: '
                + '; '.join(w.case.describe() for w in workers if w.case),
                flush=True,
            )
            return
        wait([w.pipe for w in workers if w.case], 0.1)
        for worker in workers:
            if worker.case is None:
                if time.monotonic() < end:
                    worker.start(scheduler.next())
                continue
            case, outcome = worker.case, worker.outcome()
            if outcome is None:
                continue
            scheduler.seconds[case.kind] += time.monotonic() - worker.begun
            if outcome.failed and outcome.signature(case) not in found:
                case, outcome = minimised(worker, case, outcome)
                if outcome.failed:
                    found.add(outcome.signature(case))
                    cases.keep(case, outcome, corpus, worker.folder / 'case', {'seed': seed})
                    print(
                        f'FAILED {outcome.signature(case)}: {outcome.detail}\n  {case.describe()}',
                        flush=True,
                    )
            yield case, outcome


def minimised(worker, case, outcome):
    """The case with as few changes as fail in the same way; a hang is tried once more alone."""
    if case.kind in LONG:
        return case, outcome
    shorter = [case] if outcome.word == 'hang' or len(case.changes) == 1 else []
    shorter += [
        Case(case.kind, case.base, (change,)) for change in case.changes if len(case.changes) > 1
    ]
    smallest, least = case, outcome
    for candidate in [*shorter, case]:
        worker.start(candidate)
        while (again := worker.outcome(1)) is None:
            pass
        smallest, least = candidate, again
        if again.failed and again.signature(case) == outcome.signature(case):
            break
    if not least.failed and outcome.word != 'hang':
        return case, outcome  # it does not always fail
    return smallest, least


def summarise(results, quota, minutes, seed):
    """The table at the end, and the same for other programs."""
    rows, summary = [], {}
    for kind, least in quota.items():
        of_kind = results[kind]
        words = collections.Counter(o.word for _, o in of_kind)
        failed = sum(o.failed for _, o in of_kind)
        slowest = max((o.seconds for _, o in of_kind), default=0)
        largest = max((o.gigabytes for _, o in of_kind), default=0)
        outcomes = ', '.join(f'{n} {word}' for word, n in words.most_common())
        rows.append(
            f'| {kind} | {len(of_kind)} | {least} | {failed} | {outcomes} | '
            f'{slowest:.1f} s | {largest:.2f} GB |'
        )
        signatures = collections.Counter(o.signature(c) for c, o in of_kind if o.failed)
        summary[kind] = dict(
            cases=len(of_kind),
            wanted=least,
            failed=failed,
            outcomes=words,
            failures=signatures,
            slowest=slowest,
            gigabytes=largest,
        )
    print(f'\nseed {seed}, {minutes:g} minutes\n')
    print('| kind | cases | wanted | failed | outcomes | slowest | largest memory |')
    print('|---|---|---|---|---|---|---|', *rows, sep='\n', flush=True)
    return dict(seed=seed, minutes=minutes, kinds=summary)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--minutes', type=float, default=30)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--only', default=','.join(KINDS), help=', '.join(KINDS))
    parser.add_argument('--corpus', default='runs/campaign', help='where failing cases are written')
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    kinds = options.only.split(',')
    corpus = pathlib.Path(options.corpus).resolve()
    corpus.mkdir(parents=True, exist_ok=True)
    # What TensorFlow prints is judged: its log level is the one that every command sets.
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '1'  # as JAX sets it where the user has not
    terminal.log_to_terminal()
    # A shell that starts the campaign in the background has it ignore Ctrl-C, and all its runs.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix='vit_jax_campaign_', ignore_cleanup_errors=True
    ) as folder:
        folder = pathlib.Path(folder)
        folder.chmod(0o755)  # for cases that run as a user without rights
        os.environ['JAX_COMPILATION_CACHE_DIR'] = str(folder / 'compiled')
        preparation.prepare(kinds, folder / 'bases')
        print(f'prepared in {time.monotonic() - begin:.0f} s', flush=True)
        scheduler = Scheduler(kinds, options.minutes, options.seed, folder / 'bases')
        workers = [Worker(folder / f'worker{k}', folder / 'bases') for k in range(options.workers)]
        results = collections.defaultdict(list)
        left = max(60 * options.minutes - (time.monotonic() - begin), 30 * options.minutes)
        try:
            for case, outcome in run_all(workers, scheduler, left, corpus, options.seed):
                results[case.kind].append((case, outcome))
        finally:
            for worker in workers:
                worker.close()
                clear(worker.folder / 'case')
    summary = summarise(results, scheduler.quota, options.minutes, options.seed)
    (corpus / 'summary.json').write_text(json.dumps(summary, indent=1) + '\n')
    return int(any(kind['failed'] or not kind['cases'] for kind in summary['kinds'].values()))


if __name__ == '__main__':
    sys.exit(main())
