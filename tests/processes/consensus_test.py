"""With one process. What several do is tested in together_test.py."""

import pytest

from vit_jax.errors import UserError
from vit_jax.processes import consensus


def test_one_process_decides_by_itself():
    assert consensus.count() == 1
    assert consensus.is_main()
    assert consensus.agree((1, 2), list) == [(1, 2)]
    consensus.check_equal('the config', {'a': 1})


def test_the_error_of_one_process_is_raised_as_it_is():
    class OwnError(UserError):
        pass

    def fail(*_):
        raise OwnError('no such file')

    for call in (lambda: consensus.from_main(fail), lambda: consensus.agree(1, fail)):
        with pytest.raises(OwnError, match='no such file'):
            call()


def test_a_vote_tells_of_the_call_before():
    vote = consensus.SignalVote()
    assert [vote(number) for number in (0, 15, 2, 0)] == [0, 0, 15, 2]
