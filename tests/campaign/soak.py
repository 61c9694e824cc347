"""A long run with many checkpoints and kills, whose use of resources must not grow.

    python -m tests.campaign.soak --checkpoints=500 --kills=50 [--plot=docs/images/soak.png]

A small model saves after every step, and every checkpoint records memory, open files and disk use.
Between them, the run is killed and started again. The metrics must equal the metrics of an
uninterrupted run, and memory, open files and disk use of an uninterrupted process may grow by at
most 10 % from the second to the last tenth of the run. Otherwise the exit code is 1.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

import numpy as np

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
os.environ.setdefault('XLA_FLAGS', '')

from tests.campaign import runs  # noqa: E402
from tests.support.forked import Forked  # noqa: E402
from tests.support.runs import arguments  # noqa: E402

# Runs in the training process and writes a line of numbers at every checkpoint.
WATCH = """
import json, os, pathlib, sys
from vit_jax import main
from vit_jax.workdir.checkpoint import Checkpointer
save = Checkpointer.save
def watched(self, step, *rest):
    save(self, step, *rest)
    status = pathlib.Path('/proc/self/status').read_text()
    disk = sum(p.stat().st_size for p in pathlib.Path(self.directory).rglob('*') if p.is_file())
    with open(WATCHED, 'a') as file:
        print(json.dumps([os.getpid(), step, int(status.split('VmRSS:')[1].split()[0]) / 1024,
                          len(os.listdir('/proc/self/fd')), disk / 1e6]), file=file)
Checkpointer.save = watched
sys.exit(main.main())
"""


def watch(folder, checkpoints, kills, seed):
    """Trains to the end, with kills; returns rows [process, step, MB, open files, MB on disk]."""
    rng = random.Random(seed)
    watched = folder / 'watched'
    fields = runs.FIELDS | {
        'num_steps': checkpoints,
        'checkpoint_every': 1,
        'keep_best': False,
        'eval_every': max(checkpoints // 20, 1),
        'log_every': 10,
    }
    moments = sorted(rng.sample(range(2, checkpoints), kills)) if kills else []
    for number in range(kills + 1):
        process = Forked(
            arguments(folder / 'run', fields=fields),
            folder / 'log',
            code=f'WATCHED = {str(watched)!r}\n{WATCH}',
            optimized=False,
        )
        before = len(_rows(watched))
        while process.poll() is None:
            rows = _rows(watched)
            if number < kills and len(rows) > before and rows[-1][1] >= moments[number]:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        if process.wait() == 0:
            break
        print(
            f'start {number}: ended with {process.returncode} after step '
            f'{_rows(watched)[-1][1] if watched.exists() else 0}',
            flush=True,
        )
    log = (folder / 'log').read_text()
    assert 'done:' in log, log[-1000:]
    assert 'Traceback' not in log, log[-3000:]
    return np.array(_rows(watched), float), number


def _rows(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(']')]


def growth(values):
    """Growth from the second to the last tenth, as a share; the first tenth is a warm-up."""
    part = max(len(values) // 10, 1)
    return values[-part:].mean() / values[part : 2 * part].mean() - 1


def plot(rows, path):
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 1, figsize=(7, 6), sharex=True)
    for panel, column, label in zip(
        panels, (2, 3, 4), ('memory, MB', 'open files', 'checkpoints on disk, MB'), strict=True
    ):
        panel.plot(rows[:, column], linewidth=0.8)
        for start in np.flatnonzero(np.diff(rows[:, 0])) + 1:
            panel.axvline(start, color='0.85', linewidth=0.5, zorder=0)  # killed and started
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel('checkpoints')
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--checkpoints', type=int, default=500)
    parser.add_argument('--kills', type=int, default=50)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--plot', help='path of a picture of the measurements')
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix='vit_jax_soak_') as folder:
        os.environ['JAX_COMPILATION_CACHE_DIR'] = f'{folder}/compiled'
        folder = pathlib.Path(folder)
        rows, kills = watch(folder, options.checkpoints, options.kills, options.seed)
        # A run without kills is the longest process to measure.
        alone, _ = watch(pathlib.Path(tempfile.mkdtemp(dir=folder)), options.checkpoints, 0, 0)
        first = runs.rows(folder / 'run')
        second = runs.rows(next(folder.glob('tmp*')) / 'run')
    if options.plot:
        plot(np.concatenate([rows, alone]), options.plot)
    print('\n| | first tenth | last tenth | growth after the second tenth |\n|---|---|---|---|')
    worst = []
    for column, name in ((2, 'memory, MB'), (3, 'open files'), (4, 'checkpoints on disk, MB')):
        part = max(len(alone) // 10, 1)
        worst.append(growth(alone[:, column]))
        print(
            f'| {name} | {alone[:part, column].mean():.1f} | {alone[-part:, column].mean():.1f} '
            f'| {worst[-1]:+.1%} |'
        )
    equal = first == second
    print(
        f'\n{len(rows)} checkpoints, {kills} kills; the metrics '
        f'{"equal" if equal else "DIFFER FROM"} the metrics of an uninterrupted run'
    )
    return int(not equal or max(worst) > 0.1)


if __name__ == '__main__':
    sys.exit(main())
