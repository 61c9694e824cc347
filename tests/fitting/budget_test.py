"""The minutes decide what is trained."""

import pytest

from vit_jax import config as config_lib
from vit_jax.fitting import budget


@pytest.mark.parametrize(
    ('num_train', 'platform', 'devices', 'expected'),
    [
        (10, 'cpu', 1, 4),
        (1000, 'cpu', 2, 32),
        (1000, 'gpu', 1, 64),
        (100_000, 'gpu', 8, 256),
        (50, 'cpu', 3, 3),
    ],
)
def test_the_batch_fits_the_data_and_the_devices(num_train, platform, devices, expected):
    size = budget.batch_size_for(num_train, platform, devices)
    assert size == expected
    assert size % devices == 0


def plan(monkeypatch, minutes, seconds_per_step=1.0, num_train=1000, side=200):
    monkeypatch.setattr(
        budget, 'measure', lambda config: budget.Measured(seconds_per_step, 30.0, 1)
    )
    config = config_lib.base('ti16')
    config.batch_size = 32
    return budget.make_plan(config, 60 * minutes, num_train, 150, side)


def test_all_runs_fit_into_the_time(monkeypatch):
    for minutes in (10, 30, 120):
        made = plan(monkeypatch, minutes)
        assert made.seconds() <= 60 * minutes
        assert made.run_steps > made.try_steps > 0
        assert made.rates == budget.RATES


def test_with_little_time_one_run_has_all_of_it(monkeypatch):
    made = plan(monkeypatch, 5)
    assert (made.try_steps, made.rates, made.tries_augmentation) == (0, (budget.RATE,), False)
    assert 60 * 4 < made.seconds() <= 60 * 5


def test_without_time_for_a_try_nothing_is_measured(monkeypatch):
    made = plan(monkeypatch, 0.7, seconds_per_step=None)
    assert (made.run_steps, made.try_steps, made.rates) == (0, 0, ())


def test_much_time_is_not_used_up(monkeypatch):
    made = plan(monkeypatch, 10_000)
    assert made.run_steps * 32 <= 31 * 1000
    assert made.tries_augmentation


def test_large_photos_are_shown_larger_where_there_is_time(monkeypatch):
    assert plan(monkeypatch, 60, side=200).image_size == (224, 224)
    assert plan(monkeypatch, 60, side=400).image_size == (288, 288)
    assert plan(monkeypatch, 6, side=400).image_size == (224, 224)


def test_a_plan_is_read_as_it_was_written(monkeypatch):
    made = plan(monkeypatch, 30)
    assert budget.from_json(made.as_json()) == made


def test_the_long_run_is_shorter_where_less_time_is_left(monkeypatch):
    made = plan(monkeypatch, 30)
    assert budget.steps_in(made, 1e9) == made.run_steps
    seconds = 100 * made.seconds_per_step + made.seconds_per_start
    assert budget.steps_in(made, seconds + 0.01) == 100
    assert budget.steps_in(made, 0.0) == 0


def test_evaluations_take_their_share_of_the_time(monkeypatch):
    made = plan(monkeypatch, 30)
    assert made.seconds_per_step == pytest.approx(1 + 0.4 * 150 / 1000)
    assert made.step() == budget.Step((224, 224), 32, accum_steps=1)
