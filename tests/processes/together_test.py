"""Real processes without a model: their agreement, and the message when one of them is lost."""

import signal
import time

import pytest

from tests.support.processes import start_programs

# After a broken collective, or after HEARTBEAT_TIMEOUT.
LOST = (
    'was killed or lost another process, which was killed, hangs, stopped with an error',
    'Start the same command again on all hosts: the run continues from its newest checkpoint.',
)
AGREEING = """
assert (consensus.count(), consensus.is_main()) == (1, True)
def between_steps(step):
    import os, pytest
    from vit_jax.errors import UserError
    me = {process}
    assert (consensus.count(), consensus.is_main()) == (2, me == 0)
    assert consensus.gather({{'me': me, 'x': 'äb' * 99 * me}}) == [
        {{'me': 0, 'x': ''}}, {{'me': 1, 'x': 'äb' * 99}}]
    assert max(consensus.gather(me)) == 1
    assert consensus.from_main(lambda: ['process', me]) == ['process', 0]
    def refuse(*args):
        raise UserError(f'refused on process {{me}}')
    with pytest.raises(UserError, match='refused on process 0'):
        consensus.from_main(refuse)
    consensus.check_equal('the config', {{'a': 1}})
    with pytest.raises(UserError) as error:
        consensus.check_equal('the config', [{{'a': 2, 'b': 4, 'c': 5}}, {{'a': 1, 'b': 4}}][me])
    assert str(error.value).splitlines() == [
        'the config of the processes differs. Start all with the same:',
        '  a: 2 on process 0, 1 on process 1', "  c: 5 on process 0, 'absent' on process 1"]
    from vit_jax.workdir import lock
    os.makedirs(f'{folder}/{{me}}')
    os.chdir(f'{folder}/{{me}}')
    with pytest.raises(UserError, match='process 1 does not find the workdir run of process 0'):
        lock.reserve('run')
    os.chdir('..')
    with lock.reserve('run'):
        pass
    vote = consensus.SignalVote()  # returns the result of the previous call
    assert [vote(number) for number in (0, 15 * me, 2, 0)] == [0, 0, 15, 2]
"""


def at_step_9(name):
    return (
        'import os, signal\ndef between_steps(step):\n'
        f'    if step == 9:\n        os.kill(os.getpid(), signal.{name})\n'
    )


def assert_lost(run, i):
    """Asserts that a process ended because it lost the other one, with a last line about it."""
    assert run.all[i].returncode in (1, -signal.SIGABRT), run.log(i)  # -SIGABRT: JAX ended it
    for text in (f'error: process {i} of 2 ', *LOST):
        assert text in run.last_line(i), run.log(i)
    assert 'Traceback' not in run.log(i)


@pytest.mark.slow
def test_two_processes_make_the_same_decisions(tmp_path):
    with start_programs(
        tmp_path,
        2,
        steps=1,
        first={i: AGREEING.format(process=i, folder=tmp_path) for i in range(2)},
    ) as run:
        for log in run.wait([0, 0]):
            assert 'left after 1' in log
            assert 'error' not in log


@pytest.mark.slow
@pytest.mark.parametrize('process', [0, 1])
def test_survivor_of_sigkill_ends_with_a_message(process, tmp_path):
    with start_programs(tmp_path, 2, first={process: at_step_9('SIGKILL')}) as run:
        assert run.all[process].wait(120) == -signal.SIGKILL
        start = time.monotonic()
        run.all[1 - process].wait(100)
        print(f'survivor ended after {time.monotonic() - start:.1f} s')
        assert_lost(run, 1 - process)
        assert f'error: process {process} of 2 was killed' in run.last_line(process)


@pytest.mark.slow
@pytest.mark.parametrize('process', [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_survivor_of_a_hanging_process_ends_with_a_message(process, tmp_path):
    with start_programs(tmp_path, 2, first={process: at_step_9('SIGSTOP')}) as run:
        run.wait_for('step 9', i=process)
        start = time.monotonic()
        run.all[1 - process].wait(100)
        print(f'survivor ended after {time.monotonic() - start:.1f} s')
        assert_lost(run, 1 - process)


@pytest.mark.slow
@pytest.mark.parametrize('process', [0, 1])
def test_error_on_one_process_ends_both(process, tmp_path):
    failing = (
        'from vit_jax.errors import UserError\ndef between_steps(step):\n'
        '    if step == 9:\n        raise UserError("the disk of this host is full")\n'
    )
    with start_programs(tmp_path, 2, first={process: failing}) as run:
        assert run.all[process].wait(120) == 1
        start = time.monotonic()
        run.all[1 - process].wait(100)
        print(f'survivor ended after {time.monotonic() - start:.1f} s')
        assert run.last_line(process) == 'error: the disk of this host is full'
        assert_lost(run, 1 - process)


@pytest.mark.slow
def test_processes_that_exit_on_their_own_report_no_error(tmp_path):
    """Processes exit in this way after a signal before the first step."""
    leaving = 'def between_steps(step):\n    if step == 9:\n        raise SystemExit(143)\n'
    with start_programs(tmp_path, 2, first={0: leaving, 1: leaving}) as run:
        for log in run.wait([143, 143], timeout=60):
            assert 'error' not in log


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'code'), [('SIGTERM', 143), ('SIGINT', 130)])
def test_signal_to_one_process_stops_both_at_the_same_step(name, code, tmp_path):
    with start_programs(tmp_path, 2, first={1: at_step_9(name)}) as run:
        for log in run.wait([code, code]):
            assert 'left after 10' in log  # the vote takes one step
            assert 'error' not in log


@pytest.mark.slow
def test_different_num_processes_is_an_error(tmp_path):
    with start_programs(tmp_path / 'more', 2, numbers={1: 3}) as run:
        for log in run.wait([1, 1], timeout=100):
            assert '--num_processes: 2 on process 0, 3 on process 1' in log
            assert 'Traceback' not in log
    with start_programs(tmp_path / 'fewer', 2, numbers={0: 3}, timeout=5) as run:
        run.wait([-signal.SIGABRT] * 2, timeout=100)
        for i, number in enumerate((3, 2)):
            assert (
                f'error: process {i} of {number} and the others did not all connect at '
                '127.0.0.1:' in run.last_line(i)
            )
            assert (
                'within 5 s. One is missing, two have the same --process_id, or --num_processes '
                'differs between them' in run.last_line(i)
            )
