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
def test_a_log_that_cannot_be_written_is_said_once(kind, tmp_path, caplog, capsys):
    if kind == 'full':
        (tmp_path / 'train.log').symlink_to('/dev/full')
    else:
        (tmp_path / 'train.log').mkdir()
    handler = log_file.log_to(str(tmp_path))
    for _ in range(3):
        logging.getLogger('vit_jax').warning('a line')
    close(handler)
    reason = 'No space left on device' if kind == 'full' else 'Is a directory'
    assert caplog.text.count(f'train.log cannot be written ({reason}): the run goes on') == 1
    assert caplog.text.count('a line') == 3
    assert capsys.readouterr().err == ''


def test_a_log_that_is_lost_when_it_is_closed_is_said(tmp_path, caplog, monkeypatch):
    """As on a network disk that looks at its quota then."""

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
