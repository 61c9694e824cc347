import errno
import logging
import os
import types

import pytest

from vit_jax.workdir import log_file


def close(handler):
    logging.getLogger('vit_jax').removeHandler(handler)
    handler.close()


def test_log_lines_go_to_the_workdir(tmp_path):
    handler = log_file.log_to(str(tmp_path / 'run'))
    logging.getLogger('vit_jax').warning('%d steps', 3)
    close(handler)
    assert (tmp_path / 'run' / 'train.log').read_text().endswith(' WARNING 3 steps\n')


@pytest.mark.parametrize('kind', ['full', 'directory'])
def test_unwritable_log_is_one_warning(kind, tmp_path, caplog, capsys):
    if kind == 'full':
        (tmp_path / 'train.log').symlink_to('/dev/full')
    else:
        (tmp_path / 'train.log').mkdir()
    handler = log_file.log_to(str(tmp_path))
    for _ in range(3):
        logging.getLogger('vit_jax').warning('a line')
    close(handler)
    reason = 'No space left on device' if kind == 'full' else 'Is a directory'
    assert caplog.text.count(f'train.log cannot be written ({reason}): the run continues') == 1
    assert caplog.text.count('a line') == 3
    assert capsys.readouterr().err == ''


def test_error_while_closing_the_log_is_one_warning(tmp_path, caplog, monkeypatch):
    """A network disk may check its quota only then."""

    def refuse():
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    handler = log_file.log_to(str(tmp_path))
    logging.getLogger('vit_jax').warning('a line')
    logging.getLogger('vit_jax').removeHandler(handler)
    with handler.stream:
        monkeypatch.setattr(
            handler, 'stream', types.SimpleNamespace(flush=lambda: None, close=refuse)
        )
        handler.close()
    assert caplog.text.count('train.log cannot be written (Disk quota exceeded): the run') == 1
