"""Starts the real commands in processes or in this process, with tiny configs."""

import contextlib
import importlib.util
import io
import logging
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from vit_jax import config as config_lib
from vit_jax import main
from vit_jax.files import write_json
from vit_jax.training import resolve
from vit_jax.workdir import record

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# A model and a run that take seconds, with augmentation and several epochs.
TINY = {
    'batch_size': 32,
    'num_steps': 48,
    'num_epochs': 0,
    'log_every': 1,
    'eval_every': 20,
    'checkpoint_every': 6,
    'model.hidden_size': 16,
    'model.num_layers': 2,
    'model.mlp_dim': 32,
    'model.num_heads': 2,
    'optimizer.warmup_steps': 4,
    'optimizer.schedule': 'constant',
    'model.unroll': 1,  # it compiles faster
}

# Dropout makes compilation half as long again; comparisons of runs need it.
RANDOM = TINY | {'model.dropout_rate': 0.2}

# Measurements of time and memory, which differ between equal runs.
TIMED = (
    'train/images_per_sec',
    'train/data_wait',
    'train/eta_sec',
    'train/flops_per_sec',
    'train/mfu',
    'train/memory_gb',
    'eval/seconds',
)


def arguments(workdir, config='configs/quickstart.py', **fields):
    """The options of a training run.

    The run writes no report, which takes longer than a short run, unless `fields` enable it.

    Args:
      workdir: the directory of the run.
      config: the config file.
      **fields: config fields; names with dots are in a dict `fields=`.
    """
    overrides = {'report': False} | fields.pop('fields', {}) | fields
    return [
        f'--config={ROOT / config}',
        f'--workdir={workdir}',
        *(f'--config.{k}={v}' for k, v in overrides.items()),
    ]


def command(workdir, **kwargs):
    """The training command of a user; see `arguments`."""
    return [sys.executable, '-m', 'vit_jax.main', *arguments(workdir, **kwargs)]


def environment(as_a_user=False):
    """The environment of a test process, which has one CPU device and XLA's optimizations.

    Args:
      as_a_user: whether to omit the settings of the tests that make compilation faster: other
        code generation, fewer of LLVM's optimizations, and a cache of compiled programs.
    """
    flags = []
    if not as_a_user:
        flags = [flag for flag in os.environ['XLA_FLAGS'].split() if 'device_count' not in flag]
    return os.environ | {
        'XLA_FLAGS': ' '.join(flags),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '0',
        'JAX_ENABLE_COMPILATION_CACHE': str(not as_a_user).lower(),
    }


def run_here(*argv, command=main, optimized=False):
    """Runs a command, such as training, in this process, on the first device.

    Args:
      *argv: the arguments of the command.
      command: the module of the command.
      optimized: whether JAX compiles with all optimizations, for runs of many steps.

    Returns:
      A CompletedProcess with its output and its exit code.
    """
    argv = [str(argument) for argument in argv]
    if command is main:
        argv.append('--num_processes=1')  # JAX runs already and cannot join other processes
    logger = logging.getLogger('vit_jax')
    handlers = logger.handlers
    logger.handlers = []  # the command adds its own handler for its stderr
    first = jax.devices()[:1]
    was_unoptimized = jax.config.read('jax_disable_most_optimizations')
    jax.config.update('jax_disable_most_optimizations', not optimized)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as log,
    ):
        patch.setattr(jax, 'devices', lambda: first)
        try:
            code = command.main(argv)
        except SystemExit as end:
            code = end.code
        finally:
            for handler in logger.handlers:
                handler.close()
            logger.handlers = handlers
            jax.config.update('jax_disable_most_optimizations', was_unoptimized)
    return subprocess.CompletedProcess(argv, code, output.getvalue(), log.getvalue())


def resolved(config, num_examples=1000, num_classes=6):
    """The checked config of a run on data with these numbers."""
    return resolve.with_data(config_lib.checked(config), num_examples, num_classes)


def begin(workdir, config, class_names=('ant', 'bee'), without=()):
    """Writes the files of a run with a checkpoint.

    Args:
      workdir: a pathlib.Path.
      config: the config of the run.
      class_names: the names of its classes.
      without: fields of `config.mesh` that an earlier version did not write.
    """
    recorded = config.to_dict()
    for name in without:
        del recorded['mesh'][name]
    (workdir / 'checkpoints' / '10').mkdir(parents=True)
    write_json(str(workdir / record.CONFIG), recorded)
    write_json(str(workdir / record.CLASSES), list(class_names))


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / 'configs' / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_message(result, message):
    assert result.returncode == 1, result.stderr
    assert message in result.stderr
    assert 'Traceback' not in result.stderr
