import pickle

import pytest

from tests.support.errors import refused
from vit_jax import errors


def test_nearest_names():
    assert errors.nearest_names('b61', ['b16', 'l32']) == 'Did you mean b16? '
    assert errors.nearest_names('B/16', ['b16', 'l32']) == 'Did you mean b16? '
    assert errors.nearest_names('zebra', ['b16', 'l32']) == ''
    assert errors.nearest_names('G14', ['g14', 'G14']) == 'Did you mean G14, g14? '
    assert errors.nearest_names('--foo', ['--fop', '--fop']) == 'Did you mean --fop? '


def test_a_number_agrees_with_its_noun():
    assert errors.counted(1, 'image') == '1 image'
    assert errors.counted(1300, 'image') == '1,300 images'
    assert errors.counted(0, 'patch', 'patches') == '0 patches'


def test_check_choice():
    errors.check_choice('loss.name', 'softmax', ('softmax', 'sigmoid'))
    with refused(kind='choice', field='loss.name', value='sofmax') as error:
        errors.check_choice('loss.name', 'sofmax', ('softmax', 'sigmoid'))
    assert str(error.value) == (
        "loss.name is 'sofmax'. Did you mean softmax? It is one of: softmax, sigmoid."
    )


def test_of_a_long_line_the_middle_is_left_out():
    message = str(errors.UserError('several:\n' + 'a' * 9000 + 'z'))
    assert message == f'several:\n{"a" * 500} [... 8001 characters ...] {"a" * 499}z'
    listed = '\n'.join(f'  {k}.jpg: cut short' for k in range(1000))  # of broken images
    assert str(errors.UserError(listed)) == listed


def test_a_pipe_that_closes_is_no_mystery(caplog):
    """As with `| head -1`; of a file its name is said."""
    errors.report(BrokenPipeError(32, 'Broken pipe'))
    errors.report(BrokenPipeError(32, 'Broken pipe', 'x.csv'))
    assert caplog.messages == [
        'error: Broken pipe: what reads the output has closed it.',
        "error: [Errno 32] Broken pipe: 'x.csv'",
    ]


def test_an_error_tells_programs_its_kind_and_what_it_is_about(tmp_path):
    error = errors.UserError('x', kind='value', field='seed', file=tmp_path, value=-1)
    for same in (error, pickle.loads(pickle.dumps(error))):  # as from another process
        assert (same.kind, same.field, same.value) == ('value', 'seed', -1)
        assert same.file == str(tmp_path)
    assert errors.UserError('x').kind == 'other'
    assert errors.MissingDataError('x').kind == 'missing_data'
    assert errors.MissingDataError('x', kind='missing').kind == 'missing'


def test_a_thread_that_cannot_start_is_one_message_with_the_limits_to_raise(caplog):
    errors.report(RuntimeError("can't start new thread"))
    (message,) = caplog.messages
    assert message == (
        'error: this process cannot start another thread: the limit on threads or on memory is '
        'reached. Raise it (`ulimit -u`, `ulimit -v`) and run the same command again.'
    )


def test_a_command_adds_its_own_advice_on_memory(caplog):
    error = RuntimeError('RESOURCE_EXHAUSTED: 8 TB\nmore')
    errors.report(error)
    error.add_note('In training: x.')
    errors.report(error)
    general = 'error: out of memory: 8 TB\nLower the batch size or the image size.'
    assert caplog.messages == [general, f'{general} In training: x.']


def test_divergence_is_an_error_that_a_user_can_mend():
    assert issubclass(errors.DivergedError, errors.UserError)


def test_check_at_least():
    errors.check_at_least('model.num_layers', 1, 1)
    for value in (0, 1.5, True):
        with refused(kind='value', field='model.num_layers', value=value) as error:
            errors.check_at_least('model.num_layers', value, 1)
    assert str(error.value) == ('model.num_layers is True: expected a whole number, at least 1.')


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('été 猫 👩‍🔬\u00a0%', 'été 猫 👩‍🔬\u00a0%'),
        ('a\n\tb', 'a\n\tb'),
        ('\x1b[31m\r\x07\x9b\x7f', '\\x1b[31m\\r\\x07\\x9b\\x7f'),
        ('\u202egpj', '\\u202egpj'),
        ('\udcff', '\\udcff'),
    ],
)
def test_control_characters_are_escaped(text, said):
    assert errors.printable(text) == said
    assert errors.one_line(text + '\n') == said.replace('\n', '\\n').replace('\t', '\\t') + '\\n'
