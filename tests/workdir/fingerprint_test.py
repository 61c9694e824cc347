import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax import config as config_lib
from vit_jax.parallel import sharding
from vit_jax.workdir import fingerprint


def test_every_bit_and_the_order_change_the_fingerprint():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5)).astype(np.float32)
    base = int(fingerprint.compute(jnp.asarray(x)))
    for element in range(15):
        for bit in range(32):
            bits = x.copy().view(np.uint32)
            bits.reshape(-1)[element] ^= np.uint32(1) << np.uint32(bit)
            assert int(fingerprint.compute(jnp.asarray(bits.view(np.uint32)))) != base
    assert int(fingerprint.compute(jnp.asarray(x.view(np.uint32)))) == base
    assert int(fingerprint.compute(jnp.asarray(x[::-1]))) != base


def test_fingerprint_is_the_same_on_any_mesh():
    x = jax.random.normal(jax.random.key(0), (8, 12))
    mesh = sharding.make_mesh(config_lib.base().mesh)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))
    assert int(fingerprint.compute(spread)) == int(fingerprint.compute(x))
    # 16-bit types work as well.
    assert int(fingerprint.compute(x.astype('bfloat16'))) != 0
