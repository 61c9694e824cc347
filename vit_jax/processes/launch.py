"""Several processes find each other, and an error of one of them ends them all.

JAX's coordination service in process 0 watches over all processes. When one is lost it aborts the
others from C++; `last_words` then says what happened.
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

HEARTBEAT_TIMEOUT = 40  # seconds without a sign of life after which a process counts as lost
GRACE = 3  # seconds for the others to report their errors before JAX's service ends, too
# How errors of collectives and of JAX's service begin when another process is gone.
_LOST_PROCESS = re.compile(
    r'(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): |'
    r'[A-Z_]+: .*(?i:gloo|nccl|heartbeat|coordination|barrier|connection (closed|reset))'
)

_last_words: LastWords | None = None  # with several processes


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300,
    continues: bool = True,
) -> None:
    """Joins the other processes of the run, if there are any. Must be called before JAX is used.

    `coordinator` is HOST:PORT of process 0. On TPU pods, under Slurm, Open MPI and in indexed
    Kubernetes jobs, this and the next two are found in the environment. If another process is
    missing after `timeout` seconds, JAX ends this one. `continues`: whether the same command
    goes on from what it has saved, which is said when a process is lost.

    Raises UserError when process 0 cannot be reached, or the arguments of the others do not match.
    """
    global _last_words
    given = coordinator, num_processes, process_id
    if num_processes == 1 or (given == (None, None, None) and _launched() == 1):
        return
    if coordinator is not None:
        _check_address(coordinator, process_id, timeout)
    name = 'this process' if None in given else f'process {process_id} of {num_processes}'
    place = f' at {coordinator}' if coordinator else ''
    _last_words = LastWords()
    _last_words.will_be(
        f'error: {name} and the others did not all connect{place} within {timeout:.0f} s. '
        'One is missing, two have the same --process_id, or --num_processes is not the same '
        'everywhere (the lines above may say which). Start the same command again on all hosts.'
    )
    try:
        _connect(given, timeout)
    finally:
        if not jax.distributed.is_initialized():
            _last_words.drop()
    if jax.distributed.is_initialized():
        with machine.quiet_libtpu():
            process_id, number = jax.process_index(), jax.process_count()
        _last_words.will_be(
            f'error: process {process_id} of {number} was killed, or lost another process: one '
            'that was killed, hangs, stopped with an error, or whose host is not reachable (the '
            'lines above may say which). Start the same command again on all hosts'
            f'{": the run continues from its newest checkpoint" if continues else ""}.'
        )
        consensus.check_equal('the number', {'--num_processes': num_processes or number})


def finish() -> None:
    """Waits for all processes and disconnects them; this one is then a single process again."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
        say_nothing_more()


def say_nothing_more() -> None:
    """Drops the last line of one of several processes, which the end of a process would print."""
    if _last_words is not None:
        _last_words.drop()


@contextlib.contextmanager
def leave_on_error() -> Iterator[None]:
    """In this context an error ends one of several processes at once, with exit code 1 (or 130).

    SystemExit does so with its own. An ordinary exit would wait for processes that wait for this
    one. Errors of a single process are raised as usual.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not jax.distributed.is_initialized():
            raise
        lost = isinstance(error, RuntimeError | ValueError) and _LOST_PROCESS.match(str(error))
        if lost:
            log.warning('%s', str(error).partition('\n')[0])
        else:
            if isinstance(error, Exception):
                errors.report(error)
            if _last_words is not None:
                _last_words.will_be('')
        if lost or consensus.is_main():  # JAX aborts this one if process 0 is lost: words come last
            time.sleep(GRACE)
        if _last_words is not None:
            _last_words.say()
        logging.shutdown()
        os._exit(_exit_code(error))


def _exit_code(error):
    """That with which Python ends after the error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1  # a text says what has failed


def refuse_several(program: str, num_processes: int | None = None) -> None:
    """Raises UserError if several processes of a program that runs as one are started."""
    number = num_processes or _launched() or int(os.environ.get('JOB_COMPLETION_INDEX') or 0) + 1
    if number > 1:
        raise UserError(
            f'{program} runs as one process and was started as one of {number}: '
            'start it once, on one host. Only vit_jax.main and vit_jax.evaluate take '
            'several.'
        )


def _launched():
    """The number of processes by the launcher's environment; None if there is no launcher."""
    if 'OMPI_COMM_WORLD_SIZE' in os.environ:
        return int(os.environ['OMPI_COMM_WORLD_SIZE'])
    if 'SLURM_STEP_NODELIST' in os.environ:  # set by srun, not in a batch script, which runs once
        return int(os.environ.get('SLURM_NTASKS', 1))
    if hosts := os.environ.get('TPU_PROCESS_ADDRESSES') or os.environ.get('TPU_WORKER_HOSTNAMES'):
        return len(hosts.split(',')) * int(os.environ.get('MEGASCALE_NUM_SLICES') or 1)
    if 'KUBERNETES_SERVICE_HOST' in os.environ and 'JOB_COMPLETION_INDEX' not in os.environ:
        return 1  # JAX would ask the cluster for a job that does not exist
    return None


def _connect(given, timeout):
    """Returns when all are connected, or at once if no flag and no launcher says there are any."""
    # The service's own handler of SIGTERM would replace that of interrupts.Interrupts.
    jax.config.update('jax_enable_preemption_service', False)
    try:
        jax.distributed.initialize(
            *given, initialization_timeout=int(timeout), heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT
        )
    except Exception as error:  # each launcher has its own
        flags = given != (None, None, None)
        # Nothing was found, or JAX is in use already, as in a notebook: a single process.
        if flags or _launched() or type(error) not in (ValueError, RuntimeError):
            raise UserError(
                f'{"the flags say" if flags else "it looks as if"} this is one of several '
                f'processes, and JAX cannot join them: {error} Give --coordinator=HOST:PORT '
                '--num_processes=N --process_id=I, with I from 0 to N - 1.'
            ) from error


def _check_address(coordinator, process_id, timeout):
    """Raises UserError where JAX would abort: process 0 cannot listen or be reached there."""
    host, _, port = coordinator.rpartition(':')
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f'--coordinator is {coordinator!r}: expected HOST:PORT, the host of '
            'process 0 and a free port on it, for example 10.0.0.1:1234.'
        )
    if process_id == 0:
        try:
            socket.create_server(('', int(port))).close()
        except OSError as error:
            raise UserError(
                f'process 0 cannot listen at port {port} of this host ({error}). Take '
                'another port in --coordinator, the same on all hosts.'
            ) from error
        log.info('process 0 waits at %s for the others', coordinator)
    deadline = time.monotonic() + timeout
    while process_id:
        try:
            socket.create_connection((host.strip('[]'), int(port)), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f'process {process_id} did not reach process 0 at --coordinator={coordinator} '
                    f'within {timeout:.0f} s ({error}). Give the address of the host on which '
                    'process 0 runs, and see whether it does.'
                ) from error
        time.sleep(0.5)
