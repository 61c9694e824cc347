"""Damages the inputs of the program, and kills it, in as many ways as the time allows.

    make campaign MINUTES=30
    python -m tests.campaign --minutes=30 --seed=0 [--only=weights,images] [--corpus=DIR]

Every case must end with an equal result, a valid result, or one message that helps the user, within
limits of time and memory (tests/campaign/cases.py). A failing case is reduced and written to the
corpus, one case for each mistake. tests/campaign/replay_test.py runs tests/campaign/corpus/. The
exit code is 1 if a case failed or a kind had no case.
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
os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'  # otherwise every process announces oneDNN
os.environ['HF_HUB_OFFLINE'] = '1'
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'  # runs are short and compile often
os.environ['XLA_FLAGS'] = re.sub(
    r'--xla_force_host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', '')
)
# A worker starts JAX once for all cases, and runs are equal only with the same number of devices.
os.environ['JAX_NUM_CPU_DEVICES'] = '2'

from tests.campaign import cases, preparation  # noqa: E402
from tests.campaign.cases import KINDS, Case  # noqa: E402
from tests.campaign.worker import Worker, clear  # noqa: E402
from vit_jax import terminal  # noqa: E402

LONG = ('kills', 'limits', 'workdirs', 'datasets', 'signals', 'outputs')  # too slow to reduce
GRACE = 300  # seconds for the running cases after the end of the time


class Scheduler:
    """Selects the next case: first every kind gets its quota, then all kinds get equal time."""

    def __init__(self, kinds, minutes, seed, bases):
        self._rng = random.Random(seed)
        self._bases = bases
        modules = {kind: Case(kind, '', ()).module for kind in kinds}
        self._modules = modules
        self.quota = {kind: max(1, round(m.QUOTA * minutes / 60)) for kind, m in modules.items()}
        self.started = collections.Counter()
        self.seconds = collections.Counter()

    def next(self):
        kind = min(
            self.quota,
            key=lambda kind: (min(self.started[kind] / self.quota[kind], 1), self.seconds[kind]),
        )
        self.started[kind] += 1
        base, changes = self._modules[kind].draw(self._rng, self._bases / kind)
        return Case(kind, base, tuple(map(tuple, changes)))


def run_all(workers, scheduler, seconds, corpus, seed):
    """Runs cases until the time is over; yields (case, outcome)."""
    end = time.monotonic() + seconds
    signatures = set()  # of the failures in the corpus
    while time.monotonic() < end or any(w.case for w in workers):
        if time.monotonic() > end + GRACE:
            print(
                'unfinished at the end of the time: '
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
            case = worker.case
            outcome = worker.outcome()
            if outcome is None:
                continue
            scheduler.seconds[case.kind] += time.monotonic() - worker.start_time
            if outcome.failed and outcome.signature(case) not in signatures:
                case, outcome = minimised(worker, case, outcome)
                if outcome.failed:
                    signatures.add(outcome.signature(case))
                    cases.keep(case, outcome, corpus, worker.folder / 'case', {'seed': seed})
                    print(
                        f'FAILED {outcome.signature(case)}: {outcome.detail}\n  {case.describe()}',
                        flush=True,
                    )
            yield case, outcome


def minimised(worker, case, outcome):
    """The case with the fewest changes that fails in the same way; a hang is repeated first."""
    if case.kind in LONG:
        return case, outcome
    candidates = []
    if outcome.word == 'hang' or len(case.changes) == 1:
        candidates.append(case)
    if len(case.changes) > 1:
        candidates += [Case(case.kind, case.base, (change,)) for change in case.changes]
    candidates.append(case)
    for candidate in candidates:
        worker.start(candidate)
        again = worker.wait()
        if again.failed and again.signature(case) == outcome.signature(case):
            break
    if not again.failed and outcome.word != 'hang':
        return case, outcome  # it does not always fail
    return candidate, again


def summarise(results, quota, minutes, seed):
    """Prints the table of results; returns it as a dict for other programs."""
    rows = []
    summary = {}
    for kind, minimum in quota.items():
        of_kind = results[kind]
        words = collections.Counter(o.word for _, o in of_kind)
        failed = sum(o.failed for _, o in of_kind)
        slowest = max((o.seconds for _, o in of_kind), default=0)
        largest = max((o.gigabytes for _, o in of_kind), default=0)
        outcomes = ', '.join(f'{n} {word}' for word, n in words.most_common())
        rows.append(
            f'| {kind} | {len(of_kind)} | {minimum} | {failed} | {outcomes} | '
            f'{slowest:.1f} s | {largest:.2f} GB |'
        )
        signatures = collections.Counter(o.signature(c) for c, o in of_kind if o.failed)
        summary[kind] = dict(
            cases=len(of_kind),
            wanted=minimum,
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
    parser.add_argument('--corpus', default='runs/campaign', help='directory for failing cases')
    parser.add_argument('--workers', type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    kinds = options.only.split(',')
    corpus = pathlib.Path(options.corpus).resolve()
    corpus.mkdir(parents=True, exist_ok=True)
    # The campaign judges the output of TensorFlow, so it needs the log level of the commands.
    os.environ['TF_CPP_MIN_LOG_LEVEL'] = '1'  # JAX sets this level unless the user has set one
    terminal.log_to_terminal()
    # In the background of a shell, the campaign and its runs would ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix='vit_jax_campaign_', ignore_cleanup_errors=True
    ) as folder:
        folder = pathlib.Path(folder)
        folder.chmod(0o755)  # some cases run as a user without permissions
        os.environ['JAX_COMPILATION_CACHE_DIR'] = str(folder / 'compiled')
        preparation.prepare(kinds, folder / 'bases')
        print(f'prepared in {time.monotonic() - start:.0f} s', flush=True)
        scheduler = Scheduler(kinds, options.minutes, options.seed, folder / 'bases')
        workers = [Worker(folder / f'worker{k}', folder / 'bases') for k in range(options.workers)]
        results = collections.defaultdict(list)
        seconds = max(60 * options.minutes - (time.monotonic() - start), 30 * options.minutes)
        try:
            for case, outcome in run_all(workers, scheduler, seconds, corpus, options.seed):
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
