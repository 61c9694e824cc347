"""Finds the processes of a run and brings them together before JAX does, to say what is wrong.

JAX aborts a process that finds no coordinator, and waits in silence for one that never comes. So
process 0 first listens at the coordinator's address itself: every other process says there, in one
line of JSON, who it is, and gets one line back when all have come or something does not fit.
"""

import contextlib
import json
import logging
import os
import socket
import time

from jax._src import clusters  # jax.distributed does not say what it finds

from vit_jax.errors import UserError

log = logging.getLogger(__name__)

HELLO_SECONDS = 5  # for one line over a connection that is there


def detect(coordinator: str | None = None, num_processes: int | None = None,
           process_id: int | None = None, timeout: float = 300) -> tuple[str | None, int, int]:
    """What is given, completed from the environment: coordinator, num_processes, process_id.

    (None, 1, 0) where nothing is given and nothing found. Raises UserError if it is incomplete.
    """
    given = {'--coordinator': coordinator, '--num_processes': num_processes,
             '--process_id': process_id}
    if None in given.values() and _in_cluster():
        try:
            values = clusters.ClusterEnv.auto_detect_unset_distributed_params(
                coordinator, num_processes, process_id, None, None, int(timeout))[:3]
        except Exception as error:  # each launcher has its own
            raise UserError('this looks like one of several processes, and the launcher does not '
                            f'say which ({error}). Say it: --coordinator=HOST:PORT '
                            '--num_processes=N --process_id=I.') from error
        given = dict(zip(given, values, strict=True))
    if all(value is None for value in given.values()):
        return None, 1, 0
    missing = [name for name, value in given.items() if value is None]
    if missing and given['--num_processes'] != 1:
        raise UserError(f'{" and ".join(missing)} missing: several processes need '
                        '--coordinator=HOST:PORT --num_processes=N --process_id=I, with I from 0 '
                        'to N - 1.')
    coordinator, num_processes, process_id = given.values()
    if num_processes < 1 or not 0 <= (process_id or 0) < num_processes:
        raise UserError(f'--process_id is {process_id} and --num_processes {num_processes}: '
                        'expected a number of processes and, for each, an own one below it, '
                        'from 0.')
    return coordinator, num_processes, process_id or 0


def meet(coordinator: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Returns when all processes of the run have been here.

    Args:
      coordinator: HOST:PORT, which is free on the host of process 0.
      timeout: seconds to wait for the others.

    Raises:
      UserError: a process did not come, cannot be reached, or was started with other numbers.
    """
    host, _, port = coordinator.rpartition(':')
    try:
        address = host.strip('[]'), int(port)
    except ValueError:
        address = '', 0
    if not address[0] or not 0 < address[1] < 2**16:
        raise UserError(f'--coordinator is {coordinator!r}: expected HOST:PORT, the host of '
                        'process 0 and a free port on it, for example 10.0.0.1:1234.')
    if process_id == 0:
        _receive_all(coordinator, address[1], num_processes, timeout)
    else:
        _report_to(coordinator, address, num_processes, process_id, timeout)


def _receive_all(coordinator, port, num_processes, timeout):
    deadline = time.monotonic() + timeout
    came = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(port))
        log.info('process 0 of %d waits at %s for the others', num_processes, coordinator)
        while len(came) < num_processes - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                missing = sorted(set(range(1, num_processes)) - set(came))
                problem = (f'{1 + len(came)} of {num_processes} processes came to {coordinator} '
                           f'within {timeout:.0f} s. Missing: {_short(missing)}. Start the same '
                           'command on all hosts, with --process_id from 0 to '
                           f'{num_processes - 1}; look there for errors.')
                break
            try:
                hello = json.loads(_line(connection, HELLO_SECONDS))
                process, expected = int(hello['process']), int(hello['processes'])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # nobody of ours
            if expected != num_processes:
                problem = (f'the number of processes differs: {num_processes} on process 0, '
                           f'{expected} on process {process}. Start all with the same '
                           '--num_processes.')
                came[process, 'too'] = connection
                break
            came = {i: there for i, there in came.items() if not _gone(there)}
            if process in came:
                problem = f'two processes have --process_id={process}: give each its own.'
                came[process, 'too'] = connection
                break
            came[process] = connection
        else:
            problem = ''
        for connection in came.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({'problem': problem}).encode() + b'\n')
    if problem:
        raise UserError(problem)


def _report_to(coordinator, address, num_processes, process_id, timeout):
    deadline = time.monotonic() + timeout
    hello = json.dumps({'process': process_id, 'processes': num_processes}).encode() + b'\n'
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left, HELLO_SECONDS)) as connection:
                connection.sendall(hello)
                # Process 0 waits as long for the others, perhaps from a later moment on.
                answer = json.loads(_line(connection, timeout + HELLO_SECONDS))['problem']
        except OSError as error:
            reason = str(error)
        except (ValueError, KeyError, TypeError):
            reason = 'what answers there is not process 0 of a run that begins'
        else:
            if answer:
                raise UserError(answer)
            return
        time.sleep(min(0.2, left))
    raise UserError(f'process {process_id} of {num_processes} did not reach process 0 at '
                    f'--coordinator={coordinator} within {timeout:.0f} s ({reason}). Give the '
                    'address of the host on which process 0 runs, and see whether it does.')


def _in_cluster():
    """Whether JAX knows the launcher of this process, and there is one."""
    if os.environ.get('KUBERNETES_SERVICE_HOST') and 'JOB_COMPLETION_INDEX' not in os.environ:
        kinds = [c for c in clusters.ClusterEnv._cluster_types if c.name != 'k8s']
    else:
        kinds = clusters.ClusterEnv._cluster_types
    return any(not kind.opt_in_only_method and kind.is_env_present() for kind in kinds)


def _listen(port):
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(('', port), family=socket.AF_INET6 if both else socket.AF_INET,
                                    dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        raise UserError(f'process 0 cannot listen at port {port} of this host ({error}). Take '
                        'another port in --coordinator, the same on all processes.') from error


def _line(connection, timeout):
    """One line from a peer, without waiting longer than `timeout` seconds for any part of it."""
    connection.settimeout(timeout)
    with connection.makefile('rb') as file:
        return file.readline(10_000)


def _gone(connection):
    """Whether the peer has closed the connection, after which it sent nothing but its line."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b''
    except BlockingIOError:
        return False
    except OSError:
        return True


def _short(numbers):
    return ', '.join(map(str, numbers[:20])) + (' ...' if len(numbers) > 20 else '')
