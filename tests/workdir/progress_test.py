import os
import pty
import re
import threading

import jax
import pytest

from tests.support.forked import Forked
from tests.support.runs import TINY, arguments
from vit_jax.workdir import progress


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, 'perf_counter', lambda: self.now)


@pytest.mark.parametrize('peak', [None, 1e9])
def test_report(peak, monkeypatch):
    clock = Clock(monkeypatch)
    meter = progress.Meter(batch_size=8, num_steps=100, flops_per_step=1e9, peak_flops=peak)

    def slow():
        for k in range(4):
            clock.now += 0.5  # the data takes half a second
            yield k

    meter.start(10)
    batches = meter.timed(slow())
    for _ in range(4):
        next(batches)
        clock.now += 1.5
    clock.now += 30
    meter.pause(30)  # an evaluation
    values = meter.report(14)
    assert values['images_per_sec'] == pytest.approx(4)
    assert values['data_wait'] == pytest.approx(0.25)
    assert values['eta_sec'] == pytest.approx(86 * 2)
    assert values['flops_per_sec'] == pytest.approx(0.5e9)
    assert values['memory_gb'] > 0.01
    assert values.get('mfu') == (peak and 0.5 / jax.device_count())
    assert next(batches, 'end') == 'end'


@pytest.mark.parametrize(('seconds', 'text'), [(59.9, '00:00:59'), (3661, '01:01:01'),
                                               (90_061, '1d 01:01:01')])
def test_duration(seconds, text):
    assert progress.duration(seconds) == text


def test_one_live_line_on_a_terminal(tmp_path):
    """A real run on a real pseudo-terminal; as that of `script` it does not say its width."""
    master, slave = pty.openpty()
    written = []

    def read():
        while True:
            try:
                written.append(os.read(master, 65536))
            except OSError:  # the run has ended
                return

    fields = TINY | {'num_steps': 12, 'log_every': 12, 'eval_every': 6, 'checkpoint_every': 12}
    process = Forked(arguments(tmp_path, fields=fields), os.ttyname(slave))
    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(300)
    os.close(slave)
    reader.join(20)
    os.close(master)
    text = b''.join(written).decode()
    assert code == 0, text
    for line in ('compiling the training step', r'step 0/12 0%\s',
                 r'step 6/12 50%  ETA \S+  loss 2\.\d{4}  best accuracy \S+ %  [\d,]+ images/s',
                 'evaluating after step 12'):
        assert re.search(rf'\r{line}', text), text
    assert re.search(r'\n *step 12/12  loss 2|\rstep 12/12  loss 2', text), text
