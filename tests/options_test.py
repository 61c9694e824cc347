import pytest

from vit_jax.errors import UserError
from vit_jax.options import Options


def test_options_are_read_by_name_and_kind():
    options = Options('objective.options', 'gamma=1.5, shots=3,name=ant')
    assert options.get_float('gamma', 2.0) == 1.5
    assert options.get_int('shots', 1) == 3
    assert options.get_text('name', '') == 'ant'
    assert options.get_float('other', 0.25) == 0.25
    options.require_all_known()


@pytest.mark.parametrize('text', ['gamma', '=1', 'a=1,a=2'])
def test_texts_that_are_no_options(text):
    with pytest.raises(UserError, match='objective.options is'):
        Options('objective.options', text)


def test_an_option_without_effect_is_refused():
    options = Options('objective.options', 'gamma=1,shots=3')
    options.get_float('gamma', 2.0)
    with pytest.raises(UserError, match="has 'shots', which has no effect"):
        options.require_all_known()
