import jax
import pytest

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
