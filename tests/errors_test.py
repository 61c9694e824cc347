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


def test_noun_agrees_with_its_number():
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


def test_long_line_of_a_message_loses_its_middle():
    message = str(errors.UserError('several:\n' + 'a' * 9000 + 'z'))
    assert message == f'several:\n{"a" * 500} [... 8001 characters ...] {"a" * 499}z'


def test_message_may_have_many_lines():
    lines = '\n'.join(f'  {k}.jpg: cut short' for k in range(1000))
    assert str(errors.UserError(lines)) == lines


def test_closed_pipe_is_explained(caplog):
    """`| head -1` closes stdout; the error of a named file keeps the name."""
    errors.report(BrokenPipeError(32, 'Broken pipe'))
    errors.report(BrokenPipeError(32, 'Broken pipe', 'x.csv'))
    assert caplog.messages == [
        'error: Broken pipe: the program that reads the output has closed it.',
        "error: [Errno 32] Broken pipe: 'x.csv'",
    ]


@pytest.mark.parametrize(
    ('module', 'advice'),
    [
        (
            'tensorflow.data',
            "Install it with: pip install -e '.[train]' in a clone, or with the wheel's file, "
            "pip install 'vit_jax-VERSION.whl[train]'",
        ),
        ('my_lab', 'Install the package that contains it, or add its folder to PYTHONPATH.'),
    ],
)
def test_missing_module_is_named_with_its_installation(module, advice, caplog):
    errors.report(ModuleNotFoundError(f'No module named {module!r}', name=module))
    assert caplog.messages == [f'error: No module named {module!r}. {advice}']


def test_error_keeps_its_attributes_in_another_process(tmp_path):
    error = errors.UserError('x', kind='value', field='seed', file=tmp_path, value=-1)
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert (same.kind, same.field, same.value) == ('value', 'seed', -1)
        assert same.file == str(tmp_path)


def test_error_class_has_a_default_kind():
    assert errors.UserError('x').kind == 'other'
    assert errors.MissingDataError('x').kind == 'missing_data'
    assert errors.MissingDataError('x', kind='missing').kind == 'missing'


def test_thread_that_cannot_start_names_the_limits_to_raise(caplog):
    errors.report(RuntimeError("can't start new thread"))
    (message,) = caplog.messages
    assert message == (
        'error: this process cannot start another thread: the limit on threads or on memory is '
        'reached. Raise it (`ulimit -u`, `ulimit -v`) and run the same command again.'
    )


def test_command_adds_its_own_advice_on_memory(caplog):
    error = RuntimeError('RESOURCE_EXHAUSTED: 8 TB\nmore')
    errors.report(error)
    error.add_note('In training: x.')
    errors.report(error)
    general = 'error: out of memory: 8 TB\nLower the batch size or the image size.'
    assert caplog.messages == [general, f'{general} In training: x.']


def test_divergence_is_a_user_error():
    assert issubclass(errors.DivergedError, errors.UserError)


def test_check_at_least():
    errors.check_at_least('model.num_layers', 1, 1)
    for value in (0, 1.5, True):
        with refused(kind='value', field='model.num_layers', value=value) as error:
            errors.check_at_least('model.num_layers', value, 1)
    assert str(error.value) == ('model.num_layers is True: expected a whole number, at least 1.')


@pytest.mark.parametrize(
    ('text', 'escaped'),
    [
        ('été 猫 👩‍🔬\u00a0%', 'été 猫 👩‍🔬\u00a0%'),
        ('a\n\tb', 'a\n\tb'),
        ('\x1b[31m\r\x07\x9b\x7f', '\\x1b[31m\\r\\x07\\x9b\\x7f'),
        ('\u202egpj', '\\u202egpj'),
        ('\udcff', '\\udcff'),
    ],
)
def test_control_characters_are_escaped(text, escaped):
    assert errors.printable(text) == escaped
    on_one_line = escaped.replace('\n', '\\n').replace('\t', '\\t')
    assert errors.one_line(text + '\n') == on_one_line + '\\n'
