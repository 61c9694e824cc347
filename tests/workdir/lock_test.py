from tests.support.errors import refused
from vit_jax.workdir import lock


def test_one_process_at_a_time(tmp_path):
    workdir = str(tmp_path / 'new')
    reservation = lock.reserve(workdir)
    with refused(kind='conflict', file=workdir) as error:
        lock.reserve(workdir)
    assert str(error.value) == (
        f'another process is training in {workdir}. Wait for it, stop it, or use another --workdir.'
    )
    reservation.close()
    lock.reserve(workdir).close()


def test_lock_that_is_a_directory_is_refused(tmp_path):
    (tmp_path / '.lock').mkdir()
    with refused(kind='unwritable', file=tmp_path / '.lock'):
        lock.reserve(str(tmp_path))
