"""Commands with too little disk or memory, too few open files, or no permission to write.

They must do their work or end with one message. A stopped run resumes when the limit is gone, and
is bit-identical to an uninterrupted run.
"""

import contextlib
import os
import pathlib
import resource
import shutil
import subprocess

from tests.campaign import cases, runs, workdirs
from tests.campaign.cases import Failure
from tests.support.forked import MAIN, Forked
from tests.support.runs import arguments

SECONDS = 900
GIGABYTES = 8
QUOTA = 60
PATIENCE = 300
LINES = 100  # maximum length of the log of a failed command
LIMITS = {
    'file size': (300, 3_000, 20_000, 60_000, 300_000),
    'open files': (8, 20, 40, 64, 100),
    'memory': (0, 0.2, 0.5, 1, 2, 3, 5),
    'disk': (16, 64, 200, 400, 800),
    'read-only': (0,),
}
COMMANDS = ('new run', 'train', 'predict', 'convert')
PICTURE = workdirs.PICTURE
NOBODY = 65534


def prepare(bases):
    workdirs.save_picture(bases)
    for name, steps in (('half', runs.HALF), ('full', runs.STEPS)):
        # A fork with as many devices as in the cases, because their bits are compared.
        fields = runs.FIELDS | {'num_steps': steps}
        if Forked(arguments(bases / name, fields=fields), bases / 'log', optimized=False).wait():
            raise RuntimeError(f'the run cannot be made: {(bases / "log").read_text()}')


def draw(rng, bases):
    limit = rng.choice(sorted(LIMITS))
    return 'half', [(rng.choice(COMMANDS), limit, rng.choice(LIMITS[limit]))]


def make(case, bases):
    pathlib.Path('disk').mkdir()
    case_command, limit, amount = case.changes[0]
    if limit == 'disk' and os.geteuid() == 0:
        # Room for the existing run and for `amount` KB.
        size = amount
        if case_command != 'new run':
            files = [path for path in (bases / 'half').rglob('*') if path.is_file()]
            size += 2 * (sum(path.stat().st_size for path in files) >> 10)
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', f'size={size}k', 'tmpfs', 'disk'],
            check=False,
            capture_output=True,
        )
    if case_command != 'new run':
        with contextlib.suppress(shutil.Error):
            shutil.copytree(bases / 'half', 'disk/runs')
    if limit == 'read-only':
        for path in (pathlib.Path('disk'), *pathlib.Path('disk').rglob('*')):
            path.chmod(0o555 if path.is_dir() else 0o444)


def impose(limit, amount):
    """Lowers a limit of this process permanently."""
    if limit == 'file size':
        resource.setrlimit(resource.RLIMIT_FSIZE, (amount, amount))
    elif limit == 'open files':
        resource.setrlimit(resource.RLIMIT_NOFILE, (amount, amount))
    elif limit == 'memory':  # in addition to the memory after the imports
        pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
        mapped = pages * os.sysconf('SC_PAGE_SIZE') + int(amount * (1 << 30))
        resource.setrlimit(resource.RLIMIT_AS, (mapped, mapped))
    elif limit == 'read-only' and os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def check(case, bases):
    try:
        return _check(case, bases)
    finally:
        subprocess.run(['umount', 'disk'], check=False, capture_output=True)


def _check(case, bases):
    command, *limit = case.changes[0]
    training = command in ('new run', 'train')
    workdir = pathlib.Path('disk/runs').resolve()
    argv = {
        'predict': [f'--workdir={workdir}', str(bases / PICTURE)],
        'convert': [workdir, workdir.parent / 'x.safetensors', '--to=vit_jax'],
    }.get(command, arguments(workdir, fields=runs.FIELDS))
    module = 'main' if training else command
    code, log = _run(
        argv,
        f'from tests.campaign import limits; limits.impose(*{limit!r})\n'
        f'from vit_jax import cli, {module}; cli.leave({module}.main())',
    )
    _require_end(code, log)
    if not training:
        return 'done' if code == 0 else 'refused'
    if code:
        _go_on(workdir, argv)
    runs.require_equal('again' if code else workdir, bases / 'full')
    return 'equal' if code == 0 else 'refused, then equal'


def _go_on(workdir, argv):
    """Resumes the run in a directory without limits."""
    if workdir.exists():
        shutil.copytree(workdir, 'again')
    else:
        pathlib.Path('again').mkdir()
    for path in pathlib.Path('again').rglob('*'):
        path.chmod(0o755)
    pathlib.Path('again').chmod(0o755)
    argv = [str(a).replace(str(workdir), str(pathlib.Path('again').resolve())) for a in argv]
    code, log = _run(argv, MAIN)
    if code:
        raise Failure('does not go on', log[-300:])


def _run(argv, code):
    log = pathlib.Path('command.log')
    pipe = pathlib.Path('command.pipe')
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    # Another process writes the log, because the limits would apply to the log as well.
    pipe_end = os.open(pipe, os.O_RDWR)
    process = Forked(argv, pipe, code=code, optimized=False, explain_after=PATIENCE - 10)
    with open(log, 'wb') as file, subprocess.Popen(['cat', pipe], stdout=file):
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Failure('hang', log.read_text()[-5000:]) from None
        finally:
            process.kill()
            process.wait()
            os.close(pipe_end)
    return process.returncode, cases.of_commands(log.read_text(errors='replace'))


def _require_end(code, log):
    cases.require_no_noise(log)
    if code not in (0, 1):
        raise Failure('abort', f'exit code {code}: {log[-200:]}')
    if code and sum(line.startswith('error: ') for line in log.splitlines()) != 1:
        raise Failure('no message', log[-300:])
    if code and len(log.splitlines()) > LINES:
        raise Failure('many lines', f'{len(log.splitlines())} lines')
