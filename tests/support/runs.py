"""The real command, and what it is started with, shared by the tests."""

import importlib.util
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# The tests have eight CPU devices; processes that they start have one.
SINGLE_DEVICE_FLAGS = re.sub(r' ?--xla_force_host_platform_device_count=\d+', '',
                             os.environ.get('XLA_FLAGS', ''))

# A model and a run that take seconds, with dropout, augmentation and several epochs.
TINY = {
    'batch_size': 32, 'num_steps': 48, 'num_epochs': 0, 'log_every': 1, 'eval_every': 20,
    'checkpoint_every': 6, 'model.hidden_size': 16, 'model.num_layers': 2, 'model.mlp_dim': 32,
    'model.num_heads': 2, 'model.dropout_rate': 0.2, 'optimizer.warmup_steps': 4,
    'optimizer.schedule': 'constant',
}


def command(workdir, config='configs/quickstart.py', **fields):
    """The argument list of a training run; fields with dots are given as a dict `fields=`."""
    overrides = fields.pop('fields', {}) | fields
    return [sys.executable, '-m', 'vit_jax.main', f'--config={ROOT / config}',
            f'--workdir={workdir}', *(f'--config.{k}={v}' for k, v in overrides.items())]


def environment():
    """The environment of a training process of the tests: one CPU device."""
    return os.environ | {'XLA_FLAGS': SINGLE_DEVICE_FLAGS, 'JAX_ENABLE_COMPILATION_CACHE': 'false',
                         'JAX_DISABLE_MOST_OPTIMIZATIONS': '0'}


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'configs' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_message(result, message):
    assert result.returncode == 1, result.stderr
    assert message in result.stderr
    assert 'Traceback' not in result.stderr
