"""With one process. What several do is tested in together_test.py."""

import pytest

from vit_jax.errors import UserError
from vit_jax.processes import consensus


def test_one_process_decides_by_itself():
    assert consensus.count() == 1
    assert consensus.is_main()
    assert consensus.gather((1, 2)) == [(1, 2)]
    consensus.check_equal('the config', {'a': 1})


def test_the_error_of_one_process_is_raised_as_it_is():
    class OwnError(UserError):
        pass

    def fail():
        raise OwnError('no such file')

    with pytest.raises(OwnError, match='no such file'):
        consensus.from_main(fail)


def test_a_vote_tells_of_the_call_before():
    vote = consensus.SignalVote()
    assert [vote(number) for number in (0, 15, 2, 0)] == [0, 0, 15, 2]
