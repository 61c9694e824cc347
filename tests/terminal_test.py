import logging
import subprocess
import sys

import pytest
from tqdm.contrib.logging import logging_redirect_tqdm

from tests.support.marks import nightly_but
from tests.support.runs import ROOT, environment
from vit_jax import terminal


def test_libraries_are_quiet():
    before = logging.getLogger('absl').level
    terminal.log_to_terminal()
    assert logging.getLogger('absl').level >= max(before, logging.WARNING)


def test_details_appear_after_show_details(monkeypatch, capsys):
    """Details also appear while tqdm replaces the terminal's handler."""
    monkeypatch.setattr(terminal.LOGGER, 'handlers', [])
    terminal.log_to_terminal()
    for _ in range(2):
        with logging_redirect_tqdm([terminal.LOGGER]):
            terminal.LOGGER.debug('a detail')
            terminal.LOGGER.info('news')
        terminal.LOGGER.debug('a detail')
        terminal.show_details()
    assert capsys.readouterr().err.split('\n') == ['news', 'a detail', 'news', 'a detail', '']


def test_command_runs_with_closed_output_streams(tmp_path):
    program = (
        'import sys; from vit_jax import terminal; from vit_jax.workdir import live_line;'
        'terminal.log_to_terminal(); terminal.LOGGER.info("news"); print("news");'
        'line = live_line.LiveLine(); line.show("news"); line.close(); sys.exit(7)'
    )
    result = subprocess.run(
        ['bash', '-c', 'exec "$@" >&- 2>&-', '-', sys.executable, '-c', program],
        cwd=ROOT,
        env=environment(),
        check=False,
        timeout=60,
    )
    assert result.returncode == 7


@pytest.mark.parametrize(
    ('error', 'is_shown'), [('KeyboardInterrupt', False), ('ValueError', True)]
)
def test_ctrl_c_in_a_callback_of_the_garbage_collector_prints_nothing(error, is_shown):
    """Python cannot raise an exception there; the watchdog ends the process."""
    program = f"""
import weakref
from vit_jax import terminal
terminal.log_to_terminal()

def interrupt(_):
    raise {error}

thing = terminal.UserError('')
reference = weakref.ref(thing, interrupt)
del thing
"""
    result = subprocess.run(
        [sys.executable, '-c', program],
        cwd=ROOT,
        env=environment(),
        check=True,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (error in result.stderr) == is_shown


@pytest.mark.slow
def test_tensorflow_prints_no_python_stack_for_a_broken_image():
    """JAX, which is imported first, sets a log level that would show the stacks."""
    program = """
import jax
from vit_jax import terminal
terminal.log_to_terminal()
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.preprocess import decode_image
import io
import numpy as np
from PIL import Image
file = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file, 'JPEG')
for encoded in (b'no image', file.getvalue()[:-2000]):
    try:
        tf.function(decode_image)(tf.constant(encoded))
    except Exception as error:
        print(type(error).__name__)
"""
    unset = {k: v for k, v in environment().items() if k != 'TF_CPP_MIN_LOG_LEVEL'}
    result = subprocess.run(
        [sys.executable, '-c', program],
        cwd=ROOT,
        env=unset,
        text=True,
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert result.stdout == 'InvalidArgumentError\n' * 2
    assert 'jpeg_mem' not in result.stderr  # such a message does not name the file
    assert 'PyFunc' not in result.stderr
    assert 'Traceback' not in result.stderr


LEAVING = """
import asyncio
from vit_jax import terminal
terminal.log_to_terminal()
async def read():
    try:
        await asyncio.sleep(0)
    finally:
        raise ValueError('of a coroutine')
class Other:
    def __del__(self):
        raise ValueError('of another object')
coroutine = read()
coroutine.send(None)
del coroutine
Other()
"""


def test_errors_of_abandoned_coroutines_are_not_shown():
    """Orbax abandons coroutines when one of them fails on a damaged checkpoint."""
    result = subprocess.run(
        [sys.executable, '-c', LEAVING],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        check=True,
    )
    assert 'of a coroutine' not in result.stderr
    assert 'of another object' in result.stderr


NAMES = ascii(['chat\x1b[31m', 'éléphant', '猫', '\udcff'])
ENCODINGS = [
    {'PYTHONIOENCODING': 'ascii'},
    {'PYTHONIOENCODING': 'latin-1'},
    {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'},
    {'PYTHONIOENCODING': 'utf-8'},
]


@pytest.mark.parametrize(
    'variables', nightly_but(ENCODINGS[1:3], ENCODINGS), ids=lambda x: ' '.join(x.values())
)
def test_any_name_is_printed_in_any_encoding(variables, tmp_path):
    program = f"""
import contextlib
from vit_jax import cli, terminal
from vit_jax.workdir import live_line, log_file
@cli.command
def main(argv):
    log_file.log_to({str(tmp_path)!r})
    line = live_line.LiveLine()
    for name in {NAMES}:
        terminal.write(name)
        terminal.LOGGER.info('read %s', name)
        line.show(name)
    line.close()
    cli.make_parser('predict', '').parse_args({NAMES})
cli.leave(main())
"""
    result = subprocess.run(
        [sys.executable, '-c', program],
        cwd=ROOT,
        env=environment() | variables,
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr  # the exit code of argparse
    log = (tmp_path / 'train.log').read_bytes()
    for output in (result.stdout, result.stderr, log):
        assert b'Traceback' not in output
        assert b'\x1b' not in output
        assert b'chat\\x1b[31m' in output
        assert b'phant' in output
    assert log.count(b'read ') == result.stderr.count(b'read ') == 4


def full_disk(program):
    return subprocess.run(
        ['bash', '-c', 'exec "$@" >/dev/full', '-', sys.executable, '-c', program],
        cwd=ROOT,
        env=environment(),
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    'action',
    [
        "terminal.write('a result')",
        "cli.make_parser('predict', 'word ' * 9000).parse_args(['--help'])",
    ],
)
def test_unwritable_stdout_is_one_message(action):
    result = full_disk(
        'from vit_jax import cli, terminal\n@cli.command\ndef main(argv):\n'
        f'    {action}\ncli.leave(main())'
    )
    assert result.returncode == 1
    assert result.stderr.startswith('error: stdout cannot be written (No space left on device)')
    assert len(result.stderr.splitlines()) == 1
