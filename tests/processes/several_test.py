"""Runs of several real processes: they equal a run of one process, and stop and resume together."""

import functools
import json
import re
import shutil
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.datasets import write_images
from tests.support.forked import EVALUATE, UNDRAWN, Forked
from tests.support.processes import Processes, free_port
from tests.support.runs import RANDOM, TIMED, arguments, load
from vit_jax.training import loop
from vit_jax.workdir import metrics

# SGD, because Adam amplifies the rounding errors of zero gradients, for example of key biases. With
# ten times this learning rate, training amplifies rounding errors from 1e-7 to 1e-4.
FIELDS = RANDOM | {
    'num_steps': 24,
    'eval_every': 10,
    'optimizer.name': 'sgd',
    'optimizer.learning_rate': 0.005,
}
PLAIN = FIELDS | {'model.dropout_rate': 0.0}
# Makes a process send itself a signal before a step, or before one of the 12 batches of an
# evaluation, which follow steps 10, 20 and 24.
SIGNAL_AT = """
import itertools, os, signal
from vit_jax.workdir.interrupts import Interrupts
ask, calls = Interrupts.anywhere, itertools.count()
def anywhere(self):
    if next(calls) == {}:
        os.kill(os.getpid(), signal.{})
    return ask(self)
Interrupts.anywhere = anywhere
"""
# The number of the call of Interrupts.anywhere.
BEFORE_STEP_9 = 8
IN_EVALUATION = 13
BEFORE_STEP_16 = 27
SIGNAL_IN_COMPILATION = """
import os, signal
from vit_jax.training.program import Program
trace = Program.trace_train_step
def trace_train_step(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return trace(*args)
Program.trace_train_step = trace_train_step
"""


@pytest.fixture
def start(tmp_path):
    """Starts a training run: (number, workdir, fields, ...) -> Processes."""
    numbers = iter(range(100))

    def start_run(number, folder, fields=FIELDS, first=None, own=None, flags=None, devices=1):
        """Args:
        first: {process: Python code that it runs first}.
        own: {process: further config fields}.
        flags: {process: further flags}.
        devices: number of devices of each process; 0: from the config.
        """
        port = free_port()
        starts = []
        for i in range(number):
            options = [
                f'--coordinator=127.0.0.1:{port}',
                f'--num_processes={number}',
                f'--process_id={i}',
                *(flags or {}).get(i, ()),
            ]
            starts.append(
                functools.partial(
                    Forked,
                    arguments(folder, fields=fields | (own or {}).get(i, {})) + options,
                    code=f'{(first or {}).get(i, "")}\n{UNDRAWN}',
                    optimized=False,
                    flags=f'--xla_force_host_platform_device_count={devices}' if devices else '',
                )
            )
        return Processes(tmp_path / f'logs{next(numbers)}', starts)

    return start_run


def train_here(workdir):
    """Trains, or resumes, in this process on eight devices."""
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(FIELDS | {'num_epochs': 0.0})
    assert loop.train(config, str(workdir)) == 0


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """The workdir of an uninterrupted run of one process."""
    workdir = tmp_path_factory.mktemp('undisturbed')
    train_here(workdir)
    return workdir


def final_params(workdir):
    path = workdir / 'checkpoints' / str(FIELDS['num_steps']) / 'state'
    # NumPy arrays, because the devices that saved them may not exist here.
    return ocp.PyTreeCheckpointer().restore(
        path,
        restore_args=jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
            ocp.PyTreeCheckpointer().metadata(path).item_metadata.tree,
        ),
    )['params']


def assert_equal_runs(workdir, expected):
    """Asserts that all rows and parameters are equal up to the order of sums."""
    rows = metrics.read(workdir)
    expected_rows = metrics.read(expected)
    assert len(rows) == len(expected_rows) == FIELDS['num_steps'] + 3
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row.keys() == expected_row.keys()
        for name in row.keys() - set(TIMED):
            assert row[name] == pytest.approx(expected_row[name], rel=1e-5, abs=1e-7), (name, row)
    params = jax.tree.leaves_with_path(final_params(workdir))
    expected_params = jax.tree.leaves(final_params(expected))
    assert len(expected_params) == 24
    for (path, x), y in zip(params, expected_params, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def stopped_at(logs, name='SIGTERM'):
    """The step at which all processes stopped, from their logs."""
    steps = {
        re.search(rf'stopped by {name} after step (\d+) of 24 and saved', log).group(1)
        for log in logs
    }
    assert len(steps) == 1, logs
    return int(steps.pop())


def assert_ended_by_the_loss(run, survivors):
    """Asserts that the survivors end in time, with a line that gives the reason and the remedy."""
    start = time.monotonic()
    for i in survivors:
        run.all[i].wait(100)
        assert run.all[i].returncode in (1, -signal.SIGABRT), run.log(i)
        last = run.last_line(i)
        assert f'error: process {i} of {len(run.all)} was killed or lost another process' in last
        assert last.endswith(
            'Start the same command again on all hosts: the run continues from '
            'its newest checkpoint.'
        )
    print(f'survivors ended after {time.monotonic() - start:.1f} s')


def saving_steps(workdir):
    return sorted(int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit())


@pytest.mark.nightly
def test_one_process_resumes_a_run_of_two_that_a_signal_stopped(start, undisturbed, tmp_path):
    with start(2, tmp_path, first={1: SIGNAL_AT.format(BEFORE_STEP_16, 'SIGTERM')}) as run:
        logs = run.wait([143, 143])
    step = stopped_at(logs)
    assert step == 16  # the vote takes one step
    assert saving_steps(tmp_path)[-1] == step
    assert 'compiled the training step' not in logs[1].lower()  # only process 0 logs progress
    train_here(tmp_path)
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize('several', [2, 4])
def test_several_processes_equal_one_in_fewshot_and_mixup(several, start, tmp_path):
    fields = PLAIN | {
        'num_steps': 2,
        'optimizer.warmup_steps': 0,
        'evals.fewshot.shots': '1,5',
        'augment.mixup': 1.0,
        'augment.randaugment.num_ops': 2,
        'augment.randaugment.translate': 3,
        'augment.randaugment.cutout': 2,
    }
    losses = []
    scores = []
    for number in (1, several):
        with start(number, tmp_path / str(number), fields) as run:
            run.wait([0] * number)
        rows = metrics.read(tmp_path / str(number))
        losses.append([row['train/loss'] for row in rows if 'train/loss' in row])
        scores.append(
            {name: value for name, value in rows[-1].items() if name.startswith('fewshot/')}
        )
    assert len(losses[0]) == 2
    assert len(scores[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert scores[1] == pytest.approx(scores[0], abs=2e-3)  # one image of 360 may differ


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ('host_devices', 'expected'), [(2, 2), pytest.param(0, 1, marks=pytest.mark.nightly)]
)
def test_devices_of_each_process(host_devices, expected, start, tmp_path):
    """Two processes have four devices if the user sets two for each, and two by default."""
    fields = PLAIN | {
        'num_steps': 2,
        'optimizer.warmup_steps': 0,
        'mesh.data': 1,
        'mesh.fsdp': 2 * expected,
        'mesh.host_devices': host_devices,
    }
    with start(2, tmp_path, fields, devices=0) as run:
        run.wait([0, 0])
    recorded = json.loads((tmp_path / 'config.json').read_text())
    assert recorded['mesh']['host_devices'] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    'options',
    [[], pytest.param(['--fewshot=1', '--fewshot_split=train'], marks=pytest.mark.nightly)],
)
def test_two_processes_score_like_one(options, undisturbed, tmp_path):
    """Both processes have broken images in their part; only process 0 prints and writes."""
    for split in ('train', 'test'):
        write_images(tmp_path / 'data' / split, list('0123456789'), 2, size=(8, 8), seed=len(split))
    for name in ('0/000', '3/001', '9/000'):
        (tmp_path / 'data' / 'test' / f'{name}.png').write_text('no image')
    results = []
    saved = []
    for number in (1, 2):
        save = [] if options else [f'--save={tmp_path}/{number}.npz']
        address = f'--coordinator=127.0.0.1:{free_port()}'
        starts = [
            functools.partial(
                Forked,
                [
                    f'--workdir={undisturbed}',
                    f'--dataset={tmp_path}/data',
                    '--split=test',
                    '--json',
                    '--batch_size=8',
                    *options,
                    *save,
                    address,
                    f'--num_processes={number}',
                    f'--process_id={i}',
                ],
                code=EVALUATE,
                optimized=False,
            )
            for i in range(number)
        ]
        with Processes(tmp_path / f'logs{number}', starts) as run:
            logs = run.wait([0] * number)
        printed = [
            [json.loads(line) for line in log.splitlines() if line.startswith('{')] for log in logs
        ]
        assert list(map(len, printed)) == [1, 0][:number]
        results.append(printed[0][0])
        if save:
            saved.append(dict(np.load(tmp_path / f'{number}.npz')))
    assert len(results[0]['broken']) == 3
    values_of_one, values_of_two = map(jax.tree.leaves_with_path, results)
    for (path, x), (path_of_two, y) in zip(values_of_one, values_of_two, strict=True):
        assert path == path_of_two
        assert x == (pytest.approx(y, abs=1e-5) if isinstance(y, float) else y)
    for name in saved[0] if saved else ():
        if name == 'logits':
            np.testing.assert_allclose(*(x[name] for x in saved), rtol=0, atol=1e-5)
        else:
            np.testing.assert_array_equal(*(x[name] for x in saved))


@pytest.mark.slow
@pytest.mark.nightly
def test_one_or_two_processes_resume_after_sigkill_to_one_of_four(start, undisturbed, tmp_path):
    with start(4, tmp_path, first={2: SIGNAL_AT.format(BEFORE_STEP_16, 'SIGKILL')}) as run:
        run.all[2].wait(240)
        assert_ended_by_the_loss(run, [0, 1, 3])
    alone = tmp_path.with_name(f'{tmp_path.name}_alone')
    shutil.copytree(tmp_path, alone)
    train_here(alone)
    assert_equal_runs(alone, undisturbed)
    # The newest checkpoint is damaged: process 0 renames it for both.
    newest = saving_steps(tmp_path)[-1]
    for file in (tmp_path / 'checkpoints' / str(newest) / 'state' / 'd').iterdir():
        file.write_bytes(file.read_bytes()[:100])
    with start(2, tmp_path) as run:
        log, _ = run.wait([0, 0])
    assert f'checkpoint of step {newest} cannot be used' in log
    assert (tmp_path / 'checkpoints' / f'bad-{newest}').is_dir()
    assert re.search(r'continuing from the checkpoint of step \d+ of 24', log)
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_resume_after_sigkill_to_process_0(start, undisturbed, tmp_path):
    with start(2, tmp_path, first={0: SIGNAL_AT.format(BEFORE_STEP_16, 'SIGKILL')}) as run:
        run.all[0].wait(240)
        assert_ended_by_the_loss(run, [1])
    with start(2, tmp_path) as run:
        assert 'continuing from' in run.wait([0, 0])[0]
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.nightly
def test_signal_in_compilation_and_in_evaluation(start, undisturbed, tmp_path):
    fields = FIELDS | {'accum_steps': 0}  # both processes choose the same value
    with start(2, tmp_path, fields, first={1: SIGNAL_IN_COMPILATION}) as run:
        assert stopped_at(run.wait([143, 143])) <= 2
    at = SIGNAL_AT.format(IN_EVALUATION - 2, 'SIGTERM')
    with start(2, tmp_path, fields, first={1: at}) as run:
        assert stopped_at(run.wait([143, 143])) == 10
    rows = metrics.read(tmp_path)
    assert not any('eval/loss' in row for row in rows)
    with start(2, tmp_path, fields) as run:
        assert 'continuing from the checkpoint of step 10' in run.wait([0, 0])[0]
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.nightly
@pytest.mark.slow
def test_sharded_states_resume_on_other_meshes(start, undisturbed, tmp_path):
    """fsdp on four devices of two processes, then tensor on two processes, then one process."""
    with start(
        2,
        tmp_path,
        FIELDS | {'mesh.fsdp': 4},
        devices=2,
        first={0: SIGNAL_AT.format(BEFORE_STEP_9, 'SIGINT')},
    ) as run:
        assert stopped_at(run.wait([130, 130]), 'SIGINT') == 9
    with start(
        2,
        tmp_path,
        FIELDS | {'mesh.tensor': 2},
        first={1: SIGNAL_AT.format(BEFORE_STEP_16 - 9, 'SIGTERM')},
    ) as run:
        assert stopped_at(run.wait([143, 143])) == 16
    train_here(tmp_path)
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('own', 'flags', 'messages'),
    [
        (
            {'batch_size': 64, 'seed': 3},
            [],
            [
                'the config of the processes differs. Start all with',
                'batch_size: 32 on process 0, 64 on process 1',
                'seed: 0 on process 0, 3 on process 1',
            ],
        ),
    ],
)
def test_processes_with_different_configs_are_refused(own, flags, messages, start, tmp_path):
    with start(2, tmp_path, own={1: own}, flags={1: flags}) as run:
        for log in run.wait([1, 1]):
            assert 'Traceback' not in log
            for message in messages:
                assert message in log, log


@pytest.mark.slow
def test_error_on_one_process_during_the_start_ends_both(start, tmp_path):
    failing = (
        'from vit_jax import errors\nfrom vit_jax.training import program\n'
        'def fail(*_):\n'
        '    raise errors.UserError("the disk of this host is full")\n'
        'program.Program.trace_train_step = fail\n'
    )
    with start(2, tmp_path, first={0: failing}) as run:
        assert run.all[0].wait(240) == 1
        assert run.last_line(0) == 'error: the disk of this host is full'
        assert_ended_by_the_loss(run, [1])
