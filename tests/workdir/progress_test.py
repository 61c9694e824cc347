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


def test_duration_of_a_run_is_the_sum_of_its_rows():
    rows = [
        {'step': 10, 'train/images_per_sec': 40.0},
        {'step': 10, 'eval/seconds': 0.5},
        {'step': 25, 'train/images_per_sec': 20.0},
        {'step': 25, 'eval/seconds': 1.5},
    ]
    assert progress.taken(rows, 8) == 10 * 8 / 40 + 15 * 8 / 20 + 2
    assert progress.taken([], 8) == 0


def test_live_line():
    speed = {'images_per_sec': 12_694.4, 'eta_sec': 7261.0}
    assert progress.live(284_123, 300_000, 1.225, 'accuracy 78.72 %', speed) == (
        '284123/300000 95%  loss 1.2250  accuracy 78.72 %  12,694 images/s  ETA 02:01:01'
    )
    assert progress.live(0, 9, None, '', {'images_per_sec': 0, 'eta_sec': 0}) == '0/9 0%'


@pytest.mark.parametrize(
    ('seconds', 'text'), [(59.9, '00:00:59'), (3661, '01:01:01'), (90_061, '1d 01:01:01')]
)
def test_duration(seconds, text):
    assert progress.duration(seconds) == text


def test_estimate_includes_evaluations():
    meter = progress.Meter(32, 500, 1e9, None, evaluations=10, batches_per_evaluation=12)
    seconds = 15.0 * (499 + 10 * 12 / 3)  # an evaluation computes only the forward pass
    text = meter.estimate(1, 15.0)
    assert progress.rough_duration(seconds) == '2 h 15 min'
    assert 'about 2 h 15 min for the 499 steps' in text
    assert '10 evaluations' in text


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [(8.4, '8 s'), (540, '9 min'), (7_800, '2 h 10 min'), (30 * 3600, '1 d 6 h')],
)
def test_rough_duration(seconds, text):
    assert progress.rough_duration(seconds) == text
