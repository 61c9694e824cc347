import contextlib
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from tests.support.errors import refused
from tests.support.processes import free_port
from tests.support.runs import ROOT
from vit_jax.errors import UserError
from vit_jax.processes import launch

SLURM = {
    'SLURM_JOB_ID': '7',
    'SLURM_STEP_NODELIST': 'node[01-04]',
    'SLURM_NTASKS': '4',
    'SLURM_PROCID': '2',
    'SLURM_LOCALID': '0',
}
OPEN_MPI = {
    'OMPI_COMM_WORLD_SIZE': '4',
    'OMPI_COMM_WORLD_RANK': '2',
    'OMPI_COMM_WORLD_LOCAL_RANK': '0',
}
TPU_SLICE = {'TPU_WORKER_HOSTNAMES': 'host0,host1', 'MEGASCALE_NUM_SLICES': '2'}
INDEXED_JOB = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '3'}
LAUNCHERS = [SLURM, OPEN_MPI, TPU_SLICE, INDEXED_JOB]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in {name for variables in LAUNCHERS for name in variables}:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def initialisations(monkeypatch):
    """The arguments of the calls of jax.distributed.initialize, which then raises an error."""
    calls = []

    def initialize(*arguments, **options):
        calls.append((arguments, options))
        raise RuntimeError('JAX was called.')

    monkeypatch.setattr(jax.distributed, 'initialize', initialize)
    return calls


@pytest.mark.parametrize(
    'variables',
    [
        {'KUBERNETES_SERVICE_HOST': '10.0.0.1'},
        SLURM | {'SLURM_NTASKS': '1'},
        OPEN_MPI | {'OMPI_COMM_WORLD_SIZE': '1'},
        {'TPU_WORKER_HOSTNAMES': 'localhost'},
    ],
)
def test_launcher_of_a_single_process_does_not_connect(variables, monkeypatch, initialisations):
    set_all(monkeypatch, variables)
    launch.start()
    launch.refuse_several('vit_jax.sweep')
    assert not initialisations


@pytest.mark.parametrize('variables', [{}, {'SLURM_NTASKS': '4'}])  # a batch script without srun
def test_process_without_a_launcher_runs_alone(variables, monkeypatch):
    def initialize(*_, **__):
        raise ValueError('coordinator_address should be defined.')

    monkeypatch.setattr(jax.distributed, 'initialize', initialize)
    set_all(monkeypatch, variables)
    launch.start()
    launch.start(num_processes=1)
    launch.refuse_several('vit_jax.sweep')
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '4')  # a version that JAX does not know
    with refused(kind='value', field='--coordinator') as caught:
        launch.start()
    assert 'according to the environment this is one of several processes' in str(caught.value)


@pytest.mark.parametrize('variables', LAUNCHERS)
def test_programs_for_one_process_refuse_several(variables, monkeypatch):
    set_all(monkeypatch, variables)
    with refused(kind='inapplicable', value=4) as caught:
        launch.refuse_several('vit_jax.sweep')
    assert str(caught.value).startswith(
        'vit_jax.sweep runs as one process, but was started as one of 4: start it once, on one host'
    )


def test_programs_for_one_process_refuse_the_flag_num_processes():
    with refused(kind='inapplicable', field='--num_processes', value=2):
        launch.refuse_several('vit_jax.sweep', 2)
    launch.refuse_several('vit_jax.sweep', 1)


def test_launchers_and_flags_are_passed_to_jax(monkeypatch, initialisations):
    set_all(monkeypatch, SLURM)
    with refused(kind='value', field='--coordinator'):
        launch.start(timeout=7)
    assert initialisations.pop() == (
        (None, None, None),
        {'initialization_timeout': 7, 'heartbeat_timeout_seconds': launch.HEARTBEAT_TIMEOUT},
    )
    port = free_port()
    with refused(kind='value', field='--coordinator') as caught:
        launch.start(f'127.0.0.1:{port}', 4, 0)
    assert str(caught.value) == (
        'according to the flags this is one of several processes, but JAX cannot join them: JAX '
        'was called. Pass --coordinator=HOST:PORT --num_processes=N --process_id=I, with I from 0 '
        'to N - 1.'
    )
    assert initialisations.pop()[0] == (f'127.0.0.1:{port}', 4, 0)


@pytest.mark.parametrize('coordinator', ['host', ':1234', 'host:port', 'host:0', 'host:70000'])
def test_coordinator_without_host_or_port(coordinator):
    with refused(kind='value', field='--coordinator', value=coordinator):
        launch.start(coordinator, 2, 0, timeout=1)


@pytest.mark.parametrize('coordinator', ['127.0.0.1:{}', 'no-such-host.invalid:{}'])
def test_wrong_coordinator_address(coordinator):
    coordinator = coordinator.format(free_port())
    start = time.monotonic()
    with refused(kind='resource', field='--coordinator', value=coordinator) as caught:
        launch.start(coordinator, 2, 1, timeout=1)
    assert 'process 1 did not reach process 0 at --coordinator=' in str(caught.value)
    assert time.monotonic() - start < 30


def test_port_in_use_is_refused():
    with socket.create_server(('', 0)) as server:
        coordinator = f'127.0.0.1:{server.getsockname()[1]}'
        with refused(kind='resource', field='--coordinator', value=coordinator):
            launch.start(coordinator, 2, 0, timeout=1)


def test_process_waits_for_process_0(initialisations):
    port = free_port()
    listening = threading.Timer(
        1, lambda: stack.enter_context(socket.create_server(('127.0.0.1', port)))
    )
    with contextlib.ExitStack() as stack:
        listening.start()
        with pytest.raises(UserError, match='JAX was called'):
            launch.start(f'127.0.0.1:{port}', 2, 1, timeout=20)
        assert initialisations


def test_single_process_raises_its_errors(caplog):
    with pytest.raises(UserError, match='no such file'), launch.leave_on_error():
        raise UserError('no such file')
    launch.finish()
    assert not caplog.text


# Contradicting flags and the messages of JAX.
CONTRADICTIONS = {
    ('127.0.0.1:{port}', None, None): 'Number of processes must be defined.',
    (None, 4, 0): 'coordinator_address should be defined.',
    ('127.0.0.1:{port}', 4, None): 'process id of the current process must be defined.',
    ('127.0.0.1:{port}', 2, -1): 'Got process_id=-1, num_processes=2.',
}


def test_contradicting_flags_are_refused():
    with socket.create_server(('127.0.0.1', 0)) as server:
        calls = str(list(CONTRADICTIONS)).replace('{port}', str(server.getsockname()[1]))
        result = subprocess.run(
            [
                sys.executable,
                '-c',
                (
                    'from vit_jax.errors import UserError\nfrom vit_jax.processes import launch\n'
                    f'for call in {calls}:\n    try:\n        launch.start(*call)\n'
                    '    except UserError as error:\n        print(error)'
                ),
            ],
            text=True,
            capture_output=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
    for line, message in zip(result.stdout.splitlines(), CONTRADICTIONS.values(), strict=True):
        assert message in line
        assert 'Pass --coordinator=HOST:PORT --num_processes=N --process_id=I' in line
