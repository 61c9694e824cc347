"""Shared parts of the commands: configs and weights from the command line, exit codes, log lines.

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
from vit_jax import errors, machine, recipes, terminal, weights
from vit_jax.errors import UserError, nearest_names
from vit_jax.processes import consensus, launch, watchdog
from vit_jax.weights import description

LOGGER = terminal.LOGGER


class _StoreOnce(argparse.Action):
    """Stores a value and, unlike argparse, refuses a second value for the same option."""

    def __call__(self, parser, namespace, values, option_string=None):
        if option_string and self.dest in parser.stored:
            parser.error(f'{option_string} is given twice: give it once')
        parser.stored.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser for the options of a command.

    For a mistyped option the message suggests the nearest name. An option without its value, or
    with two values where one is expected, is an error. `--some-option` is read as `--some_option`.

    Attributes:
      names: the names of all options, such as '--workdir'.
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
        """Adds options and requires exactly one of them.

        Args:
          *options: pairs of a name and its help.
        """
        group = self.add_mutually_exclusive_group(required=True)
        for name, text in options:
            self.names += group.add_argument(name, help=text).option_strings

    def parse_known_args(self, args=None, namespace=None):
        if args is None:
            args = sys.argv[1:]
        self.arguments = [self._with_underscores(argument) for argument in args]
        following = [*self.arguments[1:], None]
        for name, value in zip(self.arguments, following, strict=True):
            if (name.endswith('=') or value == '') and name.strip('=') in self.names:
                self.error(f'{name} has no value: give it one, or leave the option out')
        self.stored = set()
        return super().parse_known_args(self.arguments, namespace)

    def _with_underscores(self, argument):
        """Returns '--some_option=VALUE' for '--some-option=VALUE' if there is such an option."""
        name, equals, value = argument.partition('=')
        spelt = '--' + name[2:].replace('-', '_')
        if name.startswith('--') and name not in self.names and spelt in self.names:
            return f'{spelt}{equals}{value}'
        return argument

    def print_help(self, file=None):
        """Prints the help; unlike argparse, reports an error if stdout cannot be written."""
        if file is None:
            terminal.write(self.format_help().rstrip('\n'))
        else:
            super().print_help(file)

    def error(self, message):
        for argument in self.arguments:
            name = argument.partition('=')[0]
            if re.match(r'--[\w-]+$', name) and name not in self.names:
                message += f'. There is no option {name}. {nearest_names(name, self.names)}'
        super().error(errors.printable(message + self._weights_without_option()))

    def _weights_without_option(self):
        """Returns advice for weights without an option, as in `predict RUN photo.jpg`."""
        options = {argument.partition('=')[0] for argument in self.arguments}
        if '--pretrained' not in self.names or options & {'--workdir', '--pretrained'}:
            return ''
        for argument in self.arguments:
            kind = weights.kind_of(argument)
            if kind:
                return f'. Did you mean --{kind}={argument}?'
        return ''


def make_parser(
    command: str, documentation: str, epilog: Callable[[], str] | None = None
) -> Parser:
    """Returns a parser for the options of a command.

    Args:
      command: the name of the module in vit_jax.
      documentation: the docstring of the module; --help shows it.
      epilog: returns the end of --help.
    """
    epilog_text = None
    if epilog is not None:
        epilog_text = epilog()
    return Parser(
        f'vit_jax.{command}',
        description=documentation,
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog_text,
    )


def command(function: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Decorates a command: an error becomes one message and exit code 1.

    Args:
      function: takes the arguments (None: sys.argv) and returns an exit code or None.
    """

    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> int:
        terminal.log_to_terminal()
        handlers_before = LOGGER.handlers[:]
        # With arguments from Python the process belongs to another program, such as a notebook.
        is_own_process = argv is None and threading.current_thread() is threading.main_thread()
        watching: contextlib.AbstractContextManager = contextlib.nullcontext()
        if is_own_process:
            watching = watchdog.watching()
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
        finally:  # the next command in this process writes to another train.log, or to none
            for handler in set(LOGGER.handlers).difference(handlers_before):
                LOGGER.removeHandler(handler)
                handler.close()

    return main


def _interrupted(is_own_process):
    """Report a Ctrl-C that ends a command, and return the exit code.

    Another Ctrl-C after this call ends the process at once, because there is nothing left to save.
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
    """Tells whether a C++ library has converted a KeyboardInterrupt to this error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or 'KeyboardInterrupt' in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code_of(function, argv):
    """Runs a command, writes all of its output and returns its exit code."""
    try:
        code = function(argv) or 0
    except SystemExit:  # argparse raises it after --help
        terminal.flush()
        raise
    terminal.flush()
    return code


def leave(code: int) -> NoReturn:
    """Ends the process with the exit code of a command.

    Only success exits in the ordinary way, which waits for all threads. Orbax has threads that wait
    five minutes for a folder on a full disk, and TensorFlow has threads that wait forever for a
    pipe. During a compilation an ordinary exit ends in a stack trace of XLA.
    """
    _end_by_signals()
    if code:
        logging.shutdown()
        with contextlib.suppress(OSError):  # the reader of a pipe may have gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def default_workdir(file: str) -> str:
    """Returns 'runs/vit-b16' for the config file 'configs/vit.py:b16', and logs it."""
    path, _, argument = file.partition(':')
    name = os.path.splitext(os.path.basename(path))[0]
    workdir = os.path.join('runs', re.sub(r'[^\w.]+', '-', f'{name} {argument}'.strip()))
    LOGGER.info(
        'Using the workdir %s. The same command resumes the run; --workdir=DIR chooses another '
        'directory',
        workdir,
    )
    return workdir


def parse_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Parses the options of a command, and returns the fields of its config unparsed.

    Args:
      parser: the parser for the options of the command except --config.
      argv: the arguments; None: sys.argv.

    Returns:
      The options, with FILE[:ARGUMENT] of --config as `config` (None without it), and all other
      arguments.

    Raises:
      UserError: if --config is given twice.
    """
    parser.add_argument('--config', action='append', help=argparse.SUPPRESS)
    options, others = parser.parse_known_args(argv)
    options.config = _only_file(options.config)
    return options, others


def parse_with_config(
    parser: Parser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, ConfigDict]:
    """Parses the options of a command and the config that all other arguments describe.

    Args:
      parser: the parser for the options of the command except --config.
      argv: the arguments; None: sys.argv.

    Returns:
      The options, with FILE[:ARGUMENT] of --config as `config`, and the checked config.

    Raises:
      UserError: if a value of the config is impossible, or for the reasons in `read_config`.
    """
    options, overrides = parse_options(parser, argv)
    config = override(read_config_file(options.config), overrides, parser.names)
    machine.check_address_space(3.8e9)
    config_lib.checked(config)  # before anything creates the workdir
    return options, config


def _only_file(files):
    """Returns the only value of --config; None if there is none."""
    if not files:
        return None
    if len(files) > 1:
        raise UserError(
            f'--config is given twice, as {files[0]} and {files[1]}: give it once.',
            kind='value',
            field='--config',
            value=files[1],
        )
    return files[0]


def read_config(arguments: Sequence[str], own_options: Sequence[str] = ()) -> ConfigDict:
    """Returns the config of --config=FILE[:ARGUMENT] --config.FIELD=VALUE...

    Args:
      arguments: these options only.
      own_options: names of the command's options, to suggest for a mistyped argument.

    Raises:
      UserError: if the file or a field does not exist, a value has the wrong type, or a field is
        given twice.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options, overrides = parse_options(parser, arguments)
    return override(read_config_file(options.config), overrides, own_options)


def read_config_file(file: str | None) -> ConfigDict:
    """Returns the config of FILE[:ARGUMENT].

    Raises:
      UserError: if the file does not return a config with all fields.
    """
    signature = 'get_config([ARGUMENT]) that returns vit_jax.config.base() with changes'
    with _explaining(file, signature):
        config = _call(file, 'get_config', *_arguments_of(file))
        if not isinstance(config, ConfigDict) or isinstance(config, FrozenConfigDict):
            kind = None
            if config is not None:
                kind = type(config).__name__
            raise TypeError(f'get_config returned {kind}, expected a ConfigDict')
        config_lib.check_fields(config, f'the config of {file}')
    return config


def _arguments_of(file):
    """Returns [ARGUMENT] of FILE:ARGUMENT, [] of FILE."""
    _, has_argument, argument = (file or '').partition(':')
    if has_argument:
        return [argument]
    return []


def from_config_file(file: str | None, function: str, *arguments: str) -> Any:
    """Calls another function of the config file FILE[:ARGUMENT].

    Returns:
      The result; None if the file does not have the function.

    Raises:
      UserError: if the file does not exist or raises an error.
    """
    with _explaining(file, f'{function}({", ".join(map(repr, arguments))})'):
        return _call(file, function, *arguments)


def config_path(file: str) -> str:
    """Returns the path of a config file.

    Args:
      file: FILE[:ARGUMENT], or NAME[:ARGUMENT] with the name of a recipe. A file of the current
        directory comes first.
    """
    path = file.partition(':')[0]
    if os.path.exists(path) or not _is_recipe_name(path):
        return path
    return recipes.path_of(path) or path


def _is_recipe_name(path):
    return path.isidentifier()


def _call(file, function, *arguments):
    """Calls a function of a config file; returns None if the file does not have it."""
    functions = runpy.run_path(config_path(file))
    if function not in functions:
        return None
    return functions[function](*arguments)


@contextlib.contextmanager
def _explaining(file, expected):
    """Converts any error of a config file to a UserError that names the expected function."""
    if file is None:
        raise UserError(
            '--config is missing: add --config=FILE, as in --config=configs/vit.py:b16',
            kind='missing',
            field='--config',
        )
    path = file.partition(':')[0]
    if not os.path.isfile(config_path(file)):
        suggestion = ''
        if _is_recipe_name(path):
            suggestion = nearest_names(path, recipes.names())
        raise UserError(
            f'no config file {os.path.abspath(path)}. {suggestion}Expected a path relative to the '
            'current directory, as in --config=configs/vit.py:b16, or the name of a recipe, as in '
            '--config=vit:b16',
            kind='missing',
            field='--config',
            file=os.path.abspath(path),
        )
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the file is a program: it may raise anything
        raise UserError(
            f'--config={file}: {_where(error, file)} Expected a Python file '
            f'with a function {expected}, like the files in configs/.',
            kind='content',
            field='--config',
            file=path,
        ) from error


def override(
    config: ConfigDict, arguments: Sequence[str], own_options: Sequence[str] = ()
) -> ConfigDict:
    """Returns a copy of the config with the values of --config.FIELD=VALUE...

    Args:
      config: the config, which is not changed.
      arguments: these options only.
      own_options: see `read_config`.

    Raises:
      UserError: see `read_config`.
    """
    config = copy.deepcopy(config)  # keeps references between fields
    config_lib.complete_evaluators(config, _named_evaluators(arguments))
    known = config_lib.flatten(config)
    values = {}
    for field, text in _texts_by_field(arguments, known, own_options).items():
        try:
            values[field] = config_lib.parse_value(field, text, known)
        except UserError as error:
            raise UserError(
                f'{error}{_sweep_advice(field, text)}',
                kind=error.kind,
                field=error.field,
                value=error.value,
            ) from None
    return config_lib.with_values_read(config_lib.with_values(config, values))


def _named_evaluators(arguments):
    """Returns the NAMEs in arguments --config.evals.NAME.FIELD; these evaluators may be new."""
    names = []
    for argument in arguments:
        match = re.match(r'--?config\.evals\.(\w+)\.', argument)
        if match and match[1] != 'fewshot':
            names.append(match[1])
    return names


def _sweep_advice(field, text):
    """Returns advice to use a sweep if `text` has several values for a field with one value."""
    declared = config_lib.field_named(field)
    if declared is None or declared.values.has_commas or ',' not in text:
        return ''
    return ' To try several values, use python -m vit_jax.sweep with the same options.'


def _texts_by_field(arguments, known, own_options):
    """Returns {field: text} of the arguments.

    An argument is --config.FIELD=VALUE, --config.FIELD VALUE, --config.SWITCH or
    --noconfig.SWITCH.

    Raises UserError unless every argument names a different field of the config.
    """
    texts = {}
    argument_of = {}
    remaining = list(arguments)
    while remaining:
        argument, field, text = _next_field(remaining, known, own_options)
        if field in argument_of:
            message = (
                f'config.{field} is given twice, as {argument_of[field]} and {argument}: '
                'give it once'
            )
            if isinstance(known[field], list):
                message += f', with all its values, as in --config.{field}=A,B'
            raise UserError(f'{message}.', kind='value', field=field, value=text)
        argument_of[field] = argument
        texts[field] = text
    return texts


def _next_field(remaining, known, own_options):
    """Removes the first field from the remaining arguments; returns (argument, field, text)."""
    argument = remaining.pop(0)
    if not argument.startswith('-'):
        raise UserError(
            f'unexpected argument {argument!r}: write options as --name=value.',
            kind='unknown',
            value=argument,
        )
    name, has_value, text = argument.partition('=')
    field = re.sub(r'^--?(no)?config\.', '', name)
    if field == name:
        raise UserError(_no_option(name, known, own_options), kind='unknown', field=name)
    if field not in known:
        raise config_lib.unknown_field(field, known)
    is_switch = isinstance(known[field], bool)
    is_off = name.lstrip('-').startswith('no')
    if is_off and (has_value or not is_switch):
        raise UserError(
            f'there is no option {argument}: expected --config.{field}=VALUE.',
            kind='unknown',
            field=argument,
        )
    if has_value:
        return argument, field, text
    if is_switch:
        return argument, field, str(not is_off)
    if not remaining:
        raise UserError(
            f'--config.{field} has no value: expected --config.{field}=VALUE.',
            kind='missing',
            field=field,
        )
    text = remaining.pop(0)
    return f'{argument}={text}', field, text


def _no_option(name, known, own_options):
    """Returns the message for an option that does not exist."""
    field = config_lib.likely_field(name.lstrip('-'), known)
    if field:
        suggestion = f'Did you mean --config.{field}? '
    else:
        options_of_fields = [f'--config.{field}' for field in known]
        suggestion = nearest_names(name, [*own_options, *options_of_fields])
    return (
        f'there is no option {name}. {suggestion}Write options as --name=value, and fields of the '
        'config as --config.FIELD=VALUE.'
    )


def _where(error, config):
    """Returns 'line 3: NameError: ...' with the line of the config file that raised the error."""
    path = os.path.realpath(config.partition(':')[0])
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.realpath(frame.filename) == path
    ]
    reason = ''
    if str(error).strip():
        reason = str(error).strip().splitlines()[-1].strip()
    if not lines:
        return f'{reason}.'
    return f'line {lines[-1]}: {type(error).__name__}: {reason}.'


def add_weights_options(parser: Parser) -> None:
    """Adds the options that `read_weights` needs: --workdir or --pretrained, and descriptions."""
    parser.add_one_of(
        ('--workdir', 'workdir of a run, or one of its checkpoints'),
        (
            '--pretrained',
            'weights: a file, directory, hf:ORG/NAME, timm:NAME or gs://BUCKET/FILE',
        ),
    )
    add_description_options(parser)


def add_description_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --preprocess, --step, --classes, --loss and --allow_nonfinite, see weights/."""
    parser.add_argument(
        '--model',
        action='append',
        default=[],
        metavar='FIELD=VALUE',
        help='fields of the model that neither the arrays nor their file determine: any of '
        'num_heads=N,gelu=erf,layer_norm_epsilon=1e-6',
    )
    parser.add_argument(
        '--preprocess',
        action='append',
        default=[],
        metavar='FIELD=VALUE',
        help='preprocessing of images, replacing values recorded with the weights: any of '
        'fit=squash,crop_ratio=0.9,resize=bicubic,antialias=False,uint8_resize=True,mean=R,G,B,'
        'std=R,G,B,image_size=H,W; may be repeated. fit=torchvision and fit=transformers imply '
        'uint8_resize=True (rounding as in Pillow)',
    )
    parser.add_argument(
        '--step',
        type=int,
        help='step of the checkpoint of a workdir; default: the best checkpoint '
        'if the run keeps it (keep_best), otherwise the newest',
    )
    parser.add_argument(
        '--classes',
        metavar='FILE',
        help='file with the names of the classes, one per line or '
        'as a JSON array, replacing the names in the weights',
    )
    parser.add_argument(
        '--loss',
        help='loss of the training, if the weights do not record it: softmax (default), or '
        'sigmoid for independent classes',
    )
    parser.add_argument(
        '--allow_nonfinite',
        action='store_true',
        help='use weights that contain NaN or infinite values',
    )


def read_weights(options: argparse.Namespace) -> weights.Weights:
    """Returns the weights that the options name, with their descriptions of images and classes.

    Args:
      options: the options from `add_weights_options`.

    Raises:
      UserError: if the weights cannot be read, or an option does not fit them.
    """
    machine.start_backend()
    loaded = weights.load(
        options.workdir or options.pretrained,
        description.parse_model(options.model),
        step=options.step,
        allow_nonfinite=options.allow_nonfinite,
    )
    return description.described(loaded, options.preprocess, options.classes, options.loss)


def read_model(options: argparse.Namespace) -> weights.Loaded:
    """Returns the weights that the options name, with their model.

    Raises:
      UserError: if the model does not take RGB images, or for the reasons in `read_weights`.
    """
    loaded = read_weights(options)
    description.check_rgb(loaded)
    return weights.build(loaded)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run of several processes."""
    parser.add_argument(
        '--coordinator',
        metavar='HOST:PORT',
        help='host of process 0 and a free port on it, for a run of several processes. TPU pods, '
        'Slurm, Open MPI and indexed Kubernetes jobs need neither this nor the next two options',
    )
    parser.add_argument('--num_processes', type=int, help='number of processes of the run')
    parser.add_argument('--process_id', type=int, help='number of this process, from 0')
    parser.add_argument(
        '--start_timeout',
        type=int,
        default=300,
        metavar='SECONDS',
        help='seconds to wait until all processes have started (default: 300)',
    )


def join_processes(
    options: argparse.Namespace, continues: bool = False, host_devices: int = 1
) -> None:
    """Starts JAX together with the other processes of a run; then only process 0 logs progress.

    Args:
      options: the options from `add_process_options`; a launcher may replace them.
      continues: see launch.start.
      host_devices: see machine.start_backend. It has an effect only for a single process, because
        several processes have already started JAX when they join.
    """
    launch.start(
        options.coordinator,
        options.num_processes,
        options.process_id,
        options.start_timeout,
        continues,
    )
    if consensus.count() > 1:
        host_devices = 1
    machine.start_backend(host_devices)
    terminal.log_as_process()
