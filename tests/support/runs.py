"""The real command, and what it is started with, shared by the tests."""

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
    'model.unroll': 1,  # which takes less time to compile
}

# With dropout, which makes compilation half as long again: for runs that are compared with others.
RANDOM = TINY | {'model.dropout_rate': 0.2}

# Measured against the clock or the machine: these differ between equal runs.
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
    """What a training run is started with; fields with dots are given as a dict `fields=`.

    Without its report, which takes longer than a short run, unless asked for.
    """
    overrides = {'report': False} | fields.pop('fields', {}) | fields
    return [
        f'--config={ROOT / config}',
        f'--workdir={workdir}',
        *(f'--config.{k}={v}' for k, v in overrides.items()),
    ]


def command(workdir, **kwargs):
    """The training command as a user types it; see `arguments`."""
    return [sys.executable, '-m', 'vit_jax.main', *arguments(workdir, **kwargs)]


def environment(as_a_user=False):
    """The environment of a process of the tests, which has one CPU device and XLA's optimizations.

    Args:
      as_a_user: without what makes compilation faster: other code generation, fewer of LLVM's
        optimizations, and a cache of what the processes of the tests have compiled.
    """
    flags = (
        []
        if as_a_user
        else [flag for flag in os.environ['XLA_FLAGS'].split() if 'device_count' not in flag]
    )
    return os.environ | {
        'XLA_FLAGS': ' '.join(flags),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '0',
        'JAX_ENABLE_COMPILATION_CACHE': str(not as_a_user).lower(),
    }


def run_here(*argv, command=main, optimized=False):
    """A command, such as training, in this process, on the first device.

    Args:
      optimized: whether JAX compiles with all optimizations, for runs of many steps.

    Returns:
      The CompletedProcess that it would be, with what it wrote and its exit code.
    """
    # JAX runs already, too late to look for other processes of the run.
    argv = [*map(str, argv), *(['--num_processes=1'] if command is main else [])]
    logger = logging.getLogger('vit_jax')
    handlers, logger.handlers = logger.handlers, []  # the command makes its own, for its stderr
    first, unoptimised = jax.devices()[:1], jax.config.read('jax_disable_most_optimizations')
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
            jax.config.update('jax_disable_most_optimizations', unoptimised)
    return subprocess.CompletedProcess(argv, code, output.getvalue(), log.getvalue())


def resolved(config, num_examples=1000, num_classes=6):
    """A checked config with the numbers of some data, as a run has it."""
    return resolve.with_data(resolve.checked(config), num_examples, num_classes)


def begin(workdir, config, class_names=('ant', 'bee'), without=()):
    """Leaves in a pathlib.Path what a run has that has saved a checkpoint.

    Args:
      without: fields of `config.mesh` that the version which began it did not have.
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
