"""Several processes that train together: started, agreeing, and stopping together.

With one process nothing here does anything. With several, every process runs the same program,
and what could come out differently on them (files, free memory, signals) is decided once for all:
`agree` and `from_main` through JAX's coordination service, `Ballot` on the devices. A thread in
each process shows the others that it lives, and ends the process when another one is lost.
"""

import contextlib
import ctypes
import itertools
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # jax.distributed does not show the client
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.processes import rendezvous
from vit_jax.workdir import logs

log = logging.getLogger(__name__)

BEAT = 2  # seconds between two signs of life
LOST = 25  # seconds without one after which a process counts as lost,
LOST_WHEN_BROKEN = 10  # and once a collective failed somewhere
GRACE = 2  # seconds for a process to end by itself before its thread ends it
# JAX aborts processes by itself after two thirds of this, and says less: it is to come later.
JAX_HEARTBEAT = 55

_group = None  # of this process, when there are several


def initialise(coordinator: str | None = None, num_processes: int | None = None,
               process_id: int | None = None, timeout: float = 300) -> None:
    """Joins the other processes of the run, if there are any. To be called before JAX is used.

    Args:
      coordinator: HOST:PORT of process 0; on TPU pods, under Slurm, Open MPI and in indexed
        Kubernetes jobs, this and the next two are found in the environment.
      num_processes: of the run.
      process_id: which of them this is, from 0.
      timeout: seconds to wait for the others.

    Raises:
      UserError: the arguments do not fit each other, or not all processes come.
    """
    global _group
    coordinator, num_processes, process_id = rendezvous.detect(
        coordinator, num_processes, process_id, timeout)
    if num_processes == 1:
        return
    rendezvous.meet(coordinator, num_processes, process_id, timeout)
    # Its own handler of SIGTERM would stand in the way of interrupts.Interrupts.
    jax.config.update('jax_enable_preemption_service', False)
    _group = _Group(coordinator, num_processes, process_id)
    _call_on_abort(_group.aborted)
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id,
                                   initialization_timeout=max(60, int(timeout)),
                                   heartbeat_timeout_seconds=JAX_HEARTBEAT)
    except jax.errors.JaxRuntimeError as error:
        _group = None
        raise UserError(f'JAX could not connect the {num_processes} processes at {coordinator}: '
                        f'{error}') from error
    _group.start()
    logs.of_process(process_id, num_processes)


def refuse_several(program: str, *given) -> None:
    """Raises UserError where several copies of a program made for one are started."""
    _, num_processes, _ = rendezvous.detect(*given)
    if num_processes > 1:
        raise UserError(f'{program} runs as one process and was started as one of {num_processes}: '
                        'start it once, on one host. Only vit_jax.main takes several.')


def count() -> int:
    """Number of processes."""
    return _group.count if _group else 1


def is_main() -> bool:
    """Whether this is process 0, which alone writes logs, metrics and the config."""
    return _group is None or _group.process == 0


def agree(value: Any, decide: Callable[[list], Any]) -> Any:
    """One decision for all: `decide([value of process 0, of process 1, ...])`, made on process 0.

    All processes must come here in the same order, and none goes on before all have come.

    Args:
      value: for JSON.
      decide: its result, for JSON, is returned on all processes; its UserError is raised on all.
    """
    return _group.agree(value, decide) if _group else decide([value])


def from_main(function: Callable[[], Any]) -> Any:
    """`function()` of process 0, for JSON, on all processes; or the UserError that it raised."""
    return agree(None, lambda _: function())


def check_equal(what: str, fields: dict[str, Any]) -> None:
    """Raises UserError with the fields and values that are not the same on all processes."""
    def compare(all_fields):
        lines = []
        for process, fields in enumerate(all_fields):
            lines += [f'{name}: {all_fields[0].get(name, "absent")!r} on process 0, '
                      f'{fields.get(name, "absent")!r} on process {process}'
                      for name in sorted(all_fields[0].keys() | fields.keys())
                      if fields.get(name, 'absent') != all_fields[0].get(name, 'absent')]
        if lines:
            more = f'\n  and {len(lines) - 20} more' if len(lines) > 20 else ''
            raise UserError(f'{what} of the processes differs. Start all with the same:\n  '
                            + '\n  '.join(lines[:20]) + more)

    agree(fields, compare)


class Ballot:
    """A number that all processes see at the same call: the largest that one of them gave."""

    def __init__(self):
        mesh = Mesh(np.array(jax.devices()), 'all')
        self._by_device = NamedSharding(mesh, PartitionSpec('all'))
        self._largest = jax.jit(jax.numpy.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._under_way = None

    def __call__(self, vote: int) -> int:
        """The largest vote of the call before this one: to read this one's would wait for it."""
        votes = np.full(jax.local_device_count(), vote, np.int32)
        votes = jax.make_array_from_process_local_data(self._by_device, votes)
        before, self._under_way = self._under_way, self._largest(votes)
        return 0 if before is None else int(before)


def fail(error: BaseException) -> None:
    """With several processes: reports the error, makes it known, and ends this one."""
    if _group:
        _group.fail(error)


@contextlib.contextmanager
def together(hint: Callable[[], str]):
    """In this context an error of one process ends all of them, each with a message.

    With several processes an error ends this one here, with code 1: to leave the usual way would
    wait for processes that wait for this one. At the end all wait for each other.

    Args:
      hint: says how to go on after the end; asked for at the end.
    """
    if _group is None:
        yield
        return
    _group.hint = hint
    try:
        yield
    except BaseException as error:
        fail(error)
    agree(None, len)
    _group.stop()


class _Group:
    """The processes of the run as this one sees them.

    Attributes:
      count: of processes.
      process: number of this one.
      hint: see `together`.
    """

    def __init__(self, coordinator, num_processes, process_id):
        self.count, self.process, self.hint = num_processes, process_id, lambda: ''
        self._coordinator = coordinator
        self._coordinator_name = f'process 0 of {num_processes}, at {coordinator},'
        self._turns = itertools.count()
        self._beats = {}  # process -> (what it last wrote, when that was first seen)
        self._judged = 0.0  # when process 0 last looked at them
        self._lost = set()
        self._broken = 0  # 1 when a collective failed here
        self._ending = threading.Lock()  # held by the thread that ends the process
        self._stopped = threading.Event()

    def start(self):
        self._client = distributed.global_state.client
        self._set(f'name/{self.process}', socket.gethostname())
        threading.Thread(target=self._watch, name='hosts', daemon=True).start()

    def stop(self):
        self._stopped.set()

    def agree(self, value, decide):
        turn = next(self._turns)
        self._set(f'turn/{turn}/{self.process}', json.dumps(value))
        if self.process == 0:
            values = [json.loads(self._get(f'turn/{turn}/{i}')) for i in range(self.count)]
            try:
                outcome = {'result': decide(values)}
            except UserError as error:
                outcome = {'error': str(error)}
            self._set(f'outcome/{turn}', json.dumps(outcome))
        outcome = json.loads(self._get(f'outcome/{turn}'))
        if 'error' in outcome:
            raise UserError(outcome['error'])
        return outcome['result']

    def fail(self, error):
        if isinstance(error, jax.errors.JaxRuntimeError) or (
                re.match(r'[A-Z_]+: ', str(error)) and not isinstance(error, UserError)):
            # Most likely another process is gone. The other thread finds out, and ends this one.
            self._broken = 1
            for _ in range(LOST):
                if isinstance(self._coordinator_error(), ConnectionRefusedError):
                    self._end(f'{self._coordinator_name} does not answer any more', farewell=False)
                time.sleep(1)
        self._take_the_end()
        if not isinstance(error, KeyboardInterrupt):
            logs.report(error)
        text = f'error: {error}' if isinstance(error, UserError) else repr(error)
        self._announce(f'{self._name(self.process)} stopped with {text.splitlines()[0][:500]}')
        self._leave(130 if isinstance(error, KeyboardInterrupt) else 1)

    def aborted(self):
        """Says why JAX ends this process, as far as it can be known, and ends it."""
        if self._coordinator_error():
            reason = f'{self._coordinator_name} does not answer any more'
        else:
            reason = 'this process was aborted from inside (the lines above may say why)'
        self._end(reason, farewell=False)

    def _watch(self):
        """Shows that this process lives, and ends it when another one is lost or has failed."""
        heard = time.monotonic()
        for beat in itertools.count():
            try:
                self._set(f'beat/{self.process}', f'{beat} {self._broken}')
                if self.process == 0:
                    self._judge()
                verdict = dict(self._all('verdict')).get('first')
                heard = time.monotonic()
            except jax.errors.JaxRuntimeError:
                verdict = None
                if time.monotonic() - heard > LOST:
                    self._end(f'{self._coordinator_name} does not answer any more', farewell=False)
            if self._stopped.wait(GRACE if verdict else BEAT):
                return
            if verdict:
                self._end(verdict)

    def _judge(self):
        """Announces the first process that has shown no sign of life for too long."""
        now = time.monotonic()
        found = dict(self._all('beat'))
        if now - self._judged > 4 * BEAT:  # this process stood still, and perhaps all did
            self._beats.clear()
        self._judged = now
        limit = LOST_WHEN_BROKEN if any(b.endswith(' 1') for b in found.values()) else LOST
        for process in range(self.count):
            beat = found.get(str(process))
            last, since = self._beats.get(process, (None, now))
            self._beats[process] = (beat, now if beat != last else since)
            if now - self._beats[process][1] > limit:
                self._lost.add(process)
        if self._lost:
            names = ' and '.join(self._name(process) for process in sorted(self._lost)[:8])
            self._announce(f'{names} {"does" if len(self._lost) == 1 else "do"} not answer any '
                           'more')

    def _end(self, reason, farewell=True):
        self._take_the_end()
        log.error('error: %s, so this one stops, too. To continue%s, start the same command again '
                  'on all hosts.', reason, self.hint())
        if farewell:
            self._leave(1)
        _exit(1)

    def _take_the_end(self):
        """Lets one thread through, which ends the process before the others wake up."""
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * LOST)

    def _leave(self, code):
        """Ends this process; process 0 waits for the others, which it would end without a word."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set(f'left/{self.process}', '')
            deadline = time.monotonic() + GRACE + 5 * BEAT
            while self.process == 0 and time.monotonic() < deadline:
                if len(set(dict(self._all('left'))) | set(map(str, self._lost))) >= self.count:
                    break
                time.sleep(0.1)
        _exit(code)

    def _coordinator_error(self):
        """Why process 0 cannot be reached, None if it can."""
        host, _, port = self._coordinator.rpartition(':')
        try:
            socket.create_connection((host.strip('[]'), int(port)), timeout=2).close()
        except OSError as error:
            return error
        return None

    def _announce(self, verdict):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first one stays
            self._client.key_value_set('vit_jax/verdict/first', verdict)

    def _name(self, process):
        try:
            host = f' ({dict(self._all("name"))[str(process)]})'
        except (jax.errors.JaxRuntimeError, KeyError):
            host = ''
        return f'process {process} of {self.count}{host}'

    def _set(self, key, value):
        self._client.key_value_set(f'vit_jax/{key}', value, allow_overwrite=True)

    def _get(self, key):
        """The value, waited for; in short turns, between which signals are handled."""
        while True:
            try:
                return self._client.blocking_key_value_get(f'vit_jax/{key}', 1000)
            except jax.errors.JaxRuntimeError as error:
                if 'DEADLINE_EXCEEDED' not in str(error):
                    raise

    def _all(self, folder):
        prefix = f'vit_jax/{folder}/'
        return [(key[len(prefix):], value)
                for key, value in self._client.key_value_dir_get(prefix)]


def _call_on_abort(function):
    """Calls a function when a thread of JAX aborts this process, where Python's handlers cannot."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: function())
    _call_on_abort.keep = callback
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, type(callback)), ctypes.c_void_p
    libc.signal(signal.SIGABRT, callback)


def _exit(code):
    """Ends the process without waiting for anyone."""
    logging.shutdown()
    os._exit(code)
