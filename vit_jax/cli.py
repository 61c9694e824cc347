"""What commands share: configs and weights from the command line, exit codes and log lines.

Every command is a decorated function `main(argv=None) -> exit code`: it parses its options, reads
the config or the weights with a function of this module, and makes one call.
"""

import argparse
import contextlib
import copy
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

from ml_collections import ConfigDict, FrozenConfigDict

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


class Parser(argparse.ArgumentParser):
    """A parser of the options of a command.

    With a mistyped option the message names the nearest one. An option without its value, or with
    two values where one is expected, is an error.

    Attributes:
      names: of all options, as in '--workdir'.
    """

    def __init__(self, *args, **kwargs):
        self.names = []
        super().__init__(*args, **kwargs)
        self.register('action', None, _StoreOnce)
        self.register('action', 'store', _StoreOnce)

    def add_argument(self, *args, **kwargs):
        """Adds an option, and its names to `names`."""
        action = super().add_argument(*args, **kwargs)
        self.names += action.option_strings
        return action

    def add_one_of(self, *options):
        """Adds options, pairs of a name and its help, exactly one of which is to be given."""
        group = self.add_mutually_exclusive_group(required=True)
        for name, text in options:
            self.names += group.add_argument(name, help=text).option_strings

    def parse_known_args(self, args=None, namespace=None):
        self.given = sys.argv[1:] if args is None else args
        for name, value in zip(self.given, [*self.given[1:], None], strict=True):
            if (name.endswith('=') or value == '') and name.strip('=') in self.names:
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
            if re.match(r'--[\w-]+$', name) and name not in self.names:
                message += f'. There is no option {name}. {nearest_names(name, self.names)}'
        super().error(errors.printable(message + self._weights_without_option()))

    def _weights_without_option(self):
        """A sentence for weights that are given as they are, as in `predict RUN photo.jpg`."""
        options = {argument.partition('=')[0] for argument in self.given}
        if '--pretrained' not in self.names or options & {'--workdir', '--pretrained'}:
            return ''
        for argument in self.given:
            kind = weights.kind_of(argument)
            if kind:
                return f'. Did you mean --{kind}={argument}?'
        return ''


def make_parser(
    command: str, documentation: str, epilog: Callable[[], str] | None = None
) -> Parser:
    """A parser for the options of a command; --help shows the documentation of its module."""
    return Parser(
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
        terminal.log_to_terminal()
        before = LOGGER.handlers[:]
        # With arguments from Python the process is that of another program, such as a notebook.
        is_own_process = argv is None and threading.current_thread() is threading.main_thread()
        watching = watchdog.watching() if is_own_process else contextlib.nullcontext()
        try:
            with watching, launch.leave_on_error():
                return _code_of(function, argv)
        except KeyboardInterrupt:
            return _interrupted(is_own_process)
        except SystemExit as end:
            if end.code not in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                raise
            return end.code
        except Exception as error:
            if _hides_interrupt(error):
                return _interrupted(is_own_process)
            errors.report(error)
            return 1
        finally:  # the next command of this process has another train.log, or none
            for handler in set(LOGGER.handlers).difference(before):
                LOGGER.removeHandler(handler)
                handler.close()

    return main


def _interrupted(is_own_process):
    """Report a Ctrl-C that ends a command, and return the exit code.

    Another Ctrl-C from here on ends the process at once: there is nothing left to save.
    """
    if is_own_process:
        _end_by_signals()
    LOGGER.warning('Stopped by SIGINT (Ctrl-C).')
    return 128 + signal.SIGINT


def _end_by_signals():
    """Let SIGINT and SIGTERM end the process, unless the process ignores them."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)


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
    _end_by_signals()
    if code:
        logging.shutdown()
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def default_workdir(file: str) -> str:
    """'runs/vit-b16' for the config file 'configs/vit.py:b16'; says so."""
    path, _, argument = file.partition(':')
    name = os.path.splitext(os.path.basename(path))[0]
    workdir = os.path.join('runs', re.sub(r'[^\w.]+', '-', f'{name} {argument}'.strip()))
    LOGGER.info(
        'workdir %s, where the same command continues; --workdir=DIR names another', workdir
    )
    return workdir


def parse_with_config(
    parser: Parser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ConfigDict]:
    """The options of a command, and the config that all other arguments describe, checked.

    The options have the config file as `config`, FILE[:ARGUMENT].
    """
    _add_config_option(parser)
    options, others = parser.parse_known_args(argv)
    options.config = _one_file(options.config)
    config = override(read_config_file(options.config), others, parser.names)
    machine.check_address_space(3.8e9)
    config_lib.checked(config)  # before there is a workdir
    return options, config


def config_file(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """FILE[:ARGUMENT] of --config, None without it, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_config_option(parser)
    options, others = parser.parse_known_args(arguments)
    return _one_file(options.config), others


def _add_config_option(parser):
    parser.add_argument('--config', action='append', help=argparse.SUPPRESS)


def _one_file(files):
    """The file of --config; None if it is not given."""
    if files and len(files) > 1:
        raise UserError(f'--config is given twice, as {files[0]} and {files[1]}: give it once.')
    return files[0] if files else None


def read_config(arguments: Sequence[str], own_options: Sequence[str] = ()) -> ConfigDict:
    """The config of --config=FILE[:ARGUMENT] --config.FIELD=VALUE...

    Raises UserError when the file or a field does not exist, a value has the wrong type, or a field
    is given twice; a mistyped argument may have meant one of the command's `own_options`.
    """
    file, overrides = config_file(arguments)
    return override(read_config_file(file), overrides, own_options)


def read_config_file(file: str | None) -> ConfigDict:
    """The config that FILE[:ARGUMENT] returns; UserError if it returns none."""
    _, has_argument, argument = (file or '').partition(':')
    arguments = [argument] if has_argument else []
    function = 'get_config([ARGUMENT]) that returns vit_jax.config.base() with changes'
    with _explained(file, function):
        config = _call(file, 'get_config', *arguments)
        if not isinstance(config, ConfigDict) or isinstance(config, FrozenConfigDict):
            kind = None if config is None else type(config).__name__
            raise TypeError(f'get_config returned {kind}, and no ConfigDict')
        config_lib.check_fields(config, f'the config of {file}')
    return config


def from_config_file(file: str | None, function: str, *arguments: str) -> Any:
    """What another function of FILE[:ARGUMENT] returns, None if the file does not have it.

    Raises UserError as `read_config`.
    """
    with _explained(file, f'{function}({", ".join(map(repr, arguments))})'):
        return _call(file, function, *arguments)


def _call(file, function, *arguments):
    """What a function of a config file returns, None if the file does not have it."""
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
        raise UserError(
            f'--config={file}: {_where(error, file)} Expected a Python file '
            f'with a function {expected}, as those in configs/.'
        ) from error


def override(
    config: ConfigDict, arguments: Sequence[str], own_options: Sequence[str] = ()
) -> ConfigDict:
    """A copy of the config, in which --config.FIELD=VALUE... are set.

    Raises UserError as `read_config`.
    """
    config = copy.deepcopy(config)  # in which fields that refer to others still do
    config_lib.complete_evaluators(config, _named_evaluators(arguments))
    known = config_lib.flatten(config)
    values = {}
    for field, text in _given_fields(arguments, known, own_options).items():
        try:
            values[field] = config_lib.parse_value(field, text, known)
        except UserError as error:
            raise UserError(f'{error}{_several_advice(field, text)}') from None
    return config_lib.with_values_read(config_lib.with_values(config, values))


def _named_evaluators(arguments):
    """The names in arguments --config.evals.NAME.FIELD of evaluators, which may be new."""
    names = []
    for argument in arguments:
        match = re.match(r'--?config\.evals\.(\w+)\.', argument)
        if match and match[1] != 'fewshot':
            names.append(match[1])
    return names


def _several_advice(field, text):
    """A sentence for several values of a field that has one."""
    declared = config_lib.field_named(field)
    if declared is None or declared.values.has_commas or ',' not in text:
        return ''
    return ' To try several, python -m vit_jax.sweep takes the same options.'


def _given_fields(arguments, known, own_options):
    """{field: text} of the arguments.

    These are --config.FIELD=VALUE, --config.FIELD VALUE, --config.SWITCH and --noconfig.SWITCH.

    Raises UserError unless all arguments name fields of the config, each of them once.
    """
    texts = {}
    first = {}  # the argument that sets a field
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith('-'):
            raise UserError(f'unexpected argument {argument!r}: options are written --name=value.')
        name, has_value, text = argument.partition('=')
        field = re.sub(r'^--?(no)?config\.', '', name)
        if field == name:
            raise UserError(_no_option(name, known, own_options))
        if field not in known:
            raise UserError(config_lib.no_field(field, known))
        is_switch = isinstance(known[field], bool)
        is_off = name.lstrip('-').startswith('no')
        if is_off and (has_value or not is_switch):
            raise UserError(f'there is no option {argument}: expected --config.{field}=VALUE.')
        if is_switch and not has_value:
            text = str(not is_off)
        elif not has_value and remaining:
            text = remaining.pop(0)
            argument = f'{argument}={text}'
        elif not has_value:
            raise UserError(f'--config.{field} has no value: expected --config.{field}=VALUE.')
        if field in first:
            has_several = isinstance(known[field], list)
            raise UserError(
                f'config.{field} is given twice, as {first[field]} and {argument}: give it once'
                + (f', with all its values, as in --config.{field}=A,B.' if has_several else '.')
            )
        first[field] = argument
        texts[field] = text
    return texts


def _no_option(name, known, own_options):
    """What to say of an option that is none."""
    meant = config_lib.meant(name.lstrip('-'), known)
    if meant:
        nearest = f'Did you mean --config.{meant}? '
    else:
        nearest = nearest_names(name, [*own_options, *(f'--config.{field}' for field in known)])
    return (
        f'there is no option {name}. {nearest}Options are written '
        '--name=value, those of the config --config.FIELD=VALUE.'
    )


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


def add_weights_options(parser: Parser) -> None:
    """Adds the options that `read_weights` needs: --workdir or --pretrained, and descriptions."""
    parser.add_one_of(
        ('--workdir', 'of a run, or one of its checkpoints'),
        ('--pretrained', 'weights: file, directory, hf:ORG/NAME, timm:NAME, gs://BUCKET/FILE'),
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
    machine.start_backend()
    loaded = weights.load(
        options.workdir or options.pretrained,
        description.parse_model(options.model),
        step=options.step,
        allow_nonfinite=options.allow_nonfinite,
    )
    return description.described(loaded, options.preprocess, options.classes, options.loss)


def read_model(options: argparse.Namespace) -> weights.Loaded:
    """The weights that the options name, with their model; UserError unless it takes RGB images."""
    given = read_weights(options)
    description.check_rgb(given)
    return weights.build(given)


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
    that of machine.start_backend, is for a process that is alone: several have started JAX by then.
    """
    launch.start(
        options.coordinator,
        options.num_processes,
        options.process_id,
        options.start_timeout,
        continues,
    )
    machine.start_backend(host_devices if consensus.count() == 1 else 1)
    terminal.log_as_process()
