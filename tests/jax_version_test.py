"""The installed JAX does not have the bug of the version that setup.py excludes."""

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
sums = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
print(int(sums[-1]), jax.__version__)
"""


def test_product_and_sum_of_many_rows_are_right():
    """Compiles with the options that users have, not with the options of the other tests."""
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
    last_sum, version = result.stdout.split()
    assert int(last_sum) == 32_768**2, f'jax {version} computes {last_sum}: see setup.py'
