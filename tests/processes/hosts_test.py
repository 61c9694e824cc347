"""Several real processes on this machine: they equal one, and stop and go on together."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.runs import ROOT, TINY, command, environment, load
from vit_jax.errors import UserError
from vit_jax.processes import hosts, rendezvous
from vit_jax.training import loop as train
from vit_jax.workdir import metrics
from vit_jax.workdir import record as workdir

# SGD: Adam makes numbers of the rounding of gradients that are zero, as those of key biases.
FIELDS = TINY | {'num_steps': 24, 'eval_every': 10, 'optimizer.name': 'sgd',
                 'optimizer.learning_rate': 0.05}
# What a process runs first to send itself a signal before a step or a batch of an evaluation. There
# are 12 of these after steps 10, 20 and 24.
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
BEFORE_STEP_9, IN_EVALUATION, BEFORE_STEP_16 = 8, 13, 27
SIGNAL_IN_COMPILATION = """
import os, signal
from vit_jax.training.program import Program
lower = Program.lower_train_step
def lower_train_step(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return lower(*args)
Program.lower_train_step = lower_train_step
"""
MAIN = 'from absl import app; from vit_jax import main; app.run(main.main, flags_parser=main.parse)'


def free_port():
    with socket.socket() as s:
        s.bind(('', 0))
        return s.getsockname()[1]


class Processes:
    """Started processes whose output goes to files; killed when the context is left."""

    def __init__(self, folder, commands, **variables):
        self._folder, self.codes = folder, None
        folder.mkdir(parents=True, exist_ok=True)
        self.all = []
        for i, arguments in enumerate(commands):
            with open(self._log(i), 'w') as output:
                self.all.append(subprocess.Popen(
                    arguments, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                    env=environment() | {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'} | variables))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()

    def _log(self, i):
        return self._folder / f'{i}.log'

    def log(self, i):
        return self._log(i).read_text()

    def wait_for(self, text, i=0, timeout=240):
        deadline = time.monotonic() + timeout
        while text not in self.log(i):
            assert self.all[i].poll() is None, self.log(i)
            assert time.monotonic() < deadline, self.log(i)
            time.sleep(0.01)

    def wait(self, codes, timeout=240):
        """Waits for all; checks their exit codes; returns their logs."""
        deadline = time.monotonic() + timeout
        for process in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        logs = [self.log(i) for i in range(len(self.all))]
        assert [p.returncode for p in self.all] == codes, '\n'.join(logs)
        return logs


@pytest.fixture
def start(tmp_path):
    """Starts a training run: (number, workdir, fields, ...) -> Processes."""
    numbers = iter(range(100))

    def start_run(number, folder, fields=FIELDS, first=None, own=None, flags=None, devices=1):
        """Args:
          first: {process: Python code that it runs first}.
          own: {process: further config fields}.
          flags: {process: further flags}.
        """
        port, commands = free_port(), []
        for i in range(number):
            arguments = command(folder, fields=fields | (own or {}).get(i, {}))[3:]
            code = f'{(first or {}).get(i, "")}\n{MAIN}'
            commands.append([sys.executable, '-c', code, *arguments,
                             f'--coordinator=127.0.0.1:{port}', f'--num_processes={number}',
                             f'--process_id={i}', *(flags or {}).get(i, ())])
        return Processes(tmp_path / f'logs{next(numbers)}', commands, XLA_FLAGS=(
            f'--xla_force_host_platform_device_count={devices}'))
    return start_run


def train_here(workdir):
    """Trains, or goes on, in this process on eight devices."""
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(FIELDS | {'num_epochs': 0.0})
    assert train.run(config, str(workdir)) == 0


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """Workdir of a run of one process that nothing stopped."""
    workdir = tmp_path_factory.mktemp('undisturbed')
    train_here(workdir)
    return workdir


def final_params(workdir):
    path = workdir / 'checkpoints' / str(FIELDS['num_steps']) / 'state'
    # As arrays of this process, whatever they were saved from.
    return ocp.PyTreeCheckpointer().restore(path, restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
        ocp.PyTreeCheckpointer().metadata(path).item_metadata.tree))['params']


def assert_equal_runs(workdir, expected):
    """All rows and the parameters are the same up to the order of sums."""
    a, b = (metrics.read(str(w / 'metrics.jsonl')) for w in (workdir, expected))
    assert len(a) == len(b) == FIELDS['num_steps'] + 3
    for row, like in zip(a, b, strict=True):
        assert row.keys() == like.keys()
        for name in row.keys() - set(metrics.TIMED):
            assert row[name] == pytest.approx(like[name], rel=1e-5, abs=1e-7), (name, row, like)
    a, b = map(final_params, (workdir, expected))
    assert len(jax.tree.leaves(b)) == 24
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def stopped_at(logs, name='SIGTERM'):
    """The step at which all processes stopped, from their logs."""
    steps = {re.search(rf'stopped by {name} after step (\d+) of 24 and saved', log).group(1)
             for log in logs}
    assert len(steps) == 1, logs
    return int(steps.pop())


def saving_steps(workdir):
    return sorted(int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit())


def test_two_equal_one_which_goes_on_after_a_signal_to_one_of_them(start, undisturbed, tmp_path):
    with start(2, tmp_path, first={1: SIGNAL_AT.format(BEFORE_STEP_16, 'SIGTERM')}) as run:
        logs = run.wait([143, 143])
    step = stopped_at(logs)
    assert step == 16  # both hear of it one step later
    assert saving_steps(tmp_path)[-1] == step
    assert 'compiled the training step' not in logs[1]  # process 0 alone says how it goes
    train_here(tmp_path)
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
def test_sigkill_to_one_of_four_then_one_or_two_go_on(start, undisturbed, tmp_path):
    with start(4, tmp_path, first={2: SIGNAL_AT.format(BEFORE_STEP_16, 'SIGKILL')}) as run:
        run.all[2].wait(240)
        killed = time.monotonic()
        logs = run.wait([1, 1, -signal.SIGKILL, 1])
        assert time.monotonic() - killed < 60
    for i in (0, 1, 3):
        assert re.search(r'error: process 2 of 4 \(.*\) does not answer any more, so this one '
                         r'stops, too. To continue from step \d+, start the same command again on '
                         'all hosts', logs[i]), logs[i]
    alone = tmp_path.with_name(f'{tmp_path.name}_alone')
    shutil.copytree(tmp_path, alone)
    train_here(alone)
    assert_equal_runs(alone, undisturbed)
    # What the four saved last is damaged: process 0 sets it aside, for both.
    newest = saving_steps(tmp_path)[-1]
    for file in (tmp_path / 'checkpoints' / str(newest) / 'state' / 'd').iterdir():
        file.write_bytes(file.read_bytes()[:100])
    with start(2, tmp_path) as run:
        log, _ = run.wait([0, 0])
    assert f'checkpoint of step {newest} cannot be used' in log
    assert (tmp_path / 'checkpoints' / f'bad-{newest}').is_dir()
    assert re.search(r'continuing from the checkpoint of step \d+ of 24', log)
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_process_that_hangs(start, tmp_path):
    with start(2, tmp_path, first={1: SIGNAL_AT.format(BEFORE_STEP_9, 'SIGSTOP')}) as run:
        run.wait_for('step 7/24')
        start = time.monotonic()
        assert run.all[0].wait(240) == 1
        assert time.monotonic() - start < 60
        assert re.search(r'error: process 1 of 2 \(.*\) does not answer any more', run.log(0))


@pytest.mark.slow
def test_sigkill_to_process_0(start, undisturbed, tmp_path):
    with start(2, tmp_path, first={0: SIGNAL_AT.format(BEFORE_STEP_16, 'SIGKILL')}) as run:
        run.all[0].wait(240)
        killed = time.monotonic()
        logs = run.wait([-signal.SIGKILL, 1])
        assert time.monotonic() - killed < 60
    assert re.search(r'error: process 0 of 2, at 127.0.0.1:\d+, does not answer any more, so this '
                     r'one stops, too. To continue from step \d+, start', logs[1]), logs[1]
    with start(2, tmp_path) as run:
        assert 'continuing from' in run.wait([0, 0])[0]
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
def test_signal_in_compilation_and_in_evaluation(start, undisturbed, tmp_path):
    fields = FIELDS | {'accum_steps': 0}  # to be chosen by both alike
    with start(2, tmp_path, fields, first={1: SIGNAL_IN_COMPILATION}) as run:
        assert stopped_at(run.wait([143, 143])) <= 2
    at = SIGNAL_AT.format(IN_EVALUATION - 2, 'SIGTERM')
    with start(2, tmp_path, fields, first={1: at}) as run:
        assert stopped_at(run.wait([143, 143])) == 10
    rows = metrics.read(str(tmp_path / 'metrics.jsonl'))
    assert not any('eval/loss' in row for row in rows)
    with start(2, tmp_path, fields) as run:
        assert 'continuing from the checkpoint of step 10' in run.wait([0, 0])[0]
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
def test_split_states_go_on_on_other_meshes(start, undisturbed, tmp_path):
    """fsdp over four devices of two processes, then tensor across two processes, then one."""
    with start(2, tmp_path, FIELDS | {'mesh.fsdp': 4}, devices=2,
               first={0: SIGNAL_AT.format(BEFORE_STEP_9, 'SIGINT')}) as run:
        assert stopped_at(run.wait([130, 130]), 'SIGINT') == 9
    with start(2, tmp_path, FIELDS | {'mesh.tensor': 2},
               first={1: SIGNAL_AT.format(BEFORE_STEP_16 - 9, 'SIGTERM')}) as run:
        assert stopped_at(run.wait([143, 143])) == 16
    train_here(tmp_path)
    assert_equal_runs(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(('own', 'flags', 'messages'), [
    ({'batch_size': 64, 'seed': 3}, [], ['the config of the processes differs. Start all with',
                                         'batch_size: 32 on process 0, 64 on process 1',
                                         'seed: 0 on process 0, 3 on process 1']),
    ({}, ['--workdir=/tmp/vit_jax_other'], ["'/tmp/vit_jax_other' on process 1"]),
    ({}, ['--num_processes=3'], ['the number of processes differs: 2 on process 0, 3 on process'])])
def test_processes_that_were_started_differently(own, flags, messages, start, tmp_path):
    with start(2, tmp_path, own={1: own}, flags={1: flags}) as run:
        for log in run.wait([1, 1]):
            assert 'Traceback' not in log
            for message in messages:
                assert message in log, log


@pytest.mark.slow
@pytest.mark.parametrize('process', [0, 1])
def test_an_error_on_one_process_stops_all_and_is_told_by_all(process, start, tmp_path):
    failing = ('from vit_jax import errors\nfrom vit_jax.training import loop as train\n'
               'def fail(self):\n'
               '    raise errors.UserError("the disk of this host is full")\n'
               'train.Trainer._compile = fail\n')
    with start(2, tmp_path, first={process: failing}) as run:
        logs = run.wait([1, 1], timeout=120)
    assert 'error: the disk of this host is full' in logs[process]
    assert re.search(rf'error: process {process} of 2 \(.*\) stopped with error: the disk of this '
                     'host is full, so this one stops, too', logs[1 - process]), logs[1 - process]


def test_flags_and_environment(monkeypatch):
    monkeypatch.delenv('KUBERNETES_SERVICE_HOST', raising=False)
    assert rendezvous.detect() == (None, 1, 0)
    assert rendezvous.detect(num_processes=1) == (None, 1, 0)
    assert rendezvous.detect('a:1', 4, 3) == ('a:1', 4, 3)
    for given, message in [(('a:1', None, None), '--num_processes and --process_id missing'),
                           ((None, 4, 0), '--coordinator missing'),
                           (('a:1', 4, 4), '--process_id is 4 and --num_processes 4'),
                           (('a:1', 0, 0), '--num_processes 0')]:
        with pytest.raises(UserError, match=message):
            rendezvous.detect(*given)
    for name, value in {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'node[01-04]',
                        'SLURM_NTASKS': '4', 'SLURM_PROCID': '2', 'SLURM_LOCALID': '0'}.items():
        monkeypatch.setenv(name, value)
    assert rendezvous.detect() == ('node01:61447', 4, 2)
    with pytest.raises(UserError, match='vit_jax.evaluate runs as one process and was started as '
                                        'one of 4: start it once'):
        hosts.refuse_several('vit_jax.evaluate')


def test_what_differs_between_processes_is_named_with_both_values(monkeypatch):
    class Two:
        def agree(self, value, decide):
            return decide([value | {'a': 2, 'c': 5}, value])

    monkeypatch.setattr(hosts, '_group', Two())
    with pytest.raises(UserError) as error:
        hosts.check_equal('the config', {'a': 1, 'b': [4, 4]})
    assert str(error.value).splitlines()[1:] == [
        '  a: 2 on process 0, 1 on process 1', "  c: 5 on process 0, 'absent' on process 1"]


def meet_all(calls, timeout=20):
    """The message of every process of rendezvous.meet, '' where it returned."""
    messages = [None] * len(calls)
    port = free_port()

    def meet(k, number, process):
        try:
            rendezvous.meet(f'127.0.0.1:{port}', number, process, timeout)
            messages[k] = ''
        except UserError as error:
            messages[k] = str(error)

    threads = [threading.Thread(target=meet, args=(k, *call)) for k, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return messages


def test_processes_meet():
    assert meet_all([(4, i) for i in (3, 1, 0, 2)]) == [''] * 4


def test_process_counts_that_disagree():
    for here, there in ((2, 4), (4, 2)):
        for message in meet_all([(here, 0), (there, 1)]):
            assert (f'the number of processes differs: {here} on process 0, {there} on process 1. '
                    'Start all with the same --num_processes.') == message


def test_two_processes_with_one_number():
    messages = meet_all([(3, 0), (3, 1), (3, 1)])
    assert all('two processes have --process_id=1' in message for message in messages)


def test_a_process_that_does_not_come():
    for message in meet_all([(4, 0), (4, 2)], timeout=1):
        assert '2 of 4 processes came' in message
        assert 'within 1 s. Missing: 1, 3. Start the same command on all hosts' in message


def test_a_process_started_again_while_the_others_wait():
    port = free_port()
    calls = [threading.Thread(target=rendezvous.meet, args=(f'127.0.0.1:{port}', 3, i, 20))
             for i in range(3)]
    calls[0].start()
    for _ in range(200):  # it comes and dies
        with contextlib.suppress(ConnectionRefusedError):
            with socket.create_connection(('127.0.0.1', port)) as first:
                first.sendall(json.dumps({'process': 1, 'processes': 3}).encode() + b'\n')
            break
        time.sleep(0.05)
    calls[2].start()
    time.sleep(0.2)  # so that process 2 is the last one, which it must not be
    calls[1].start()
    for thread in calls:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize('coordinator', ['127.0.0.1:{}', 'no-such-host.invalid:{}'])
def test_wrong_coordinator_address(coordinator):
    coordinator = coordinator.format(free_port())
    start = time.monotonic()
    with pytest.raises(UserError, match='process 1 of 2 did not reach process 0 at --coordinator='
                                        f'{coordinator} within 1 s .*Give the address of the host'):
        rendezvous.meet(coordinator, 2, 1, timeout=1)
    assert time.monotonic() - start < 30


def test_coordinator_that_is_something_else():
    with socket.create_server(('127.0.0.1', 0)) as server:
        def answer():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(b'SSH-2.0\r\n')
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UserError, match='what answers there is not process 0 of a run'):
            rendezvous.meet(f'127.0.0.1:{server.getsockname()[1]}', 2, 1, timeout=1)
        with pytest.raises(UserError, match='process 0 cannot listen at port'):
            rendezvous.meet(f'127.0.0.1:{server.getsockname()[1]}', 2, 0, timeout=1)


@pytest.mark.parametrize('coordinator', ['host', ':1234', 'host:port', 'host:0'])
def test_coordinator_without_host_or_port(coordinator):
    with pytest.raises(UserError, match=f"--coordinator is '{coordinator}': expected HOST:PORT"):
        rendezvous.meet(coordinator, 2, 0, timeout=1)


def test_workdir_must_be_shared():
    with pytest.raises(UserError, match='the workdir /data of process 1 is not that of process 0'):
        workdir._require_shared('/data', [True, False])


# Stands in for the interpreter of launch/local.sh: $1 is -c for the port, else -m.
STUB = """#!/usr/bin/env bash
[ "$1" = -c ] && exec {python} "$@"
for last; do :; done
trap 'exit 143' TERM
trap 'exit 130' INT
echo "up $last $3"
[ $last = --process_id={failing} ] && exit 7
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(('failing', 'signum', 'code'), [
    (1, None, 7), (-1, signal.SIGTERM, 143), (-1, signal.SIGINT, 130)])
def test_local_launcher(failing, signum, code, tmp_path):
    stub = tmp_path / 'python'
    stub.write_text(STUB.format(python=sys.executable, failing=failing))
    stub.chmod(0o755)
    script = [str(ROOT / 'launch' / 'local.sh'), '3', '--config=x y']
    with Processes(tmp_path, [script], PYTHON=str(stub), GRACE='1') as run:
        for i in range(3):
            run.wait_for(f'up --process_id={i} --config=x y')
        if signum:
            run.all[0].send_signal(signum)
        run.wait([code], timeout=60)


def test_local_launcher_without_a_number():
    result = subprocess.run([str(ROOT / 'launch' / 'local.sh'), '--config=x'], text=True,
                            capture_output=True, check=False)
    assert result.returncode == 2
    assert 'usage: ' in result.stderr


@pytest.mark.slow
def test_local_launcher_trains(tmp_path):
    flags = command(tmp_path / 'run', fields=FIELDS | {'num_steps': 8})[3:]
    with Processes(tmp_path, [[str(ROOT / 'launch' / 'local.sh'), '2', *flags]],
                   PYTHON=sys.executable) as run:
        assert 'done: 8 steps' in run.wait([0])[0]
