"""What libraries may print between the lines of a run."""

import subprocess
import sys

import jax
import pytest

from tests.support.runs import ROOT, environment
from vit_jax.workdir import logs


def test_out_of_memory_says_what_to_do(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda: jax.numpy.ones((10**6, 10**9)).at[0].set(0))()
    logs.report(error.value)
    assert 'error: out of memory: ' in caplog.text
    assert 'add --config.accum_steps=0, which cuts the batch into parts that fit' in caplog.text
    assert 'Traceback' not in caplog.text


@pytest.mark.slow
def test_tensorflow_prints_no_python_stack_of_a_broken_image():
    """Though JAX, imported first, sets a log level that shows them."""
    program = '''
import jax
from vit_jax import logs
logs.to_terminal()
from vit_jax import config
from vit_jax.data import preprocess
try:
    preprocess.preprocess_eval(b'no image', (8, 8), config.base().preprocess)
except Exception as error:
    print(type(error).__name__)
'''
    unset = {k: v for k, v in environment().items() if k != 'TF_CPP_MIN_LOG_LEVEL'}
    result = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=unset, text=True,
                            capture_output=True, timeout=300, check=True)
    assert result.stdout == 'InvalidArgumentError\n'
    assert 'PyFunc' not in result.stderr
    assert 'Traceback' not in result.stderr
