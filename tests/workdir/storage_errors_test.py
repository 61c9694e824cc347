import errno
import os

import pytest

from tests.support.errors import refused
from vit_jax.workdir import storage_errors


def test_reason_is_in_the_errno_or_the_text_of_an_error():
    for text in ('[OS error 28: ENOSPC No space left]', "No space left [os_error_code='28']"):
        full = ValueError(f'RESOURCE_EXHAUSTED: Error writing "a/b": {text}')
        assert storage_errors.reason(full) == os.strerror(errno.ENOSPC)
    assert storage_errors.reason(OSError(errno.EROFS, 'x')) == os.strerror(errno.EROFS)
    assert storage_errors.reason(ValueError('shapes')) == ''


def test_reason_may_be_in_the_cause():
    error = ValueError('cannot be read')
    error.__cause__ = OSError(errno.EDQUOT, 'x')
    assert storage_errors.reason(error) == os.strerror(errno.EDQUOT)


@pytest.mark.parametrize('number', [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_scarce_resources_are_not_a_damaged_file(number):
    storage_errors.require_not_scarce(OSError(errno.EIO, 'x'), 'the file')
    with refused(kind='resource'):
        storage_errors.require_not_scarce(OSError(number, 'x'), 'the file')
