"""Configs and weights from the command line, exit codes, and messages of errors."""

import logging
import os
import sys

import jax
import pytest

from tests.support.errors import refused
from tests.support.forked import Forked
from tests.support.runs import ROOT
from vit_jax import cli, config_fields, errors, evaluate, predict
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.terminal import LOGGER
from vit_jax.workdir import log_file

QUICKSTART = f'--config={ROOT}/configs/quickstart.py'
H14 = f'--config={ROOT}/configs/vit.py:h14'


def test_reading_a_config_leaves_sys_argv_unchanged():
    argv = list(sys.argv)
    config = cli.read_config([H14, '--config.batch_size=8'])
    assert (config.batch_size, config.model.num_layers) == (8, 32)
    assert sys.argv == argv


def test_values_of_every_type_are_parsed():
    config = cli.read_config(
        [
            '--config',
            f'{ROOT}/configs/vit.py:r50x1',
            '--config.seed',
            '3',
            '--config.optimizer.learning_rate=1e-2',
            '--config.keep_best',
            '--noconfig.augment.flip',
            '--config.image_size=64,32',
            '--config.model.resnet.units=1,2',
            '--config.loss.name=sigmoid',
            '--config.transfer.take=',
        ]
    )
    assert (config.seed, config.optimizer.learning_rate, config.loss.name) == (3, 0.01, 'sigmoid')
    assert (config.keep_best, config.augment.flip) == (True, False)
    assert (config.image_size, config.model.resnet.units) == ((64, 32), (1, 2))
    assert config.transfer.take == ()


def test_field_that_refers_to_another_follows_it():
    """In configs/distill.py the image size of the teacher refers to the image size."""
    given = [f'--config={ROOT}/configs/distill.py', '--config.image_size=96']
    config = config_lib.checked(cli.read_config(given))
    assert config.teacher.image_size == config.image_size == (96, 96)
    config = cli.read_config([*given, '--config.teacher.image_size=64'])
    assert (config.image_size, config.teacher.image_size) == ((96,), (64,))


def test_override_does_not_change_its_argument():
    config = config_lib.base()
    assert cli.override(config, ['--config.seed=3']).seed == 3
    assert config.seed == 0


def test_empty_value_gives_an_empty_tuple():
    given = ['evals.fewshot.shots', 'loss.class_weights', 'teacher.image_size']
    config = cli.read_config([H14, *(f'--config.{name}=' for name in given)])
    assert (config.evals.fewshot.shots, config.loss.class_weights) == ((), ())
    config_lib.checked(config)


@pytest.mark.parametrize('field', ['optimizer.decay_names', 'transfer.take', 'trackers'])
def test_texts_are_split_at_commas(field):
    for arguments in (
        [f'--config.{field}=one,two'],
        [f'--config.{field}', 'one, two'],
        [f"--config.{field}=('one', 'two')"],
        [f"--config.{field}=('one,two',)"],
    ):
        config = cli.read_config([H14, *arguments])
        assert config_lib.flatten(config)[field] == ['one', 'two']


@pytest.mark.parametrize(
    'arguments',
    [
        ['--config.seed=1', '--config.seed', '2'],
        ['--config.seed=1', '--config.seed=1'],
        ['--config.keep_best', '--noconfig.keep_best'],
        ['--config.recipe=a', '--config.recipe=b'],
        ['--config.image_size=224', '--config.image_size', '288'],
        ['--config.optimizer.decay_names=a', '--config.optimizer.decay_names=b'],
    ],
)
def test_field_given_twice_is_refused(arguments):
    field = arguments[0].removeprefix('--config.').partition('=')[0]
    with refused('value', field=field):
        cli.read_config([H14, *arguments])


def test_message_of_a_field_given_twice():
    with refused('value', field='image_size', value='288') as error:
        cli.read_config([H14, '--config.image_size=224', '--config.image_size', '288'])
    assert str(error.value) == (
        'config.image_size is given twice, as --config.image_size=224 and '
        '--config.image_size=288: give it once, with all its values, as in '
        '--config.image_size=A,B.'
    )


def test_config_file_given_twice_is_refused():
    with refused('value', field='--config', value=QUICKSTART.removeprefix('--config=')):
        cli.read_config([H14, QUICKSTART])


@pytest.mark.parametrize('given', [['--workdir=a', '--workdir=b'], ['--step=1', '--step', '2']])
def test_option_given_twice_is_refused(given, capsys):
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    assert f'{given[0].partition("=")[0]} is given twice' in capsys.readouterr().err


def test_option_of_several_values_may_be_repeated():
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    options = parser.parse_args(['--workdir=a', '--model=gelu=erf', '--model=num_heads=2'])
    assert options.model == ['gelu=erf', 'num_heads=2']


@pytest.mark.parametrize(
    ('argument', 'suggestion'),
    [
        ('--config.seeed=1', 'seed'),
        ('--config.optimzer.learning_rate=1', 'optimizer.learning_rate'),
        ('--config.model.hiden_size=1', 'model.hidden_size'),
        ('--noconfig.augment.filp', 'augment.flip'),
        ('--config.lr=1e-3', 'optimizer.learning_rate?'),
        ('--config.wd=0.1', 'optimizer.weight_decay?'),
        ('--config.bs=8', 'batch_size?'),
        ('--config.epochs=8', 'num_epochs?'),
        ('--config.teacher=x', 'teacher.weights?'),
        ('--config.hidden_size=8', 'model.hidden_size?'),
        ('--pretrained=W', '--config.pretrained'),
        ('--lr=1e-3', '--config.optimizer.learning_rate?'),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(argument, suggestion):
    name = argument.partition('=')[0]
    field = name.rpartition('config.')[2]
    with refused('unknown', field=field) as error:
        cli.read_config([H14, argument])
    assert f'Did you mean {suggestion}' in str(error.value)


@pytest.mark.parametrize(
    ('config', 'argument', 'field'),
    [
        (H14.replace('h14', 'r50x1'), '--config.model.resnet.widht=1', 'model.resnet.widht'),
        (H14.replace('h14', 'r50x1'), '--config.depth=8', 'depth'),
        (QUICKSTART, '--config.model.resnet.units=1,2', 'model.resnet.units'),
        (H14, '--config.model.resnet=3', 'model.resnet'),
        (H14, '--noconfig.batch_size', '--noconfig.batch_size'),
        (H14, '--noconfig.augment.flip=1', '--noconfig.augment.flip=1'),
    ],
)
def test_field_of_another_model_or_form_is_refused(config, argument, field):
    with refused('unknown', field=field):
        cli.read_config([config, argument])


def test_message_of_an_unknown_field():
    with refused('unknown', field='lr') as error:
        cli.read_config([H14, '--config.lr=1e-3'])
    assert str(error.value) == (
        "this config has no field 'lr'. Did you mean optimizer.learning_rate? All fields are in "
        'docs/reference/config.md.'
    )


@pytest.mark.parametrize(
    ('argument', 'field', 'value'),
    [
        ('--config.batch_size=many', 'batch_size', 'many'),
        ('--config.batch_size=64,128', 'batch_size', '64,128'),
        ('--config.optimizer.learning_rate=0.1,0.2', 'optimizer.learning_rate', '0.1,0.2'),
        ('--config.keep_best=yes', 'keep_best', 'yes'),
        ('--config.image_size=a', 'image_size', 'a'),
    ],
)
def test_value_of_another_type_is_refused(argument, field, value):
    with refused('value', field=field, value=value) as error:
        cli.read_config([H14, argument])
    is_sweep = 'python -m vit_jax.sweep with the same options' in str(error.value)
    assert is_sweep == (',' in value)


@pytest.mark.parametrize(
    ('arguments', 'kind', 'attributes'),
    [
        ([H14, 'more'], 'unknown', {'value': 'more'}),
        ([H14, '--config.batch_size'], 'missing', {'field': 'batch_size'}),
        (['--config.seed=1'], 'missing', {'field': '--config'}),
        (
            [f'--config={ROOT}/configs/vti.py'],
            'missing',
            {'field': '--config', 'file': ROOT / 'configs/vti.py'},
        ),
        (
            [f'--config={ROOT}/configs/cifar10.py:conv'],
            'choice',
            {'field': 'the argument', 'value': 'conv'},
        ),
    ],
)
def test_mistakes(arguments, kind, attributes):
    with refused(kind, **attributes):
        cli.read_config(arguments)


def test_unknown_model_is_refused_with_the_nearest():
    with refused('unknown', field='model', value='h41') as error:
        cli.read_config([H14.replace('h14', 'h41')])
    assert 'Did you mean h4, h16, h14?' in str(error.value)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            '1 / 0',
            'line 1: ZeroDivisionError: division by zero. Expected a Python file with a function '
            'get_config',
        ),
        ('def get_config():\n    return depth', "line 2: NameError: name 'depth' is not defined"),
        ('def get_config(:', 'invalid syntax'),
        (
            "def get_config():\n    open('names.txt')",
            "line 2: FileNotFoundError: [Errno 2] No such file or directory: 'names.txt'.",
        ),
        (
            "open('names.txt')",
            "line 1: FileNotFoundError: [Errno 2] No such file or directory: 'names.txt'.",
        ),
        (
            "def get_config():\n    raise KeyError('mine') from ValueError('its cause')",
            "line 2: KeyError: 'mine'.",
        ),
        ('raise SystemError', 'line 1: SystemError: '),
    ],
)
def test_error_in_a_config_file_is_reported_with_its_line(text, message, tmp_path):
    (tmp_path / 'c.py').write_text(text)
    with refused('content', field='--config', file=tmp_path / 'c.py') as error:
        cli.read_config([f'--config={tmp_path}/c.py'])
    assert message in str(error.value)
    assert f'--config={tmp_path}/c.py: ' in str(error.value)


@pytest.mark.parametrize(
    ('line', 'kind', 'field'),
    [
        ('c.foo = 3', 'unknown', 'foo'),
        ('c.optimizer.learningrate = 9.0', 'unknown', 'optimizer.learningrate'),
        ('c.augment.mixUp = 1.0', 'unknown', 'augment.mixUp'),
        ('c.update(dict(num_step=3))', 'unknown', 'num_step'),
        ('c.preprocess.crop = 0.5', 'unknown', 'preprocess.crop'),
        ('c.lr = 1e-3', 'unknown', 'lr'),
        ('c.model.hiden_size = 8', 'unknown', 'model.hiden_size'),
        ('c.optimizer = dict(name="adam")', 'missing', 'optimizer.b1'),
        ('c.dataset = dict()', 'missing', 'dataset.balance'),
        ('del c.seed', 'missing', 'seed'),
        ('c.model = dict(hidden_size=8)', 'missing', 'model.attention'),
        ('c.model.resnet = dict(units=(1,))', 'missing', 'model.resnet.fixed_padding'),
        ('c.model.resnet = 50', 'missing', 'model.resnet.fixed_padding'),
    ],
)
def test_config_file_with_unknown_or_missing_fields_is_refused(line, kind, field, tmp_path):
    write_config(tmp_path / 'c.py', line)
    with refused(kind, field=field) as error:
        cli.read_config([f'--config={tmp_path}/c.py', '--config.num_steps=3'])
    assert str(error.value).startswith(f'the config of {tmp_path}/c.py ')


def write_config(path, line):
    """Writes a config file that changes its config `c` in one line."""
    path.write_text(
        'from vit_jax.config import base\ndef get_config():\n'
        f"    c = base('ti16')\n    {line}\n    return c"
    )


def test_message_of_missing_fields(tmp_path):
    write_config(tmp_path / 'c.py', 'c.optimizer = dict(name="adam")')
    with refused('missing', field='optimizer.b1') as error:
        cli.read_config([f'--config={tmp_path}/c.py'])
    assert str(error.value) == (
        f'the config of {tmp_path}/c.py is missing optimizer.b1, optimizer.b2, '
        'optimizer.clip_norm and 15 more: start from vit_jax.config.base() and change its fields, '
        'several fields of a section with config.SECTION.update(FIELD=VALUE).'
    )


@pytest.mark.parametrize(
    ('returned', 'type_name'),
    [('c.to_dict()', 'dict'), ('None', 'None'), ('FrozenConfigDict(c)', 'FrozenConfigDict')],
)
def test_config_file_must_return_a_config(returned, type_name, tmp_path):
    (tmp_path / 'c.py').write_text(
        'from ml_collections import FrozenConfigDict\n'
        'from vit_jax.config import base\ndef get_config():\n'
        f'    c = base()\n    return {returned}'
    )
    with refused('content', field='--config', file=tmp_path / 'c.py') as error:
        cli.read_config([f'--config={tmp_path}/c.py'])
    assert str(error.value) == (
        f'--config={tmp_path}/c.py: get_config returned {type_name}, expected a ConfigDict. '
        'Expected a Python file with a function get_config([ARGUMENT]) that returns '
        'vit_jax.config.base() with changes, like the files in configs/.'
    )


def test_config_file_may_lock_its_config(tmp_path):
    (tmp_path / 'c.py').write_text(
        "from vit_jax.config import base\ndef get_config():\n    return base('r50_b16').lock()"
    )
    assert cli.read_config([f'--config={tmp_path}/c.py', '--config.seed=3']).seed == 3


def test_config_file_without_arguments_refuses_one(tmp_path):
    (tmp_path / 'c.py').write_text('def get_config():\n    return None')
    with refused('content', file=tmp_path / 'c.py') as error:
        cli.read_config([f'--config={tmp_path}/c.py:b16'])
    assert 'get_config() takes 0 positional arguments' in str(error.value)


def test_config_that_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / 'pipe')  # opening it would wait forever
    for path in (tmp_path, tmp_path / 'pipe'):
        with refused('missing', field='--config', file=path):
            cli.read_config([f'--config={path}'])


def test_mistyped_option_of_the_command():
    parser = cli.make_parser('main', '')
    parser.add_argument('--workdir')
    with refused('unknown', field='--workdri') as error:
        cli.parse_with_config(parser, [H14, '--workdri=x'])
    assert 'no option --workdri. Did you mean --workdir' in str(error.value)


def test_hyphens_in_options_are_read_as_underscores():
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    assert parser.parse_args(['--workdir=a', '--allow-nonfinite']).allow_nonfinite
    assert parser.parse_args(['--workdir=a', '--allow_nonfinite']).allow_nonfinite


def test_every_alias_names_a_field():
    assert set(config_fields.ALIASES.values()) <= config_lib.all_fields().keys()


@pytest.mark.parametrize(
    ('given', 'meant'),
    [
        ('--workdri', '--workdir'),
        ('--work-dir', '--workdir'),
        ('--allow_nonfinit', '--allow_nonfinite'),
    ],
)
def test_mistyped_option_of_a_command_without_config(given, meant, capsys):
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f'{given}=x'])
    assert f'There is no option {given}. Did you mean {meant}' in capsys.readouterr().err


@pytest.mark.parametrize(
    'given', [['--workdir='], ['--workdir', ''], ['--workdir=x', '--classes=']]
)
def test_option_without_a_value_is_an_error(given, capsys):
    """An unset variable of the shell leaves an empty value."""
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    name = '--classes=' if len(given) > 1 and given[1] else given[0]
    assert f'{name} has no value: give it one, or leave the option out' in capsys.readouterr().err


def test_option_is_suggested_once(capsys):
    parser = cli.make_parser('evaluate', '')
    parser.add_argument('--few', help='as --few=5')
    with pytest.raises(SystemExit):
        parser.parse_args(['--fwe=3'])
    message = capsys.readouterr().err
    assert 'There is no option --fwe. Did you mean --few' in message
    assert message.count('--few') == 1


@pytest.mark.parametrize(
    ('config', 'workdir'),
    [
        ('configs/vit.py:b16', 'vit-b16'),
        ('quickstart.py', 'quickstart'),
        ('/a/finetune.py:ti16,directory', 'finetune-ti16-directory'),
        ('a.py:../../b', 'a-..-..-b'),
    ],
)
def test_default_workdir(config, workdir, caplog):
    assert cli.default_workdir(config) == f'runs/{workdir}'
    assert f'Using the workdir runs/{workdir}.' in caplog.text


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (UserError('seed is x.'), 'error: seed is x.'),
        (FileNotFoundError(2, 'No such file', 'x.csv'), "error: [Errno 2] No such file: 'x.csv'"),
        (
            ModuleNotFoundError("No module named 'tensorflow'", name='tensorflow'),
            "pip install -e '.[train]'",
        ),
        (KeyError('x'), 'stopped by an unexpected error'),
    ],
)
def test_error_becomes_a_message_and_an_exit_code(error, message, caplog):
    @cli.command
    def fail(_):
        raise error

    assert fail() == 1
    assert message in caplog.text


@pytest.mark.parametrize(
    ('error', 'expected', 'log'),
    [
        ("UserError('the disk is full.')", 1, 'error: the disk is full.\n'),
        ('KeyboardInterrupt', 130, 'Stopped by SIGINT (Ctrl-C).\n'),
    ],
)
def test_failed_command_exits_without_waiting_for_threads(error, expected, log, tmp_path):
    """Orbax has such threads after a full disk, and XLA has them during a compilation."""
    code = f"""
import concurrent.futures, threading
from vit_jax import cli
from vit_jax.errors import UserError
@cli.command
def main(argv):
    concurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait)
    raise {error}
cli.leave(main())
"""
    process = Forked([], tmp_path / 'log', code=code)
    try:
        assert process.wait(30) == expected
    finally:
        process.kill()
    assert (tmp_path / 'log').read_text().endswith(log)


def test_exit_codes_of_commands_without_errors():
    assert [cli.command(lambda code: code)(code) for code in (None, 143)] == [0, 143]


def test_commands_in_one_process_have_separate_logs(tmp_path):
    @cli.command
    def command(name):
        log_file.log_to(str(tmp_path / name))
        raise UserError(f'of {name}')

    own = logging.FileHandler(tmp_path / 'own')  # of the program that calls the commands
    LOGGER.addHandler(own)
    try:
        for name in ('one', 'two', 'one'):
            assert command(name) == 1
        assert own in LOGGER.handlers
    finally:
        LOGGER.removeHandler(own)
        own.close()
    assert [
        (tmp_path / name / 'train.log').read_text().count('of one') for name in ('one', 'two')
    ] == [2, 0]


def test_out_of_memory_message_has_advice(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda: jax.numpy.ones((10**6, 10**9)).at[0].set(0))()
    errors.report(error.value)
    assert 'error: out of memory: ' in caplog.text
    assert 'Lower the batch size' in caplog.text
    assert 'accum_steps' not in caplog.text  # advice for training only
    assert 'Traceback' not in caplog.text


@pytest.mark.parametrize('command', [predict, evaluate])
def test_weights_without_an_option_are_recognised(command, tmp_path, capsys):
    (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
    for given, meant in (
        (str(tmp_path / 'run'), 'workdir'),
        ('b16.npz', 'pretrained'),
        ('hf:google/vit', 'pretrained'),
    ):
        with pytest.raises(SystemExit):
            command.main([given, 'photo.jpg'])
        assert f'Did you mean --{meant}={given}?' in capsys.readouterr().err
