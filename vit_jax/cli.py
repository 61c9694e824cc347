"""What commands share: configs and weights from the command line, exit codes and log lines.

Every command is a decorated function `main(argv=None) -> exit code`: it parses its options, reads
the config or the weights with a function of this module, and makes one call.
"""

import argparse
import contextlib
import functools
import logging
import os
import re
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import flax.linen as nn
from absl import flags
from jaxtyping import PyTree
from ml_collections import ConfigDict, FrozenConfigDict, config_flags

from vit_jax import config as config_lib
from vit_jax import errors, machine, terminal, weights
from vit_jax.errors import UserError, nearest_names
from vit_jax.processes import consensus, launch, watchdog
from vit_jax.weights import description

LOGGER = terminal.LOGGER


class _StoreOnce(argparse.Action):
    """Stores a value. A second value for the same option is an error; argparse would take it."""

    def __call__(self, parser, namespace, values, option_string=None):
        if option_string and self.dest in parser.stored:
            parser.error(f'{option_string} is given twice: give it once')
        parser.stored.add(self.dest)
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """A parser of the options of a command.

    With a mistyped option the message names the nearest one. An option without its value, or with
    two values where one is expected, is an error.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register('action', None, _StoreOnce)
        self.register('action', 'store', _StoreOnce)

    def parse_known_args(self, args=None, namespace=None):
        self.given = sys.argv[1:] if args is None else args
        self.own = re.findall(r'--[\w-]+', self.format_help())
        for name, value in zip(self.given, [*self.given[1:], None], strict=True):
            if (name.endswith('=') or value == '') and name.strip('=') in self.own:
                self.error(f'{name} has no value: give it one, or leave the option out')
        self.stored = set()
        return super().parse_known_args(args, namespace)

    def print_help(self, file=None):
        """Prints the help; argparse would say nothing if stdout cannot be written."""
        if file is None:
            terminal.write(self.format_help().rstrip('\n'))
        else:
            super().print_help(file)

    def error(self, message):
        for name in (argument.partition('=')[0] for argument in self.given):
            if re.match(r'--[\w-]+$', name) and name not in self.own:
                message += f'. There is no option {name}. {nearest_names(name, self.own)}'
        super().error(errors.printable(message + self._weights_without_option()))

    def _weights_without_option(self):
        """A sentence for weights that are given as they are, as in `predict RUN photo.jpg`."""
        options = {argument.partition('=')[0] for argument in self.given}
        if '--pretrained' not in self.own or options & {'--workdir', '--pretrained'}:
            return ''
        for argument in self.given:
            kind = weights.kind_of(argument)
            if kind:
                return f'. Did you mean --{kind}={argument}?'
        return ''


def make_parser(
    command: str, documentation: str, epilog: Callable[[], str] | None = None
) -> argparse.ArgumentParser:
    """A parser for the options of a command; --help shows the documentation of its module."""
    return _Parser(
        f'vit_jax.{command}',
        description=documentation,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog and epilog(),
    )


def command(function: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Decorates a function of the arguments: an error becomes one message, and exit code 1."""

    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> int:
        machine.as_usual()
        terminal.log_to_terminal()
        before = LOGGER.handlers[:]
        # With arguments from Python the process is that of another program, such as a notebook.
        is_own_process = argv is None and threading.current_thread() is threading.main_thread()
        watching = watchdog.watching() if is_own_process else contextlib.nullcontext()
        try:
            with watching, launch.leave_on_error():
                return _code_of(function, argv)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except SystemExit as end:
            if end.code not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                raise
            return end.code
        except Exception as error:
            if _hides_interrupt(error):
                return 128 + signal.SIGINT
            errors.report(error)
            return 1
        finally:  # the next command of this process has another train.log, or none
            for handler in set(LOGGER.handlers).difference(before):
                LOGGER.removeHandler(handler)
                handler.close()

    return main


def _hides_interrupt(error):
    """Whether a library in C++ has made another error of the KeyboardInterrupt in its midst."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or 'KeyboardInterrupt' in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code_of(function, argv):
    """The exit code of a command, when all that it has printed is written."""
    try:
        code = function(argv) or 0
    except SystemExit:  # of argparse, after --help
        terminal.flush()
        raise
    terminal.flush()
    return code


def leave(code: int) -> NoReturn:
    """Ends the process with the exit code of a command.

    An ordinary exit waits for all threads: Orbax has some that wait five minutes for a folder which
    a full disk has refused, TensorFlow some that wait for ever for a pipe. During a compilation it
    ends in a stack trace of XLA. Only success has an ordinary exit.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):  # nothing is left to save
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    if code:
        logging.shutdown()
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def default_workdir(argv: Sequence[str] | None) -> str:
    """'runs/vit-b16' for --config=configs/vit.py:b16; says so."""
    path, _, argument = config_file(argv)[0].partition(':')
    name = os.path.splitext(os.path.basename(path))[0]
    workdir = os.path.join('runs', re.sub(r'[^\w.]+', '-', f'{name} {argument}'.strip()))
    LOGGER.info(
        'workdir %s, where the same command continues; --workdir=DIR names another', workdir
    )
    return workdir


def config_file(argv: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """FILE[:ARGUMENT] of --config, None without it, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--config', action='append')
    options, others = parser.parse_known_args(argv)
    files = options.config or [None]
    if len(files) > 1:
        raise UserError(f'--config is given twice, as {files[0]} and {files[1]}: give it once.')
    return files[0], others


def parse_with_config(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ConfigDict]:
    """The options of a command, and the config that all other arguments describe, checked."""
    options, others = parser.parse_known_args(argv)
    config = read_config(others, [f'--{name}' for name in vars(options)])
    machine.check_address_space(3.8e9)
    config_lib.checked(config)  # before there is a workdir
    return options, config


def read_config(arguments: Sequence[str], own_options: Sequence[str] = ()) -> ConfigDict:
    """The config of --config=FILE[:ARGUMENT] --config.FIELD=VALUE...

    Raises UserError when the file or a field does not exist, a value has the wrong type, or a field
    is given twice; a mistyped argument may have meant one of the command's `own_options`.
    """
    file, overrides = config_file(arguments)
    with _explained(file, 'get_config([ARGUMENT]) that returns vit_jax.config.base() with changes'):
        config = _parse(
            functools.partial(config_flags.DEFINE_config_file, lock_config=False),
            None,
            [f'--config={file}'],
        )
        getattr(config, 'to_dict', None)  # raises what opening files has raised
        if not isinstance(config, ConfigDict) or isinstance(config, FrozenConfigDict):
            kind = None if config is None else type(config).__name__
            raise TypeError(f'get_config returned {kind}, and no ConfigDict')
        config_lib.check_fields(config, f'the config of {file}')
    return override(config, overrides, own_options)


def from_config_file(file: str | None, function: str, *arguments: str) -> Any:
    """What another function of FILE[:ARGUMENT] returns, None if the file does not have it.

    Raises UserError as `read_config`.
    """
    with _explained(file, f'{function}({", ".join(map(repr, arguments))})'):
        found = runpy.run_path(file.partition(':')[0]).get(function)
        return found and found(*arguments)


@contextlib.contextmanager
def _explained(file, expected):
    """What is wrong with a config file becomes a UserError."""
    if file is None:
        raise UserError('add --config=FILE, as in --config=configs/vit.py:b16')
    path = file.partition(':')[0]
    if not os.path.isfile(path):
        raise UserError(
            f'no config file {os.path.abspath(path)}: --config is a path from the '
            'current directory, as in --config=configs/vit.py:b16'
        )
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the file is a program: it may raise anything
        cause = error.__cause__ if isinstance(error, OSError) else error  # ml_collections wraps it
        raise UserError(
            f'--config={file}: {_where(cause or error, file)} Expected a Python file '
            f'with a function {expected}, as those in configs/.'
        ) from error


def override(
    config: ConfigDict, arguments: Sequence[str], own_options: Sequence[str] = ()
) -> ConfigDict:
    """The config, in which --config.FIELD=VALUE... are set; raises UserError as `read_config`."""
    config_lib.complete_evaluators(config, _named_evaluators(arguments))
    arguments = _joined(arguments, config_lib.flatten(config))
    _check_names(arguments, config_lib.flatten(config), own_options)
    arguments = [_as_literal(argument) for argument in arguments]
    try:
        config = _parse(config_flags.DEFINE_config_dict, config, arguments)
    except (TypeError, ValueError, flags.Error) as error:
        raise UserError(_expected(str(error))) from error
    return config_lib.with_values_read(config)


def _named_evaluators(arguments):
    """The names in arguments --config.evals.NAME.FIELD of evaluators, which may be new."""
    names = []
    for argument in arguments:
        match = re.match(r'--?config\.evals\.(\w+)\.', argument)
        if match and match[1] != 'fewshot':
            names.append(match[1])
    return names


def _joined(arguments, given):
    """The arguments, in which '--config.FIELD', 'VALUE' is one, '--config.FIELD=VALUE'."""
    joined = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        field = re.sub('^--?config[.]', '', argument)
        takes_value = field != argument and field in given and not isinstance(given[field], bool)
        if takes_value and remaining:
            argument = f'{argument}={remaining.pop(0)}'
        joined.append(argument)
    return joined


def _as_literal(argument):
    """'--config.FIELD=A,B' as "--config.FIELD=('A', 'B')", which absl reads, for several texts.

    An empty value is () for every field that may have none.
    """
    name, has_value, text = argument.partition('=')
    field = config_lib.field_named(re.sub('^--?config[.]', '', name))
    if field is None or not has_value:
        return argument
    if field.values.of_texts and text[:1] not in ('(', '[', '"', "'"):
        return f'{name}={field.values.read(text)!r}'
    if text == '' and field.values.fit(()):
        return f'{name}=()'
    return argument


def _where(error, config):
    """'line 3: NameError: ...' where the error was raised in the file of the config."""
    path = os.path.realpath(config.partition(':')[0])
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.realpath(frame.filename) == path
    ]
    reason = (str(error).strip().splitlines() or [''])[-1].strip()
    return f'line {lines[-1]}: {type(error).__name__}: {reason}.' if lines else f'{reason}.'


def _expected(message):
    """What absl says of a value that it cannot convert, with what the field may be."""
    found = re.match(r'flag --config\.([\w.]+)=(.*?): ', message)
    field = config_lib.field_named(found[1]) if found else None
    if field is None:
        return message
    sweep = (
        '. To try several, python -m vit_jax.sweep takes the same options'
        if ',' in found[2] and not field.values.has_commas
        else ''
    )
    return f'{found[1]} is {found[2]!r}: expected {field.values.words}{sweep}.'


def _parse(define, default, arguments):
    """The value of a flag --config that `define`, of ml_collections, has defined."""
    values, argv = flags.FlagValues(), ['vit_jax', *arguments]
    flag = define('config', default, flag_values=values, sys_argv=argv)
    if unexpected := values(argv)[1:]:
        raise UserError(f'unexpected argument {unexpected[0]!r}: options are written --name=value.')
    return flag.value


def _check_names(overrides, fields, own_options):
    """Raises UserError unless all arguments name fields of the config, each of them once."""
    given = [argument for argument in overrides if argument.startswith('-')]
    first = {}  # the argument that sets a field
    for argument in given:
        name = argument.partition('=')[0]
        field = re.sub(r'^--?(no)?config\.', '', name)
        if field == name:
            meant = config_lib.meant(name.lstrip('-'), fields)
            nearest = (
                f'Did you mean --config.{meant}? '
                if meant
                else nearest_names(name, [*own_options, *(f'--config.{f}' for f in fields)])
            )
            raise UserError(
                f'there is no option {name}. {nearest}Options are written '
                '--name=value, those of the config --config.FIELD=VALUE.'
            )
        if field not in fields:
            raise UserError(config_lib.no_field(field, fields))
        if field in first:
            has_several = isinstance(fields[field], list)
            raise UserError(
                f'config.{field} is given twice, as {first[field]} and {argument}: give it once'
                + (f', with all its values, as in --config.{field}=A,B.' if has_several else '.')
            )
        first[field] = argument


def add_weights_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `read_weights` needs: --workdir or --pretrained, and descriptions."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--workdir', help='of a run, or one of its checkpoints')
    source.add_argument(
        '--pretrained', help='weights: file, directory, hf:ORG/NAME, timm:NAME, gs://BUCKET/FILE'
    )
    add_description_options(parser)


def add_description_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --preprocess, --step, --classes, --loss and --allow-nonfinite, see weights/."""
    parser.add_argument(
        '--model',
        action='append',
        default=[],
        metavar='FIELD=VALUE',
        help='what arrays do not show, if the weights do not say it: any of '
        'num_heads=N,gelu=erf,layer_norm_epsilon=1e-6',
    )
    parser.add_argument(
        '--preprocess',
        action='append',
        default=[],
        metavar='FIELD=VALUE',
        help='of images, instead of what the weights say: any of '
        'fit=squash,crop_ratio=0.9,resize=bicubic,antialias=False,uint8_resize=True,mean=R,G,B,'
        'std=R,G,B,image_size=H,W; may be repeated. fit=torchvision and fit=transformers imply '
        'uint8_resize=True (rounded as by Pillow)',
    )
    parser.add_argument(
        '--step',
        type=int,
        help='which checkpoint of a workdir; default: the best '
        'if the run keeps it (keep_best), else the newest',
    )
    parser.add_argument(
        '--classes',
        metavar='FILE',
        help='names of the classes, one per line or '
        'as a JSON array, instead of those in the weights',
    )
    parser.add_argument(
        '--loss',
        help='that the weights were trained with, if they do not say it: '
        'softmax (the default), or sigmoid, of classes that are independent',
    )
    parser.add_argument(
        '--allow-nonfinite',
        '--allow_nonfinite',
        action='store_true',
        help='go on with weights that have NaN or infinite values',
    )


def read_weights(options: argparse.Namespace) -> weights.Weights:
    """The weights that the options name, completed by what they say of images and classes."""
    machine.check_backend()
    loaded = weights.load(
        options.workdir or options.pretrained,
        description.parse_model(options.model),
        step=options.step,
        allow_nonfinite=options.allow_nonfinite,
    )
    return description.described(loaded, options.preprocess, options.classes, options.loss)


def build_model(loaded: weights.Weights) -> tuple[nn.Module, PyTree]:
    """The model and its float32 parameters; UserError unless it takes RGB images."""
    description.check_rgb(loaded)
    return weights.fastest_model(loaded), loaded.float32_params()


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which of several processes this is."""
    parser.add_argument(
        '--coordinator',
        metavar='HOST:PORT',
        help='with several processes: the '
        'host of process 0 and a free port there. On TPU pods, under Slurm, Open '
        'MPI and in indexed Kubernetes jobs this and the next two are not needed',
    )
    parser.add_argument('--num_processes', type=int, help='of this run')
    parser.add_argument('--process_id', type=int, help='which of them this is, from 0')
    parser.add_argument(
        '--start_timeout',
        type=int,
        default=300,
        metavar='SECONDS',
        help='how long to wait until all processes have started (300)',
    )


def join_processes(
    options: argparse.Namespace, continues: bool = False, host_devices: int = 1
) -> None:
    """Joins the other processes, which the options of `add_process_options` or a launcher name.

    Afterwards only process 0 logs progress. `continues` is that of launch.start; `host_devices`,
    that of machine.check_backend, is for a process that is alone: several have started JAX by then.
    """
    launch.start(
        options.coordinator,
        options.num_processes,
        options.process_id,
        options.start_timeout,
        continues,
    )
    machine.check_backend(host_devices if consensus.count() == 1 else 1)
    terminal.log_as_process()
