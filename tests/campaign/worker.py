"""Processes that run one case after another, so that the case that ends a process is known."""

import contextlib
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

from tests.campaign.cases import MARK, Case, Failure, Outcome, failed, noise, refused, unpack
from tests.support.forked import CONTEXT
from vit_jax.errors import UserError

ADDRESS_SPACE = 16 << 30  # bytes that a worker may map in addition to the bytes mapped at its start


class Worker:
    """A process that runs cases; a new process replaces it when a case ends it."""

    def __init__(self, folder, bases):
        self.folder = pathlib.Path(folder)
        self._bases = pathlib.Path(bases)
        self.case = None
        self._process = None

    def start(self, case, entry=None):
        """Starts a case; `entry` is its directory in the corpus, for its bytes."""
        self.case = case
        self.start_time = time.monotonic()
        if self._process is None:
            self.pipe, other_end = CONTEXT.Pipe()
            self._process = CONTEXT.Process(
                target=_serve, args=(other_end, self.folder, self._bases)
            )
            self._process.start()
            other_end.close()
        # Processor time at the start, and at the last progress, which was at _progress_time.
        self._start_used = self._processor_time()
        self._progress_used = self._start_used
        self._progress_time = self.start_time
        self.pipe.send((case, entry))

    def _processor_time(self):
        """Seconds of processor time of the process; 0 after its end."""
        try:
            fields = pathlib.Path(f'/proc/{self._process.pid}/stat').read_text().split()
        except OSError:
            return 0.0
        return sum(map(int, fields[13:15])) / os.sysconf('SC_CLK_TCK')

    def _hangs(self):
        """Whether the case has computed or waited for too long.

        While the process computes, only processor time counts, because the machine may be busy.
        """
        used = self._processor_time()
        now = time.monotonic()
        limit = self.case.module.SECONDS + 2
        if used - self._progress_used > 0.02:
            self._progress_used = used
            self._progress_time = now
        return (
            used - self._start_used > limit
            or now - self._progress_time > limit
            or now - self.start_time > 10 * limit
        )

    def wait(self):
        """Waits for the end of the case and returns its outcome."""
        outcome = None
        while outcome is None:
            outcome = self.outcome(1)
        return outcome

    def outcome(self, timeout=0.0):
        """The outcome of the case, or None while it runs; waits for at most `timeout` seconds."""
        try:
            if self.pipe.poll(timeout):
                outcome = self.pipe.recv()
            elif not self._hangs():
                return None
            else:
                self.close()
                outcome = Outcome('hang', True, 'no answer in time', 'hang')
        except (EOFError, ConnectionError):
            name = _signal_name(self.close())
            outcome = Outcome('abort', True, f'the process ended: {name}', name)
        self.case = None
        return outcome

    def close(self):
        """Ends the process and the runs that it started; returns its exit code."""
        process = self._process
        self._process = None
        if process is None:
            return None
        process.join(1)
        process.terminate()
        process.join(5)
        process.kill()
        process.join()
        return process.exitcode


def clear(work):
    """Removes the directory of a case; unmounts a disk in it."""
    if os.path.ismount(work / 'disk'):
        subprocess.run(['umount', '-l', work / 'disk'], check=False)
    shutil.rmtree(work, ignore_errors=True)


def _signal_name(code):
    if code and code < 0:
        return signal.Signals(-code).name
    return f'exit code {code}'


def _serve(pipe, folder, bases):
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / 'log', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    # Ctrl-C ends the campaign, not a worker. The processes of cases would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    # SystemExit leaves all contexts, which end the runs of the case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    limit = _mapped() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(run(*pipe.recv(), folder, bases))


def run(case: Case, entry, folder, bases) -> Outcome:
    """Runs one case in this process, in the new directory FOLDER/case."""
    work = folder / 'case'
    clear(work)
    work.mkdir(parents=True)
    os.chdir(work)
    with contextlib.suppress(FileNotFoundError):
        os.truncate(folder / 'log', 0)
    start = time.process_time()
    memory_before = _reset_peak()
    try:
        if not (entry and unpack(entry, work)):
            case.module.make(case, bases / case.kind)
        start = time.process_time()
        memory_before = _reset_peak()
        outcome = Outcome(case.module.check(case, bases / case.kind))
    except UserError as error:
        outcome = refused(error)
    except (Exception, SystemExit) as error:
        outcome = failed(error)
    outcome.seconds = time.process_time() - start
    outcome.gigabytes = _peak() - memory_before
    return _judged(case, outcome, folder, work)


def _judged(case, outcome, folder, work):
    """The outcome, or a failure: the input ran a command, printed noise or exceeded a limit."""
    log = folder / 'log'
    printed = noise(log.read_text(errors='replace')) if log.exists() else None
    allowed = case.module
    if outcome.failed:
        return outcome
    if (work / MARK).exists():
        failure = Failure(MARK, 'the input ran a command')
    elif printed:
        failure = printed
    elif outcome.gigabytes > allowed.GIGABYTES:
        failure = Failure('memory', f'{outcome.gigabytes:.1f} GB')
    elif outcome.seconds > allowed.SECONDS:
        failure = Failure('hang', f'{outcome.seconds:.0f} s')
    else:
        return outcome
    judged = failed(failure)
    judged.seconds = outcome.seconds
    judged.gigabytes = outcome.gigabytes
    if failure is not printed:  # the case says where, see Outcome.signature
        judged.where = ''
    return judged


def _status(name):
    with open('/proc/self/status', encoding='ascii') as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


def _mapped():
    return _status('VmSize:')


def _reset_peak():
    """Resets the peak to the current memory; returns the current memory in GB."""
    with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')
    return _status('VmRSS:') / 1e9


def _peak():
    return _status('VmHWM:') / 1e9
