from vit_jax.measuring import rounds


def test_subjects_take_turns_and_the_first_call_does_not_count():
    calls, clock = [], {'slow': 1.0, 'fast': 0.25}

    def subject(name):
        first = [True]

        def run(count):
            calls.append((name, count))
            seconds = 100.0 if first[0] else clock[name] * count
            first[0] = False
            return seconds
        return run

    found = rounds.in_turn({name: subject(name) for name in clock}, rounds=3, seconds=2.0)
    assert calls[:4] == [('slow', 1), ('slow', 1), ('fast', 1), ('fast', 1)]
    assert calls[4:] == [('slow', 2), ('fast', 8), ('fast', 8), ('slow', 2), ('slow', 2),
                         ('fast', 8)]
    assert found == {'slow': (1.0, 1.0, 1.0), 'fast': (0.25, 0.25, 0.25)}


def test_median_fastest_and_slowest():
    seconds = iter([1.0, 9.0, 4.0, 2.0, 3.0])
    timing = rounds.in_turn({'x': lambda count: next(seconds)}, rounds=3, seconds=0.1)['x']
    assert timing == rounds.Timing(median=3.0, fastest=2.0, slowest=4.0)
