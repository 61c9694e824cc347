import resource

import jax
import pytest

from vit_jax import machine
from vit_jax.errors import UserError


@pytest.mark.parametrize('error', [AssertionError(), RuntimeError("Unable to initialize 'cuda'")])
def test_devices_that_are_not_there(error, monkeypatch):
    """JAX_PLATFORMS=cuda without a GPU, with and without the plugin."""
    def devices():
        raise error

    monkeypatch.setattr(jax, 'devices', devices)
    with pytest.raises(UserError, match="JAX cannot start with JAX_PLATFORMS='cpu': .*\\[gpu"):
        machine.check_backend()


def test_too_little_address_space(monkeypatch):
    monkeypatch.setattr(resource, 'getrlimit', lambda _: (3_500_000_000, resource.RLIM_INFINITY))
    machine.check_address_space(2e9)
    with pytest.raises(UserError, match='at least 4 GB of address space, and the limit is 3.5 GB: '
                                        'raise it, as in ulimit -v unlimited'):
        machine.check_address_space(4e9)
