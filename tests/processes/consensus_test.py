"""Consensus of a single process. together_test.py tests several processes."""

import pytest

from vit_jax.errors import UserError
from vit_jax.processes import consensus


def test_one_process_decides_by_itself():
    assert consensus.count() == 1
    assert consensus.is_main()
    assert consensus.gather((1, 2)) == [(1, 2)]
    consensus.check_equal('the config', {'a': 1})


def test_single_process_raises_the_original_error():
    class OwnError(UserError):
        pass

    def fail():
        raise OwnError('no such file')

    with pytest.raises(OwnError, match='no such file'):
        consensus.from_main(fail)


def test_vote_returns_the_result_of_the_previous_call():
    vote = consensus.SignalVote()
    assert [vote(number) for number in (0, 15, 2, 0)] == [0, 0, 15, 2]
