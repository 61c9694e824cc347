import concurrent.futures
import os
import signal
import threading
import time

import pytest

from vit_jax.workdir import interrupts
from vit_jax.workdir.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _default_handler():
    """Restores Python's handler of SIGINT, which a shell ignores for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def clock(monkeypatch):
    """A list with the time that interrupts read."""
    now = [100.0]
    monkeypatch.setattr(interrupts.time, 'monotonic', lambda: now[0])
    return now


def test_first_signal_is_recorded_and_a_later_sigint_interrupts(clock):
    with Interrupts() as interrupts:
        assert interrupts.received is None
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == signal.SIGINT
        clock[0] += 2
        assert interrupts.anywhere()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):  # again, in case a callback has swallowed it
            interrupts.anywhere()


def test_repeated_ctrl_c_within_a_second_counts_once(clock, caplog):
    with Interrupts() as interrupts:
        interrupts.have_steps()
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGINT)
            clock[0] += 0.2
        assert interrupts.received == signal.SIGINT
    lines = [record.message for record in caplog.records]
    assert lines == [
        'SIGINT: finishing this step and saving; Ctrl-C (again, later) stops immediately',
        'Ctrl-C again: this step is saved if it ends within 6 seconds',
    ]


def test_second_sigterm_changes_nothing():
    with Interrupts() as interrupts:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == signal.SIGTERM


def test_other_threads_receive_no_signals():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def enter():
            with Interrupts() as interrupts:
                return interrupts.anywhere()

        assert pool.submit(enter).result() is False


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_wait_returns_results_and_raises_errors():
    with Interrupts() as interrupts:
        assert interrupts.wait_for(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            interrupts.wait_for(divmod, 7, 0)
        assert list(interrupts.each(iter('abc'))) == ['a', 'b', 'c']


def test_signal_ends_the_wait_for_a_batch(monkeypatch):
    monkeypatch.setattr(interrupts, 'PATIENCE', 0.2)
    never = threading.Event()

    def batches():
        yield 'first'
        never.wait(60)

    waits = []
    with Interrupts() as received:
        received.have_steps()
        each = received.each(batches(), meanwhile=waits.append)
        assert next(each) == 'first'
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(interrupts.Abandoned):
            next(each)
        assert waits
        never.set()
        assert received.wait_for(time.sleep, 0.5, gives_up=False) is None


def test_blocked_batches_do_not_delay_their_closing(monkeypatch):
    """TensorFlow blocks while it reads files ahead."""
    monkeypatch.setattr(interrupts, '_CLOSING', 0.1)
    never = threading.Event()

    def batches():
        try:
            yield from 'ab'
        finally:
            never.wait(60)

    with Interrupts() as received:
        each = received.each(batches())
        next(each)
        begin = time.monotonic()
        each.close()
        assert time.monotonic() - begin < 10
    never.set()
