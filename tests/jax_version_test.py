"""The JAX at hand computes right numbers where a version that setup.py excludes does not."""

import subprocess
import sys

from tests.support.runs import ROOT, environment

# https://github.com/jax-ml/jax/issues/39103: a matrix-vector product for each of more than 32,768
# rows, then a sum, compiled for a CPU. jax 0.10.2 gives 1065369600; 0.10.1, 0.11.2 and 0.12.0.1
# give the power of two.
SUM_OF_PRODUCTS = """
import jax
import jax.numpy as jnp
matrix = jnp.eye(3)
rows = jnp.zeros((32_769, 3)).at[:, 0].set(jnp.arange(32_769))
found = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
print(int(found[-1]), jax.__version__)
"""


def test_product_and_sum_of_many_rows():
    """Compiled as for a user."""
    result = subprocess.run(
        [sys.executable, '-c', SUM_OF_PRODUCTS],
        cwd=ROOT,
        text=True,
        env=environment(as_a_user=True),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found, version = result.stdout.split()
    assert int(found) == 32_768**2, f'jax {version} computes {found}: see setup.py'
