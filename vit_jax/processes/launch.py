"""Connects the processes of a run; an error in one process ends all of them.

JAX's coordination service in process 0 monitors all processes. When a process is lost, the service
aborts the others from C++, and `last_words` then prints the reason.
"""

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator

import jax

from vit_jax import errors, machine
from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.processes.last_words import LastWords

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT = 40  # a process counts as lost after so many seconds without a heartbeat
GRACE = 3  # seconds for the error reports of the others before JAX's service ends
# The beginning of the errors of collectives and of JAX's service when another process is lost.
_LOST_PROCESS = re.compile(
    r'(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): |'
    r'[A-Z_]+: .*(?i:gloo|nccl|heartbeat|coordination|barrier|connection (closed|reset))'
)

_last_words: LastWords | None = None  # only with several processes


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300,
    continues: bool = True,
) -> None:
    """Joins the other processes of the run, if there are any. Call this before JAX is used.

    On TPU pods, under Slurm and Open MPI, and in indexed Kubernetes jobs the environment provides
    the first three arguments. JAX ends this process if another one is missing after the timeout.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: number of processes of the run.
      process_id: number of this process, from 0.
      timeout: seconds to wait for the others.
      continues: whether the same command resumes the work. If another process is lost, the last
        line of this process then says so.

    Raises:
      UserError: process 0 cannot be reached, or the arguments of the processes do not match.
    """
    global _last_words
    identity = coordinator, num_processes, process_id
    if num_processes == 1:
        return
    if identity == (None, None, None) and _num_launched() == 1:
        return
    if coordinator is not None:
        _check_address(coordinator, process_id, timeout)
    name = 'this process' if None in identity else f'process {process_id} of {num_processes}'
    place = f' at {coordinator}' if coordinator else ''
    _last_words = LastWords()
    _last_words.set_line(
        f'error: {name} and the others did not all connect{place} within {timeout:.0f} s. '
        'One is missing, two have the same --process_id, or --num_processes differs between '
        'them (the lines above may tell). Start the same command again on all hosts.'
    )
    try:
        _connect(identity, timeout)
    finally:
        if not jax.distributed.is_initialized():
            _last_words.drop()
    if not jax.distributed.is_initialized():
        return
    with machine.quiet_libtpu():
        process_id = jax.process_index()
        number = jax.process_count()
    resumption = ': the run continues from its newest checkpoint' if continues else ''
    _last_words.set_line(
        f'error: process {process_id} of {number} was killed or lost another process, which was '
        'killed, hangs, stopped with an error, or is on an unreachable host (the lines above may '
        f'tell). Start the same command again on all hosts{resumption}.'
    )
    consensus.check_equal('the number', {'--num_processes': num_processes or number})


def finish() -> None:
    """Waits for all processes and disconnects them; each is then a single process again."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
        drop_last_line()


def drop_last_line() -> None:
    """Drops the last line that the end of this process would print."""
    if _last_words is not None:
        _last_words.drop()


@contextlib.contextmanager
def leave_on_error() -> Iterator[None]:
    """Ends one of several processes immediately when an error leaves this context.

    The exit code is 1, 130 after Ctrl-C, or the code of a SystemExit. An ordinary exit would wait
    for the other processes, which wait for this one. A single process raises its errors as usual.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not jax.distributed.is_initialized():
            raise
        has_lost_process = _is_lost_process(error)
        if has_lost_process:
            log.warning('%s', str(error).partition('\n')[0])
        else:
            if isinstance(error, Exception):
                errors.report(error)
            if _last_words is not None:
                _last_words.set_line('')
        # If process 0 is lost, JAX aborts this process during the pause, and the last line comes
        # after all messages of JAX.
        if has_lost_process or consensus.is_main():
            time.sleep(GRACE)
        if _last_words is not None:
            _last_words.print_now()
        logging.shutdown()
        os._exit(_exit_code(error))


def _is_lost_process(error):
    """Whether JAX raised the error because another process is lost."""
    if not isinstance(error, RuntimeError | ValueError):
        return False
    return _LOST_PROCESS.match(str(error)) is not None


def _exit_code(error):
    """The exit code that Python would use for the error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    return 1  # SystemExit with a message


def refuse_several(program: str, num_processes: int | None = None) -> None:
    """Raises UserError if a program for one process was started as several."""
    number = num_processes or _num_launched()
    if not number:
        number = int(os.environ.get('JOB_COMPLETION_INDEX') or 0) + 1
    if number > 1:
        raise UserError(
            f'{program} runs as one process, but was started as one of {number}: '
            'start it once, on one host. Only vit_jax.main and vit_jax.evaluate support '
            'several processes.',
            kind='inapplicable',
            field='--num_processes',
            value=number,
        )


def _num_launched():
    """The number of processes in the launcher's environment; None if there is no launcher."""
    if 'OMPI_COMM_WORLD_SIZE' in os.environ:
        return int(os.environ['OMPI_COMM_WORLD_SIZE'])
    if 'SLURM_STEP_NODELIST' in os.environ:  # set by srun, and not in a batch script
        return int(os.environ.get('SLURM_NTASKS', 1))
    hosts = os.environ.get('TPU_PROCESS_ADDRESSES') or os.environ.get('TPU_WORKER_HOSTNAMES')
    if hosts:
        return len(hosts.split(',')) * int(os.environ.get('MEGASCALE_NUM_SLICES') or 1)
    if 'KUBERNETES_SERVICE_HOST' in os.environ and 'JOB_COMPLETION_INDEX' not in os.environ:
        return 1  # JAX would query the cluster for a job that does not exist
    return None


def _connect(identity, timeout):
    """Connects to the other processes; does nothing without flags and without a launcher.

    `identity` is (coordinator, num_processes, process_id).
    """
    # JAX's preemption service would replace the SIGTERM handler of interrupts.Interrupts.
    jax.config.update('jax_enable_preemption_service', False)
    try:
        jax.distributed.initialize(
            *identity,
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        )
    except Exception as error:  # each launcher raises different kinds
        has_flags = identity != (None, None, None)
        # JAX raises ValueError if it finds no launcher, and RuntimeError if JAX is in use already,
        # as in a notebook: this is a single process then.
        is_single = type(error) in (ValueError, RuntimeError)
        if has_flags or _num_launched() or not is_single:
            reason = 'the flags' if has_flags else 'the environment'
            raise UserError(
                f'according to {reason} this is one of several processes, but JAX cannot join '
                f'them: {error} Pass --coordinator=HOST:PORT --num_processes=N --process_id=I, '
                'with I from 0 to N - 1.',
                kind='value',
                field='--coordinator',
            ) from error


def _check_address(coordinator, process_id, timeout):
    """Raises UserError, where JAX would abort, if process 0 cannot listen or be reached."""
    host, _, port = coordinator.rpartition(':')
    is_number = port.isascii() and port.isdecimal()
    if not host or not is_number or not 0 < int(port) < 2**16:
        raise UserError(
            f'--coordinator is {coordinator!r}: expected HOST:PORT, the host of '
            'process 0 and a free port on it, for example 10.0.0.1:1234.',
            kind='value',
            field='--coordinator',
            value=coordinator,
        )
    if process_id == 0:
        _check_port(coordinator, int(port))
        log.info('process 0 waits for the others at %s', coordinator)
    elif process_id:
        _wait_for_process_0(coordinator, host.strip('[]'), int(port), process_id, timeout)


def _check_port(coordinator, port):
    """Raises UserError unless this host can listen at the port."""
    try:
        socket.create_server(('', port)).close()
    except OSError as error:
        raise UserError(
            f'process 0 cannot listen at port {port} of this host ({error}). Use '
            'another port in --coordinator, the same on all hosts.',
            kind='resource',
            field='--coordinator',
            value=coordinator,
        ) from error


def _wait_for_process_0(coordinator, host, port, process_id, timeout):
    """Waits until process 0 accepts connections; raises UserError after the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f'process {process_id} did not reach process 0 at --coordinator={coordinator} '
                    f'within {timeout:.0f} s ({error}). Pass the address of the host of '
                    'process 0, and check that the process runs.',
                    kind='resource',
                    field='--coordinator',
                    value=coordinator,
                ) from error
        time.sleep(0.5)
