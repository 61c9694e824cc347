import os
import pathlib
import sys

import pytest

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
    with pytest.raises(errors.UserError) as error:
        errors.check_choice('loss.name', 'sofmax', ('softmax', 'sigmoid'))
    assert str(error.value) == (
        "loss.name is 'sofmax'. Did you mean softmax? It is one of: softmax, sigmoid."
    )


def test_where_nothing_can_be_written(tmp_path):
    errors.check_destination(str(tmp_path / 'x.npz'), '.npz')
    for path, message in [
        (tmp_path, 'it is a directory'),
        (tmp_path / 'a/b', 'no directory'),
        (tmp_path / 'x', r'ends in \.npz'),
    ]:
        with pytest.raises(errors.UserError, match=message):
            errors.check_destination(str(path), '.npz')


def test_a_directory_without_the_right_to_write(tmp_path, monkeypatch):
    """Tests may run as root, who may write everywhere; a pipe in such a directory is as before."""
    link, folder = tmp_path / 'link', tmp_path / 'folder'
    folder.mkdir()
    link.symlink_to(folder / 'x')
    os.mkfifo(folder / 'pipe')
    monkeypatch.setattr(os, 'access', lambda path, mode: mode == os.W_OK and path != str(folder))
    errors.check_destination(str(tmp_path / 'y'))
    errors.check_destination(str(folder / 'pipe'))
    for path in (link, folder / 'x'):
        with pytest.raises(errors.UserError, match=f'{path} cannot be written: {folder} is read-o'):
            errors.check_destination(str(path))


def test_what_reads_the_output_may_be_named_by_stdout():
    """Behind such a name is one that does not exist: /proc/PID/fd/pipe:[NUMBER]."""
    reading, writing = os.pipe()
    errors.check_destination(f'/dev/fd/{writing}')
    os.close(writing)
    os.close(reading)


def test_a_file_is_replaced_when_all_is_written(tmp_path):
    path, link = tmp_path / 'x', tmp_path / 'link'
    path.write_text('old')
    link.symlink_to(path)

    def fill(name):
        with errors.writing(name) as temporary:
            pathlib.Path(temporary).write_text('ne')
            raise OSError(28, 'No space left')

    for name in (path, link):
        with pytest.raises(errors.UserError, match=f'^{name} cannot be written .No space left.. '):
            fill(str(name))
        assert path.read_text() == 'old'
    with errors.writing(str(link)) as temporary:
        pathlib.Path(temporary).write_text('new')
    assert link.is_symlink()
    assert path.read_text() == 'new'
    with errors.writing('/dev/null') as temporary:
        assert temporary == '/dev/null'
    assert sorted(tmp_path.iterdir()) == [link, path]


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


def test_divergence_is_an_error_that_a_user_can_mend():
    assert issubclass(errors.DivergedError, errors.UserError)


def test_check_at_least():
    errors.check_at_least('model.num_layers', 1, 1)
    for value in (0, 1.5, True):
        with pytest.raises(errors.UserError, match=f'num_layers is {value}: expected a whole'):
            errors.check_at_least('model.num_layers', value, 1)


def test_check_names():
    errors.check_names('model', ['a', 'b'], ['b', 'a'])
    with pytest.raises(errors.UserError, match="model has no field 'widht'. Did you mean width?"):
        errors.check_names('model', ['widht'], ['width'])
    with pytest.raises(errors.UserError, match='model lacks width'):
        errors.check_names('model', [], ['width'])


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


@pytest.mark.parametrize(('encoding', 'advice'), [('utf-8', 'Rename'), ('ascii', 'PYTHONUTF8=1')])
def test_names_that_the_locale_cannot_have_need_another_locale(encoding, advice, monkeypatch):
    monkeypatch.setattr(sys, 'getfilesystemencoding', lambda: encoding)
    assert advice in errors.rename_or_locale()
