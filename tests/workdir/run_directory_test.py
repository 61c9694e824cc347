import logging
import os

import pytest

from tests.support.errors import refused
from vit_jax.errors import UserError
from vit_jax.workdir import lock, log_file, run_directory


def test_bucket_must_be_mounted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(kind='unwritable', field='--workdir', file='gs://b/run') as error:
        run_directory.make('gs://b/run')
    assert 'Mount the bucket' in str(error.value)
    assert not any(tmp_path.iterdir())


def test_read_only_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'access', lambda *_: False)  # tests may run as root
    with refused(kind='unwritable', field='--workdir', file=tmp_path):
        run_directory.make(str(tmp_path))


@pytest.mark.parametrize(
    ('path', 'obstacle'),
    [
        ('file', 'is a file'),
        ('file/lr=0.1', 'is below a file'),
        ('link', 'is a broken link'),
    ],
)
def test_path_that_is_no_directory_is_refused(path, obstacle, tmp_path):
    (tmp_path / 'file').write_text('')
    (tmp_path / 'link').symlink_to(tmp_path / 'gone')
    with refused(kind='unwritable', field='--workdir', file=tmp_path / path) as error:
        run_directory.make(str(tmp_path / path))
    assert str(error.value) == f'--workdir {tmp_path / path} {obstacle}: name a directory.'


def test_name_that_is_not_utf8_is_refused():
    with refused(kind='unwritable', field='--workdir', file='runs/\udcfe'):
        run_directory.make('runs/\udcfe')


@pytest.mark.parametrize('name', ['.lock', 'train.log', 'metrics.jsonl', 'config.json'])
def test_pipe_in_the_workdir_is_refused(name, tmp_path):
    os.mkfifo(tmp_path / name)
    for use in (log_file.log_to, lock.reserve):
        with refused(kind='unwritable', file=tmp_path / name):
            use(str(tmp_path))


def test_new_directories_of_a_refused_run_are_removed(tmp_path):
    workdir = tmp_path / 'runs/new'
    before = logging.getLogger('vit_jax').handlers[:]

    def run():
        lock.reserve(str(workdir)).close()
        log_file.log_to(str(workdir))
        logging.getLogger('vit_jax').warning('a line')
        raise UserError('refused')

    with pytest.raises(UserError), run_directory.removed_if_refused(str(workdir)):
        run()
    assert not any(tmp_path.iterdir())
    assert logging.getLogger('vit_jax').handlers == before


def test_old_directory_and_directory_with_other_files_stay(tmp_path):
    old = tmp_path / 'old'
    old.mkdir()
    with pytest.raises(UserError), run_directory.removed_if_refused(str(old)):
        raise UserError('refused')
    assert old.is_dir()
    new = tmp_path / 'new'

    def run():
        new.mkdir()
        (new / 'config.json').write_text('{}')
        raise UserError('refused')

    with pytest.raises(UserError), run_directory.removed_if_refused(str(new)):
        run()
    assert (new / 'config.json').exists()
