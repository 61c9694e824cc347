"""The real command, and what it is started with, shared by the tests."""

import contextlib
import importlib.util
import io
import logging
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from vit_jax import config as config_lib
from vit_jax import main

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

# Measured against the clock or the machine: these differ between equal runs.
TIMED = ('train/images_per_sec', 'train/data_wait', 'train/eta_sec', 'train/flops_per_sec',
         'train/mfu', 'train/memory_gb', 'eval/seconds')


def arguments(workdir, config='configs/quickstart.py', **fields):
    """What a training run is started with; fields with dots are given as a dict `fields=`."""
    overrides = fields.pop('fields', {}) | fields
    return [f'--config={ROOT / config}', f'--workdir={workdir}',
            *(f'--config.{k}={v}' for k, v in overrides.items())]


def command(workdir, **kwargs):
    """The training command as a user types it; see `arguments`."""
    return [sys.executable, '-m', 'vit_jax.main', *arguments(workdir, **kwargs)]


def environment(cached=False):
    """The environment of a process of the tests: one CPU device, compiled as for a user.

    Args:
      cached: what one such process has compiled the next one reads, also of the other workers.
    """
    return os.environ | {'XLA_FLAGS': SINGLE_DEVICE_FLAGS, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '0',
                         'JAX_ENABLE_COMPILATION_CACHE': str(cached).lower()}


def run_here(*argv):
    """The training command in this process, on the first device: what it wrote, its exit code."""
    logger = logging.getLogger('vit_jax')
    handlers, logger.handlers = logger.handlers, []  # the command makes its own, for its stderr
    first, unoptimised = jax.devices()[:1], jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', False)  # compiled as for a user
    with (pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(io.StringIO()) as output,
          contextlib.redirect_stderr(io.StringIO()) as log):
        patch.setattr(jax, 'devices', lambda: first)
        try:
            # JAX runs already, too late to look for other processes of the run.
            code = main.main([*argv, '--num_processes=1'])
        except SystemExit as end:
            code = end.code
        finally:
            for handler in logger.handlers:
                handler.close()
            logger.handlers = handlers
            jax.config.update('jax_disable_most_optimizations', unoptimised)
    return subprocess.CompletedProcess(argv, code, output.getvalue(), log.getvalue())


def resolved(config, num_examples=1000, num_classes=6):
    """A checked config with the numbers of some data, as a run has it."""
    return config_lib.complete(config_lib.checked(config), num_examples, num_classes)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'configs' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_message(result, message):
    assert result.returncode == 1, result.stderr
    assert message in result.stderr
    assert 'Traceback' not in result.stderr
