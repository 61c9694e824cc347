"""A run that is stopped anywhere and continued equals the run that was not, bit for bit."""

import json
import pathlib
import random
import re
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.forked import UNDRAWN, Forked
from tests.support.marks import nightly_but
from tests.support.runs import RANDOM, TIMED, TINY, arguments
from vit_jax.workdir import metrics

SOURCES = ('digits', 'directory', 'tfrecord', 'array_record')


@pytest.fixture(scope='module')
def fields_of(request):
    """Config fields of a tiny run by source, which is written once it is asked for."""
    photos = request.getfixturevalue('tmp_path_factory').mktemp('photos')

    def fields(source):
        if source == 'digits':
            return RANDOM | {'batch_size': 64}  # an epoch has 22 steps
        name = request.getfixturevalue('image_directory') if source == 'directory' else 'dots'
        own = {
            'dataset.name': name,
            'image_size': 8,
            'augment.crop': 'inception',
            'augment.flip': True,
            'augment.randaugment.num_ops': 2,
            'augment.mixup': 0.2,
            'dataset.shuffle_buffer': 25,
        }
        if name == 'dots':
            own['dataset.data_dir'] = request.getfixturevalue('tfds_directory')[source]
        if source == 'tfrecord':
            own['dataset.label'] = 'label/2'
        if source == 'directory':
            own |= {
                'dataset.balance': 0.5,
                'loss.class_weights': 'balanced',
                'dataset.cache': 'disk',
                'dataset.cache_dir': str(photos),
                'model.dtype': 'bfloat16',
                'model.unroll': 0,
            }  # which leaves all choices
        else:
            own['dataset.subset'] = '90%'
        return RANDOM | own

    return fields


@pytest.fixture(scope='module')
def undisturbed(fields_of, tmp_path_factory):
    """Workdir of the uninterrupted run, one per source, made once."""
    made = {}

    def get(source):
        if source not in made:
            made[source] = tmp_path_factory.mktemp(f'undisturbed_{source}')
            assert 'done: 48 steps' in finish(made[source], fields_of(source))
        return made[source]

    return get


@pytest.fixture(scope='module')
def here(run_main, tmp_path_factory):
    """Runs of digits in this process, which nobody kills: (continue, the undisturbed workdir)."""

    def finish(workdir, **fields):
        result = run_main(workdir, fields=RANDOM | fields)
        assert result.returncode == 0, result.stderr
        return result.stderr

    undisturbed = tmp_path_factory.mktemp('undisturbed_here')
    finish(undisturbed)
    return finish, undisturbed


def start(workdir, fields):
    log = workdir / 'output'
    log.unlink(missing_ok=True)
    return Forked(arguments(workdir, fields=fields), log, UNDRAWN)


def kill_when(process, workdir, signum, condition):
    """Sends the signal as soon as the condition holds; returns (exit code, log)."""
    deadline = time.monotonic() + 240
    while process.poll() is None and not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signum)
    return process.wait(240), (workdir / 'output').read_text()


def reached(workdir, step):
    """Whether the run has logged the step."""
    path = workdir / 'metrics.jsonl'
    rows = path.read_text().splitlines() if path.exists() else []
    return any(json.loads(row)['step'] >= step for row in rows if row.endswith('}'))


def saving(workdir, step):
    """Whether a checkpoint of that step or a later one is being written right now."""
    for path in (workdir / 'checkpoints').glob('*.orbax-checkpoint-tmp*'):
        if int(path.name.split('.')[0]) >= step:
            return True
    return False


def last_trace(workdir):
    """The last step of which a row, a checkpoint or a half-written one is there; 0 at first."""
    steps = [row['step'] for row in metrics.read(workdir)]
    steps += [int(path.name.split('.')[0]) for path in (workdir / 'checkpoints').glob('[0-9]*')]
    return max(steps, default=0)


def saved(workdir):
    """Whether a checkpoint is complete."""
    return any(path.name.isdigit() for path in (workdir / 'checkpoints').glob('*'))


def started_from(log):
    found = re.search(r'continuing from the checkpoint of step (\d+)', log)
    assert found, log
    return int(found.group(1))


def final_state(workdir):
    steps = [int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit()]
    assert max(steps) == RANDOM['num_steps']
    path = pathlib.Path(workdir).resolve() / 'checkpoints' / str(max(steps)) / 'state'
    return ocp.StandardCheckpointer().restore(path)


def assert_equal_runs(workdir, expected):
    a, b = final_state(workdir), final_state(expected)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert len(jax.tree.leaves(a)) > 60
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype, jax.tree_util.keystr(path)
        assert x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)
    rows = [
        [{k: v for k, v in row.items() if k not in TIMED} for row in metrics.read(directory)]
        for directory in (workdir, expected)
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == RANDOM['num_steps'] + 3  # every step, and evaluations at 20, 40, 48


def finish(workdir, fields):
    process = start(workdir, fields)
    code, output = process.wait(300), (workdir / 'output').read_text()
    assert code == 0, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    'source',
    [
        'digits',
        *(
            pytest.param(source, marks=pytest.mark.nightly)
            for source in ('directory', 'array_record')
        ),
    ],
)
def test_sigkill_anywhere(source, fields_of, undisturbed, tmp_path):
    fields, rng = fields_of(source), random.Random(source)
    first = rng.randint(8, 12)
    moments = [
        lambda: saved(tmp_path) and reached(tmp_path, first),
        lambda: saving(tmp_path, 24),
    ]  # after the first epoch
    logs = []
    for moment in moments:
        code, output = kill_when(start(tmp_path, fields), tmp_path, signal.SIGKILL, moment)
        assert code == -signal.SIGKILL, output
        logs.append(output)
    logs.append(finish(tmp_path, fields))
    starts = [started_from(log) for log in logs[1:]]
    assert 0 < starts[0] < starts[-1]
    assert_equal_runs(tmp_path, undisturbed(source))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize('source', SOURCES)
def test_sigkill_at_many_random_moments(source, fields_of, undisturbed, tmp_path):
    rng, kills = random.Random(7), 0
    while kills < 6:
        # Past all that the killed runs left behind, so that it is this process that gets there.
        target = last_trace(tmp_path) + rng.randint(1, 8)
        kind = rng.choice([reached, saving]) if target <= 48 else reached
        process = start(tmp_path, fields_of(source))
        code, output = kill_when(
            process,
            tmp_path,
            signal.SIGKILL,
            lambda kind=kind, target=target: saved(tmp_path) and kind(tmp_path, target),
        )
        if code == 0:
            break
        if kills:
            assert started_from(output) > 0
        kills += 1
    assert kills >= 3
    finish(tmp_path, fields_of(source))
    assert_equal_runs(tmp_path, undisturbed(source))


@pytest.mark.slow
def test_signals_save_and_say_how_to_continue(fields_of, undisturbed, tmp_path):
    fields, stopped = fields_of('digits'), 0
    for signum, code in [(signal.SIGTERM, 143), (signal.SIGINT, 130)]:
        step = stopped + 9
        got, output = kill_when(
            start(tmp_path, fields), tmp_path, signum, lambda step=step: reached(tmp_path, step)
        )
        assert got == code, output
        if stopped:
            assert started_from(output) == stopped
        stopped = int(
            re.search(
                r'stopped by SIG\w+ after step (\d+) of 48 and saved. To continue, '
                'run the same command again',
                output,
            ).group(1)
        )
        assert (tmp_path / 'checkpoints' / str(stopped)).is_dir()
    assert started_from(finish(tmp_path, fields)) == stopped
    assert_equal_runs(tmp_path, undisturbed('digits'))


@pytest.mark.slow
@pytest.mark.parametrize(('cores', 'more_or_less'), nightly_but([], [(2, 1), (1, 2)]))
def test_the_devices_that_were_chosen_stay(cores, more_or_less, tmp_path):
    """On a machine with other cores, for which another number would be chosen."""
    for number, steps in [(cores, 2), (more_or_less, 4)]:
        fields = TINY | {'num_steps': steps, 'optimizer.warmup_steps': 0}
        log = tmp_path / f'{steps}.log'
        code = f'from vit_jax import machine; machine.cores = lambda: {number}\n{UNDRAWN}'
        process = Forked(arguments(tmp_path, fields=fields), log, code, optimized=False)
        assert process.wait(600) == 0, log.read_text()
        recorded = json.loads((tmp_path / 'config.json').read_text())  # of the devices there are
        assert (recorded['num_steps'], recorded['mesh']['host_devices']) == (steps, cores)


@pytest.mark.slow
@pytest.mark.nightly
def test_extends_a_finished_run(here, tmp_path):
    finish, undisturbed = here
    finish(tmp_path, num_steps=40)
    assert 'the run is complete at step 40' in finish(tmp_path, num_steps=40)
    assert started_from(finish(tmp_path)) == 40
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.nightly
def test_falls_back_when_the_newest_checkpoint_is_truncated(here, tmp_path):
    finish, undisturbed = here
    finish(tmp_path, num_steps=30)
    for file in (tmp_path / 'checkpoints' / '30' / 'state' / 'd').iterdir():
        file.write_bytes(file.read_bytes()[:100])
    output = finish(tmp_path)
    assert re.search(r'checkpoint of step 30 cannot be used and is now .*bad-30', output)
    assert 'falling back to the checkpoint of step 24' in output
    assert (tmp_path / 'checkpoints' / 'bad-30').is_dir()
    assert_equal_runs(tmp_path, undisturbed)
