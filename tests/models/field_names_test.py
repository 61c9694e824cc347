from tests.support.errors import refused
from vit_jax.models.field_names import check_field_names


def test_complete_fields_are_accepted_in_any_order():
    check_field_names('model', ['a', 'b'], ['b', 'a'])


def test_an_unknown_field_is_refused_with_the_nearest_name():
    with refused(kind='unknown', field='model', value='widht') as error:
        check_field_names('model', ['widht'], ['width'])
    assert str(error.value) == (
        "model has no field 'widht'. Did you mean width? Its fields are: width."
    )


def test_a_missing_field_is_refused():
    with refused(kind='missing', field='model.width'):
        check_field_names('model', [], ['width'])
