"""Trains a model.

    python -m vit_jax.main --config=configs/vit.py:b16 --workdir=DIR [--config.FIELD=VALUE ...]
"""

import ast
import re
import sys

from absl import app, flags
from ml_collections import config_flags

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.processes import hosts
from vit_jax.workdir import logs

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'File and argument, for example configs/vit.py:b16.')
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Where checkpoints, metrics and curves go; a run found there is continued.')
_COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'With several processes: HOST:PORT, where process 0 runs, a free port.')
_NUM_PROCESSES = flags.DEFINE_integer(
    'num_processes', None, 'Of this run. On TPU pods, under Slurm, Open MPI and in indexed '
    'Kubernetes jobs these three flags are not needed.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.')
_START_TIMEOUT = flags.DEFINE_integer(
    'start_timeout', 300, 'Seconds to wait until all processes have been started.')
flags.mark_flags_as_required(['config', 'workdir'])


def parse(argv: list[str]) -> list[str]:
    """Parses the flags; an unknown model, data set or field ends with one plain message."""
    try:
        arguments = flags.FLAGS(argv)
        _ = _CONFIG.value.seed  # a missing file shows when a field is first used
        refuse_repeated(argv, flags.FLAGS)
        return arguments
    except SystemExit as end:
        sys.exit(0 if end.code == 1 else end.code)  # absl ends --help with 1
    except flags.UnrecognizedFlagError as error:
        field = error.flagname in config_lib.flatten(config_lib.base())
        hint = f'. Did you mean --config.{error.flagname}?' if field else ''
        sys.exit(f'error: {error}{hint}')
    except OSError as error:
        sys.exit(f'error: no config file. {error}')
    except UserError as error:
        sys.exit(f'error: {error}')
    except (AttributeError, KeyError, TypeError, ValueError, flags.Error) as error:
        sys.exit(f'error: {describe(error)}')


def refuse_repeated(argv: list[str], values: flags.FlagValues) -> None:
    """Raises UserError for a tuple field that is given twice: absl would join the values."""
    names = [argument.lstrip('-').partition('=')[0] for argument in argv]
    for name in names:
        if name in values and isinstance(values[name], flags.MultiFlag) and names.count(name) > 1:
            raise UserError(f'--{name} is given {names.count(name)} times: give it once, with all '
                            f'its values, as in --{name}=A,B')


def describe(error: Exception) -> str:
    """What ml_collections says of a field, without the quotes that each KeyError put around it."""
    text = str(error.args[0] if error.args else error)
    while text[:1] in ('"', "'") and text[-1:] == text[:1]:
        text = ast.literal_eval(text)
    if re.match(r"'?\w+'?$", text):
        text = (f'this config has no field {text.strip(chr(39))!r}. All fields: vit_jax/config.py, '
                'and those of each kind of model: docs/models.md')
    return text.replace("'\n", "': ")


def processes() -> tuple[str | None, int | None, int | None]:
    """The flags that say which of several processes this is."""
    return _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value


def main(argv: list[str]) -> None:
    """Runs the training and exits: 0 done, 143 or 130 after a signal, 1 after an error."""
    if argv[1:]:
        sys.exit(f'error: unexpected argument {argv[1]!r}; flags are written --name=value.')
    logs.to_terminal()
    try:
        # TensorFlow is imported: seconds that --help need not wait for.
        from vit_jax.training import loop as train
        from vit_jax.workdir import record as workdir
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}. Training needs more: pip install -e '.[train]'")
    try:
        hosts.initialise(*processes(), _START_TIMEOUT.value)
        if hosts.is_main():
            workdir.make(_WORKDIR.value)
            logs.to_file(_WORKDIR.value)
        sys.exit(train.run(_CONFIG.value, _WORKDIR.value))
    except Exception as error:
        hosts.fail(error)
        logs.report(error)
    sys.exit(1)


if __name__ == '__main__':
    app.run(main, flags_parser=parse)
