import contextlib
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

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
    """What jax.distributed.initialize is called with; it stops there."""
    calls = []

    def initialize(*given, **options):
        calls.append((given, options))
        raise RuntimeError('JAX goes on from here')

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
def test_launchers_of_a_single_process(variables, monkeypatch, initialisations):
    set_all(monkeypatch, variables)
    launch.start()
    launch.refuse_several('vit_jax.sweep')
    assert not initialisations


@pytest.mark.parametrize('variables', [{}, {'SLURM_NTASKS': '4'}])  # a batch script, without srun
def test_no_launcher(variables, monkeypatch):
    def initialize(*_, **__):
        raise ValueError('coordinator_address should be defined.')

    monkeypatch.setattr(jax.distributed, 'initialize', initialize)
    set_all(monkeypatch, variables)
    launch.start()
    launch.start(num_processes=1)
    launch.refuse_several('vit_jax.sweep')
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '4')  # of a version that JAX does not know
    with pytest.raises(UserError, match='it looks as if this is one of several processes'):
        launch.start()


@pytest.mark.parametrize('variables', LAUNCHERS)
def test_programs_for_one_process_refuse_several(variables, monkeypatch):
    set_all(monkeypatch, variables)
    with pytest.raises(
        UserError,
        match='vit_jax.sweep runs as one process and was started as '
        'one of 4: start it once, on one host',
    ):
        launch.refuse_several('vit_jax.sweep')


def test_the_flags_of_several_are_refused():
    with pytest.raises(
        UserError, match='vit_jax.sweep runs as one process and was started as one of 2'
    ):
        launch.refuse_several('vit_jax.sweep', 2)
    launch.refuse_several('vit_jax.sweep', 1)


def test_launchers_and_flags_are_passed_to_jax(monkeypatch, initialisations):
    set_all(monkeypatch, SLURM)
    with pytest.raises(
        UserError,
        match='it looks as if this is one of several processes, '
        'and JAX cannot join them: JAX goes on from here Give --co'
        'ordinator=HOST:PORT',
    ):
        launch.start(timeout=7)
    assert initialisations.pop() == (
        (None, None, None),
        {'initialization_timeout': 7, 'heartbeat_timeout_seconds': launch.HEARTBEAT_TIMEOUT},
    )
    port = free_port()
    with pytest.raises(
        UserError,
        match='the flags say this is one of several processes, and '
        'JAX cannot join them: JAX goes on from here Give --co',
    ):
        launch.start(f'127.0.0.1:{port}', 4, 0)
    assert initialisations.pop()[0] == (f'127.0.0.1:{port}', 4, 0)


@pytest.mark.parametrize('coordinator', ['host', ':1234', 'host:port', 'host:0', 'host:70000'])
def test_coordinator_without_host_or_port(coordinator):
    with pytest.raises(UserError, match=f"--coordinator is '{coordinator}': expected HOST:PORT"):
        launch.start(coordinator, 2, 0, timeout=1)


@pytest.mark.parametrize('coordinator', ['127.0.0.1:{}', 'no-such-host.invalid:{}'])
def test_wrong_coordinator_address(coordinator):
    coordinator = coordinator.format(free_port())
    start = time.monotonic()
    with pytest.raises(
        UserError,
        match='process 1 did not reach process 0 at --coordinator='
        f'{coordinator} within 1 s .*Give the address of the host',
    ):
        launch.start(coordinator, 2, 1, timeout=1)
    assert time.monotonic() - start < 30


def test_port_that_is_taken():
    with (
        socket.create_server(('', 0)) as server,
        pytest.raises(UserError, match='process 0 cannot listen at port'),
    ):
        launch.start(f'127.0.0.1:{server.getsockname()[1]}', 2, 0, timeout=1)


def test_a_process_waits_until_process_0_is_there(initialisations):
    port = free_port()
    listening = threading.Timer(
        1, lambda: stack.enter_context(socket.create_server(('127.0.0.1', port)))
    )
    with contextlib.ExitStack() as stack:
        listening.start()
        with pytest.raises(UserError, match='JAX goes on from here'):
            launch.start(f'127.0.0.1:{port}', 2, 1, timeout=20)
        assert initialisations


def test_an_error_of_a_single_process_is_left_to_its_caller(caplog):
    with pytest.raises(UserError, match='no such file'), launch.leave_on_error():
        raise UserError('no such file')
    launch.finish()
    assert not caplog.text


# In JAX's words.
DO_NOT_FIT = {
    ('127.0.0.1:{port}', None, None): 'Number of processes must be defined.',
    (None, 4, 0): 'coordinator_address should be defined.',
    ('127.0.0.1:{port}', 4, None): 'process id of the current process must be defined.',
    ('127.0.0.1:{port}', 2, -1): 'Got process_id=-1, num_processes=2.',
}


def test_flags_that_do_not_fit_each_other():
    with socket.create_server(('127.0.0.1', 0)) as server:
        calls = str(list(DO_NOT_FIT)).replace('{port}', str(server.getsockname()[1]))
        result = subprocess.run(
            [
                sys.executable,
                '-c',
                (
                    'from vit_jax.errors import UserError\nfrom vit_jax.processes import launch\n'
                    f'for given in {calls}:\n    try:\n        launch.start(*given)\n'
                    '    except UserError as error:\n        print(error)'
                ),
            ],
            text=True,
            capture_output=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
    for line, message in zip(result.stdout.splitlines(), DO_NOT_FIT.values(), strict=True):
        assert message in line
        assert 'Give --coordinator=HOST:PORT --num_processes=N --process_id=I' in line
