import os
import signal

import pytest

from vit_jax.workdir.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _default_handler():
    """A shell starts its background jobs with SIGINT ignored, and the tests with them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_signal_is_remembered_and_the_second_interrupt_acts():
    with Interrupts() as interrupts:
        assert interrupts.received is None
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_changes_nothing():
    with Interrupts() as interrupts:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == signal.SIGTERM


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
