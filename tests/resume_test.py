"""A resumed run is bit-identical to an uninterrupted run."""

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
    """The config fields of a tiny run for each kind of data source."""
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
            }  # unroll 0: the run chooses it
        else:
            own['dataset.subset'] = '90%'
        return RANDOM | own

    return fields


@pytest.fixture(scope='module')
def undisturbed(fields_of, tmp_path_factory):
    """The workdir of an uninterrupted run for each source."""
    workdirs = {}

    def get(source):
        if source not in workdirs:
            workdirs[source] = tmp_path_factory.mktemp(f'undisturbed_{source}')
            assert 'done: 48 steps' in finish(workdirs[source], fields_of(source))
        return workdirs[source]

    return get


@pytest.fixture(scope='module')
def here(run_main, tmp_path_factory):
    """Runs of digits in this process: (finish a run, the workdir of an uninterrupted run)."""

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
    if not path.exists():
        return False
    rows = path.read_text().splitlines()
    return any(json.loads(row)['step'] >= step for row in rows if row.endswith('}'))


def saving(workdir, step):
    """Whether the run is writing a checkpoint of this step or a later one."""
    for path in (workdir / 'checkpoints').glob('*.orbax-checkpoint-tmp*'):
        if int(path.name.split('.')[0]) >= step:
            return True
    return False


def last_trace(workdir):
    """The last step with a row or a checkpoint, even an incomplete one; 0 without any."""
    steps = [row['step'] for row in metrics.read(workdir)]
    steps += [int(path.name.split('.')[0]) for path in (workdir / 'checkpoints').glob('[0-9]*')]
    return max(steps, default=0)


def saved(workdir):
    """Whether the run has a complete checkpoint."""
    return any(path.name.isdigit() for path in (workdir / 'checkpoints').glob('*'))


def started_from(log):
    match = re.search(r'continuing from the checkpoint of step (\d+)', log)
    assert match, log
    return int(match.group(1))


def final_state(workdir):
    steps = [int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit()]
    assert max(steps) == RANDOM['num_steps']
    path = pathlib.Path(workdir).resolve() / 'checkpoints' / str(max(steps)) / 'state'
    return ocp.StandardCheckpointer().restore(path)


def untimed_rows(workdir):
    """The rows of metrics without durations and speeds."""
    return [
        {name: value for name, value in row.items() if name not in TIMED}
        for row in metrics.read(workdir)
    ]


def assert_equal_runs(workdir, expected):
    state = final_state(workdir)
    expected_state = final_state(expected)
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    assert len(jax.tree.leaves(state)) > 60
    expected_leaves = jax.tree.leaves(expected_state)
    for (path, leaf), expected_leaf in zip(
        jax.tree.leaves_with_path(state), expected_leaves, strict=True
    ):
        x = np.asarray(leaf)
        y = np.asarray(expected_leaf)
        assert x.dtype == y.dtype, jax.tree_util.keystr(path)
        assert x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)
    rows = untimed_rows(workdir)
    assert rows == untimed_rows(expected)
    assert len(rows) == RANDOM['num_steps'] + 3  # every step, and evaluations at 20, 40, 48


def finish(workdir, fields):
    code = start(workdir, fields).wait(300)
    output = (workdir / 'output').read_text()
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
def test_run_resumed_after_sigkill_is_bit_identical(source, fields_of, undisturbed, tmp_path):
    fields = fields_of(source)
    first = random.Random(source).randint(8, 12)
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
def test_run_resumed_after_many_random_sigkills_is_bit_identical(
    source, fields_of, undisturbed, tmp_path
):
    rng = random.Random(7)
    kills = 0
    while kills < 6:
        # The killed runs have left no trace of this step, so this process must reach it.
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


@pytest.mark.nightly
def test_run_resumed_after_sigterm_and_sigint_is_bit_identical(fields_of, undisturbed, tmp_path):
    fields = fields_of('digits')
    stopped = 0
    for signum, expected_code in [(signal.SIGTERM, 143), (signal.SIGINT, 130)]:
        step = stopped + 9
        code, output = kill_when(
            start(tmp_path, fields), tmp_path, signum, lambda step=step: reached(tmp_path, step)
        )
        assert code == expected_code, output
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
@pytest.mark.parametrize(('cores', 'other_cores'), nightly_but([], [(2, 1), (1, 2)]))
def test_resumed_run_keeps_its_number_of_devices(cores, other_cores, tmp_path):
    """A new run on a machine with the other number of cores would choose another one."""
    for number, steps in [(cores, 2), (other_cores, 4)]:
        fields = TINY | {'num_steps': steps, 'optimizer.warmup_steps': 0}
        log = tmp_path / f'{steps}.log'
        code = f'from vit_jax import machine; machine.cores = lambda: {number}\n{UNDRAWN}'
        process = Forked(arguments(tmp_path, fields=fields), log, code, optimized=False)
        assert process.wait(600) == 0, log.read_text()
        recorded = json.loads((tmp_path / 'config.json').read_text())
        assert recorded['num_steps'] == steps
        assert recorded['mesh']['host_devices'] == cores


@pytest.mark.slow
@pytest.mark.nightly
def test_extended_run_is_bit_identical(here, tmp_path):
    finish, undisturbed = here
    finish(tmp_path, num_steps=40)
    assert 'the run is complete at step 40' in finish(tmp_path, num_steps=40)
    assert started_from(finish(tmp_path)) == 40
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.nightly
def test_run_resumed_from_an_older_checkpoint_is_bit_identical(here, tmp_path):
    finish, undisturbed = here
    finish(tmp_path, num_steps=30)
    for file in (tmp_path / 'checkpoints' / '30' / 'state' / 'd').iterdir():
        file.write_bytes(file.read_bytes()[:100])
    output = finish(tmp_path)
    assert re.search(r'checkpoint of step 30 cannot be used and is now .*bad-30', output)
    assert 'falling back to the checkpoint of step 24' in output
    assert (tmp_path / 'checkpoints' / 'bad-30').is_dir()
    assert_equal_runs(tmp_path, undisturbed)
