"""Processes in which cases run one after another; what ends a process is known to be a case's."""

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

ADDRESS_SPACE = 16 << 30  # bytes that a worker may map above what it has mapped at its start


class Worker:
    """A process that runs cases; a new one takes its place when a case ends it."""

    def __init__(self, folder, bases):
        self.folder, self._bases = pathlib.Path(folder), pathlib.Path(bases)
        self.case, self._process = None, None

    def start(self, case, entry=None):
        """Begins a case; `entry`: the directory of the corpus that has its bytes."""
        self.case, self.begun = case, time.monotonic()
        if self._process is None:
            self.pipe, theirs = CONTEXT.Pipe()
            self._process = CONTEXT.Process(target=_serve, args=(theirs, self.folder, self._bases))
            self._process.start()
            theirs.close()
        self._used = self._processor_time()
        self._seen, self._moved = self._used, self.begun
        self.pipe.send((case, entry))

    def _processor_time(self):
        """Seconds that the process has computed; 0 when it has ended."""
        try:
            fields = pathlib.Path(f'/proc/{self._process.pid}/stat').read_text().split()
        except OSError:
            return 0.0
        return sum(map(int, fields[13:15])) / os.sysconf('SC_CLK_TCK')

    def _hangs(self):
        """Whether the case has computed or waited for longer than it may.

        Seconds of the clock do not count while the process has work: the machine may be busy.
        """
        used, now, limit = self._processor_time(), time.monotonic(), self.case.module.SECONDS + 2
        if used - self._seen > 0.02:
            self._seen, self._moved = used, now
        return (
            used - self._used > limit
            or now - self._moved > limit
            or (now - self.begun > 10 * limit)
        )

    def outcome(self, wait=0.0):
        """What came of the case, None while it runs."""
        try:
            if self.pipe.poll(wait):
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
        """Ends the process, and with it the runs that it started; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.join(1)
        process.terminate()
        process.join(5)
        process.kill()
        process.join()
        return process.exitcode


def clear(work):
    """Removes the directory of a case, and the small disk that may be mounted in it."""
    if os.path.ismount(work / 'disk'):
        subprocess.run(['umount', '-l', work / 'disk'], check=False)
    shutil.rmtree(work, ignore_errors=True)


def _signal_name(code):
    return signal.Signals(-code).name if code and code < 0 else f'exit code {code}'


def _serve(pipe, folder, bases):
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / 'log', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    # Ctrl-C is for the campaign itself. Not SIG_IGN, which the processes of cases would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # out of its contexts, which end runs
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
    begin, before = time.process_time(), _reset_peak()
    try:
        if not (entry and unpack(entry, work)):
            case.module.make(case, bases / case.kind)
        begin, before = time.process_time(), _reset_peak()
        outcome = Outcome(case.module.check(case, bases / case.kind))
    except UserError as error:
        outcome = refused(error)
    except (Exception, SystemExit) as error:
        outcome = failed(error)
    outcome.seconds, outcome.gigabytes = time.process_time() - begin, _peak() - before
    return _judged(case, outcome, folder, work)


def _judged(case, outcome, folder, work):
    """The outcome, or what else was wrong: something was run, or printed, or took too much."""
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
    """Lets the peak begin at the memory of now; returns that in GB."""
    with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')
    return _status('VmRSS:') / 1e9


def _peak():
    return _status('VmHWM:') / 1e9
