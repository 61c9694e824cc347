"""Subjects alternate in rounds, after a warm-up."""

import pytest

from vit_jax.measuring import rounds


def test_subjects_take_turns_and_the_first_steps_do_not_count():
    calls = []
    clock = {'slow': 1.0, 'fast': 0.25}

    def subject(name):
        def run(count):
            is_first = all(called != name for called, _ in calls)
            calls.append((name, count))
            return 100.0 if is_first else clock[name] * count

        return run

    timings = rounds.in_turn({name: subject(name) for name in clock}, rounds=3, seconds=2.0)
    warm_up = rounds.WARM_UP_STEPS
    assert calls[:4] == [('slow', warm_up), ('slow', 1), ('fast', warm_up), ('fast', 1)]
    assert calls[4:] == [
        ('slow', 2),
        ('fast', 8),
        ('fast', 8),
        ('slow', 2),
        ('slow', 2),
        ('fast', 8),
    ]
    assert timings == {'slow': (1.0, 1.0, 1.0), 'fast': (0.25, 0.25, 0.25)}


def test_a_timing_is_median_fastest_and_slowest():
    seconds = iter([1.0, 9.0, 4.0, 2.0, 3.0])
    timing = rounds.in_turn({'x': lambda count: next(seconds)}, rounds=3, seconds=0.1)['x']
    assert timing == rounds.Timing(median=3.0, fastest=2.0, slowest=4.0)


def test_a_full_queue_at_the_start_does_not_count():
    """50 batches are ready. Each further batch takes half a second."""
    ready = 50
    counts = []

    def run(count):
        nonlocal ready
        slow = max(0, count - ready)
        ready = max(0, ready - count)
        counts.append(count)
        return 1e-6 * (count - slow) + 0.5 * slow

    timing = rounds.in_turn({'input': run}, rounds=2, seconds=3.0)['input']
    assert counts[:-2] == [rounds.WARM_UP_STEPS, 1, 2, 4, 8, 16, 32, 32]
    assert counts[-2:] == [6, 6]
    assert timing == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(('growing', 'warm_ups'), [(0, 1), (2, 3), (99, rounds.MOST_WARM_UPS)])
def test_the_warm_up_lasts_while_a_process_gets_more_memory(growing, warm_ups, monkeypatch):
    peak = 1e9
    counts = []
    monkeypatch.setattr(rounds.memory, 'peak_resident', lambda: peak)

    def run(count):
        nonlocal peak
        counts.append(count)
        peak += 7e8 if len(counts) <= growing else 1e6
        return 5.0

    rounds.in_turn({'x': run}, rounds=1, seconds=2.0)
    assert counts == [rounds.WARM_UP_STEPS] * warm_ups + [1, 1]


def test_fast_steps_fill_their_turn():
    counts = []

    def run(count):
        counts.append(count)
        return count / 1024

    rounds.in_turn({'x': run}, rounds=1, seconds=2.0)
    assert counts == [rounds.WARM_UP_STEPS, *(2**k for k in range(9)), 256, 2048]
