import pytest

from tests.support.errors import refused
from vit_jax.options import Options


def test_options_are_read_by_name_and_type():
    options = Options('objective.options', 'gamma=1.5, shots=3,name=ant')
    assert options.get_float('gamma', 2.0) == 1.5
    assert options.get_int('shots', 1) == 3
    assert options.get_text('name', '') == 'ant'
    assert options.get_float('other', 0.25) == 0.25
    options.require_all_known()


@pytest.mark.parametrize('text', ['gamma', '=1', 'a=1,a=2'])
def test_malformed_options_are_refused(text):
    with refused('value', field='objective.options', value=text):
        Options('objective.options', text)


def test_option_of_another_type_is_refused():
    options = Options('objective.options', 'gamma=high')
    with refused('value', field='objective.options', value='high'):
        options.get_float('gamma', 2.0)


def test_option_without_effect_is_refused():
    options = Options('objective.options', 'gamma=1,shots=3')
    options.get_float('gamma', 2.0)
    with refused('unknown', field='objective.options', value='shots') as error:
        options.require_all_known()
    assert str(error.value) == (
        "objective.options has 'shots', which has no effect. The options are: gamma."
    )
