"""Two Ctrl-C, or SIGTERM, end every command, even a blocked one (real processes)."""

import os
import signal
import threading
import time

import pytest

from tests.support.datasets import write_images
from tests.support.forked import UNDRAWN, Forked
from tests.support.runs import ROOT, TINY, arguments
from vit_jax.processes import watchdog

# Threads of TensorFlow open a pipe, and the main thread waits for them in C++. Python runs no
# signal handler meanwhile.
BLOCK = """
import sys
from vit_jax.data.host_tensorflow import tf
def block(*_, **__):
    data = iter(tf.data.Dataset.from_tensors(PIPE).map(tf.io.read_file).prefetch(1))
    print('blocked', file=sys.stderr, flush=True)
    next(data)
"""
COMMAND = """
from vit_jax import cli
from vit_jax.processes import watchdog
watchdog.GRACE = 1.0
@cli.command
def main(argv=None):
    BODY
cli.leave(main())
"""
BARE = 'block()'
TRAINING = """
    from vit_jax.workdir.interrupts import Interrupts
    with Interrupts() as interrupts:
        block()
"""
WITH_STEPS = """
    from vit_jax.workdir.interrupts import Interrupts
    with Interrupts() as interrupts:
        interrupts.have_steps()
        block()
"""


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / 'pipe'
    os.mkfifo(path)
    return path


def wait_until(process, log, text, seconds=240):
    deadline = time.monotonic() + seconds
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def ends_after(process, log, signals, pause=1.2, seconds=20):
    """Sends the signals and returns the exit code; fails if the process runs on for `seconds`."""
    for number, signum in enumerate(signals):
        if number:
            time.sleep(pause)
        process.send_signal(signum)
    try:
        return process.wait(seconds)
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('body', 'signals', 'code'),
    [
        (BARE, [signal.SIGINT], 130),
        pytest.param(BARE, [signal.SIGTERM], -signal.SIGTERM, marks=pytest.mark.nightly),
        (TRAINING, [signal.SIGINT], 130),
        (TRAINING, [signal.SIGTERM], 143),
        (WITH_STEPS, [signal.SIGTERM, signal.SIGINT], 130),
        pytest.param(WITH_STEPS, [signal.SIGINT, signal.SIGINT], 130, marks=pytest.mark.nightly),
    ],
)
def test_signals_end_a_blocked_command(body, signals, code, pipe, tmp_path):
    log = tmp_path / 'log'
    source = BLOCK.replace('PIPE', repr(str(pipe))) + COMMAND.replace('BODY', body)
    process = Forked([], log, code=source)
    wait_until(process, log, 'blocked')
    time.sleep(0.2)
    assert ends_after(process, log, signals) == code
    assert 'Traceback' not in log.read_text()


def test_two_ctrl_c_in_quick_succession_end_a_blocked_command(pipe, tmp_path):
    """One key press may send both, so the current step gets some seconds to finish."""
    log = tmp_path / 'log'
    source = BLOCK.replace('PIPE', repr(str(pipe))) + COMMAND.replace('BODY', WITH_STEPS)
    process = Forked([], log, code=source)
    wait_until(process, log, 'blocked')
    time.sleep(0.2)
    assert ends_after(process, log, [signal.SIGINT] * 2, pause=0.1) == 130


def test_one_signal_does_not_end_a_command_with_unsaved_steps(pipe, tmp_path):
    log = tmp_path / 'log'
    source = BLOCK.replace('PIPE', repr(str(pipe))) + COMMAND.replace('BODY', WITH_STEPS)
    process = Forked([], log, code=source)
    wait_until(process, log, 'blocked')
    process.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    try:
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('signum', 'code'),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize(
    'place',
    [
        'vit_jax.training.run_data:open_data',
        'vit_jax.training.accumulation:bytes_needed',
        'vit_jax.training.program:Program.trace_train_step',
        'vit_jax.training.run:initial_or_restored',
    ],
)
def test_signal_ends_a_run_in_any_phase_of_its_start(place, signum, code, pipe, tmp_path):
    module, _, path = place.partition(':')
    source = (
        BLOCK.replace('PIPE', repr(str(pipe)))
        + f'import {module}\n{module}.{path} = block\n'
        + UNDRAWN
    )
    log = tmp_path / 'log'
    process = Forked(arguments(tmp_path / 'run', fields=TINY | {'accum_steps': 0}), log, source)
    wait_until(process, log, 'blocked')
    begin = time.monotonic()
    assert ends_after(process, log, [signum]) == code
    assert time.monotonic() - begin < 10
    assert 'To continue' in log.read_text()


def photos(folder):
    write_images(folder / 'train', ['ant', 'bee'], 40, seed=1)
    write_images(folder / 'test', ['ant', 'bee'], 20, seed=2)
    return TINY | {'dataset.name': folder, 'eval_every': 1_000_000, 'num_steps': 1_000_000}


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.nightly
@pytest.mark.parametrize('split', ['train', 'test'])
def test_signal_saves_a_run_that_waits_for_a_photo(split, tmp_path):
    """The photo becomes a pipe, and training or the evaluation waits for it."""
    fields = photos(tmp_path / 'data') | {'checkpoint_every': 1_000_000}
    if split == 'test':
        fields['eval_every'] = 30
    log = tmp_path / 'log'
    process = Forked(arguments(tmp_path / 'run', fields=fields), log, UNDRAWN, optimized=False)
    wait_until(process, log, 'step 5/')
    replace_by_pipe(tmp_path / 'data' / split / 'bee' / '003.png')
    wait_until_silent(log)
    assert ends_after(process, log, [signal.SIGTERM], seconds=60) == 143
    assert 'and saved. To continue' in log.read_text()
    checkpoints = [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()]
    assert len(checkpoints) == 1
    assert int(checkpoints[0]) >= 5


def wait_until_silent(log):
    """Returns after a second without a new line."""
    size = -1
    while log.stat().st_size > size:
        size = log.stat().st_size
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('command', 'arguments'),
    [
        ('evaluate', ['--dataset=digits', '--split=test']),
        ('figures', ['--out=figures']),
        ('predict', [str(ROOT / 'docs' / 'images' / 'flowers17_sweep.png')]),
    ],
)
def test_signal_ends_a_command_that_reads_weights(command, arguments, pipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (
        BLOCK.replace('PIPE', repr(str(pipe)))
        + f'from vit_jax import cli, {command}\n'
        + 'cli.read_weights = block\n'
        + f'cli.leave({command}.main())'
    )
    log = tmp_path / 'log'
    process = Forked(['--pretrained=weights.npz', *arguments], log, source)
    wait_until(process, log, 'blocked')
    # The second Ctrl-C ends the process by the signal, if it has not ended by then.
    code = ends_after(process, log, [signal.SIGINT] * 2)
    assert code in (130, -signal.SIGINT), (code, log.read_text())


def test_command_runs_if_no_thread_can_be_started(monkeypatch):
    """The command itself then reports the missing memory."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, 'start', refuse)
        with watchdog.watching():
            watchdog.set_patient(True)
    after = signal.set_wakeup_fd(before)
    assert after == before
