"""How the commands read configs and weights, and what they make of errors."""

import logging
import os
import sys

import jax
import pytest

from tests.support.forked import Forked
from tests.support.runs import ROOT
from vit_jax import cli, config_fields, errors, evaluate, predict
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.terminal import LOGGER
from vit_jax.workdir import log_file

QUICKSTART = f'--config={ROOT}/configs/quickstart.py'
H14 = f'--config={ROOT}/configs/vit.py:h14'


def test_reading_a_config_does_not_touch_the_process():
    argv = list(sys.argv)
    config = cli.read_config([H14, '--config.batch_size=8'])
    assert (config.batch_size, config.model.num_layers) == (8, 32)
    assert sys.argv == argv


def test_values_of_every_kind():
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


def test_a_field_that_refers_to_another_follows_it():
    """As the view of the teacher in configs/distill.py does."""
    given = [f'--config={ROOT}/configs/distill.py', '--config.image_size=96']
    config = config_lib.checked(cli.read_config(given))
    assert config.teacher.image_size == config.image_size == (96, 96)
    config = cli.read_config([*given, '--config.teacher.image_size=64'])
    assert (config.image_size, config.teacher.image_size) == ((96,), (64,))


def test_the_config_that_is_overridden_stays_as_it_is():
    config = config_lib.base()
    assert cli.override(config, ['--config.seed=3']).seed == 3
    assert config.seed == 0


def test_an_empty_value_empties_a_field_of_several():
    given = ['evals.fewshot.shots', 'loss.class_weights', 'teacher.image_size']
    config = cli.read_config([H14, *(f'--config.{name}=' for name in given)])
    assert (config.evals.fewshot.shots, config.loss.class_weights) == ((), ())
    config_lib.checked(config)


@pytest.mark.parametrize('field', ['optimizer.decay_names', 'transfer.take', 'trackers'])
def test_several_texts_are_split_at_commas(field):
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
def test_a_field_is_given_once(arguments):
    field = arguments[0].removeprefix('--config.').partition('=')[0]
    with pytest.raises(UserError, match=f'config.{field} is given twice'):
        cli.read_config([H14, *arguments])


def test_a_config_file_is_given_once():
    with pytest.raises(UserError, match='--config is given twice'):
        cli.read_config([H14, QUICKSTART])


@pytest.mark.parametrize('given', [['--workdir=a', '--workdir=b'], ['--step=1', '--step', '2']])
def test_an_option_of_one_value_is_given_once(given, capsys):
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    assert f'{given[0].partition("=")[0]} is given twice' in capsys.readouterr().err


def test_an_option_of_several_values_may_be_repeated():
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    options = parser.parse_args(['--workdir=a', '--model=gelu=erf', '--model=num_heads=2'])
    assert options.model == ['gelu=erf', 'num_heads=2']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([H14, '--config.seeed=1'], "no field 'seeed'. Did you mean seed"),
        (
            [H14, '--config.optimzer.learning_rate=1'],
            "no field 'optimzer.learning_rate'. Did you mean optimizer.learning_rate",
        ),
        ([H14, '--config.model.hiden_size=1'], 'Did you mean model.hidden_size'),
        (
            [H14.replace('h14', 'r50x1'), '--config.model.resnet.widht=1'],
            'Did you mean model.resnet.width',
        ),
        ([QUICKSTART, '--config.model.resnet.units=1,2'], "no field 'model.resnet.units'"),
        ([H14, '--noconfig.augment.filp'], 'Did you mean augment.flip'),
        (
            [H14, '--config.batch_size=many'],
            "batch_size is 'many': expected a whole number, at least 1",
        ),
        ([H14, '--pretrained=W'], 'no option --pretrained. Did you mean --config.pretrained'),
        (
            [H14, '--config.image_size=224', '--config.image_size', '288'],
            'config.image_size is given twice',
        ),
        ([H14, 'more'], "unexpected argument 'more'"),
        ([H14.replace('h14', 'h41')], "unknown model 'h41'. Did you mean h4, h16, h14"),
        ([f'--config={ROOT}/configs/vti.py'], f'no config file {ROOT}/configs/vti.py: '),
        ([H14, '--config.lr=1e-3'], "no field 'lr'. Did you mean optimizer.learning_rate?"),
        ([H14, '--lr=1e-3'], 'no option --lr. Did you mean --config.optimizer.learning_rate?'),
        ([H14, '--config.wd=0.1'], 'Did you mean optimizer.weight_decay?'),
        ([H14, '--config.bs=8'], 'Did you mean batch_size?'),
        ([H14, '--config.epochs=8'], 'Did you mean num_epochs?'),
        ([H14, '--config.teacher=x'], 'Did you mean teacher.weights?'),
        ([H14, '--config.hidden_size=8'], 'Did you mean model.hidden_size?'),
        ([H14.replace('h14', 'r50x1'), '--config.depth=8'], "no field 'depth'. "),
        (
            [H14, '--config.optimizer.learning_rate=0.1,0.2'],
            "optimizer.learning_rate is '0.1,0.2': expected a number, "
            'at least 1e-30 and at most 1e+30. To try several, '
            'python -m vit_jax.sweep takes the same options',
        ),
        ([H14, '--config.batch_size=64,128'], 'To try several, python -m vit_jax.sweep takes'),
        (
            [f'--config={ROOT}/configs/cifar10.py:conv'],
            "the argument is 'conv'. It is one of: hybrid, patches.",
        ),
        (['--config.seed=1'], 'add --config=FILE'),
        ([H14, '--config.batch_size'], '--config.batch_size has no value'),
        (
            [H14, '--noconfig.batch_size'],
            'no option --noconfig.batch_size: expected --config.batch',
        ),
        ([H14, '--noconfig.augment.flip=1'], 'no option --noconfig.augment.flip=1'),
        ([H14, '--config.keep_best=yes'], "keep_best is 'yes': expected True or False"),
        ([H14, '--config.image_size=a'], "image_size is 'a': expected one or two whole numbers"),
        ([H14, '--config.model.resnet=3'], "no field 'model.resnet'"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(UserError) as error:
        cli.read_config(arguments)
    assert message in str(error.value)


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
def test_a_config_file_that_raises(text, message, tmp_path):
    (tmp_path / 'c.py').write_text(text)
    with pytest.raises(UserError) as error:
        cli.read_config([f'--config={tmp_path}/c.py'])
    assert message in str(error.value)
    assert f'--config={tmp_path}/c.py: ' in str(error.value)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('c.foo = 3', "has no field 'foo'. All fields: docs/config.md."),
        (
            'c.optimizer.learningrate = 9.0',
            "no field 'optimizer.learningrate'. Did you mean optimizer.learning_rate",
        ),
        ('c.augment.mixUp = 1.0', "no field 'augment.mixUp'. Did you mean augment.mixup"),
        ('c.update(dict(num_step=3))', "no field 'num_step'. Did you mean num_steps"),
        (
            'c.preprocess.crop = 0.5',
            "no field 'preprocess.crop'. Did you mean preprocess.crop_ratio",
        ),
        ('c.lr = 1e-3', "no field 'lr'. Did you mean optimizer.learning_rate?"),
        ('c.model.hiden_size = 8', "no field 'model.hiden_size'. Did you mean model.hidden_size"),
        (
            'c.optimizer = dict(name="adam")',
            'lacks optimizer.b1, optimizer.b2, optimizer.clip_norm and '
            '15 more: start from vit_jax.config.base() and change fields of it, of a '
            'whole section by',
        ),
        ('c.dataset = dict()', 'lacks dataset.balance, '),
        ('del c.seed', 'lacks seed: start from'),
        ('c.model = dict(hidden_size=8)', 'lacks model.attention, '),
        ('c.model.resnet = dict(units=(1,))', 'lacks model.resnet.fixed_padding, '),
        ('c.model.resnet = 50', 'lacks model.resnet.fixed_padding, '),
    ],
)
def test_a_config_file_with_other_fields(line, message, tmp_path):
    (tmp_path / 'c.py').write_text(
        'from vit_jax.config import base\ndef get_config():\n'
        f"    c = base('ti16')\n    {line}\n    return c"
    )
    with pytest.raises(UserError) as error:
        cli.read_config([f'--config={tmp_path}/c.py', '--config.num_steps=3'])
    assert str(error.value).startswith(f'the config of {tmp_path}/c.py ')
    assert message in str(error.value)


@pytest.mark.parametrize(
    ('returned', 'said'),
    [('c.to_dict()', 'dict'), ('None', 'None'), ('FrozenConfigDict(c)', 'FrozenConfigDict')],
)
def test_a_config_file_that_returns_something_else(returned, said, tmp_path):
    (tmp_path / 'c.py').write_text(
        'from ml_collections import FrozenConfigDict\n'
        'from vit_jax.config import base\ndef get_config():\n'
        f'    c = base()\n    return {returned}'
    )
    with pytest.raises(UserError) as error:
        cli.read_config([f'--config={tmp_path}/c.py'])
    assert str(error.value) == (
        f'--config={tmp_path}/c.py: get_config returned {said}, and no ConfigDict. Expected a '
        'Python file with a function get_config([ARGUMENT]) that returns vit_jax.config.base() '
        'with changes, as those in configs/.'
    )


def test_a_config_file_may_lock_its_config(tmp_path):
    (tmp_path / 'c.py').write_text(
        "from vit_jax.config import base\ndef get_config():\n    return base('r50_b16').lock()"
    )
    assert cli.read_config([f'--config={tmp_path}/c.py', '--config.seed=3']).seed == 3


def test_an_argument_for_a_config_that_takes_none(tmp_path):
    (tmp_path / 'c.py').write_text('def get_config():\n    return None')
    with pytest.raises(UserError, match=r'get_config\(\) takes 0 positional arguments'):
        cli.read_config([f'--config={tmp_path}/c.py:b16'])


def test_a_config_that_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / 'pipe')  # would be waited for
    for path in (tmp_path, tmp_path / 'pipe'):
        with pytest.raises(UserError, match=f'no config file {path}: --config is a path from'):
            cli.read_config([f'--config={path}'])


def test_a_mistyped_option_of_the_command():
    parser = cli.make_parser('main', '')
    parser.add_argument('--workdir')
    with pytest.raises(UserError, match='no option --workdri. Did you mean --workdir'):
        cli.parse_with_config(parser, [H14, '--workdri=x'])


def test_aliases_name_fields():
    assert set(config_fields.ALIASES.values()) <= config_lib.all_fields().keys()


@pytest.mark.parametrize(
    ('given', 'meant'),
    [
        ('--workdri', '--workdir'),
        ('--work-dir', '--workdir'),
        ('--allow-nonfinit', '--allow-nonfinite'),
    ],
)
def test_a_mistyped_option_of_a_command_without_config(given, meant, capsys):
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f'{given}=x'])
    assert f'There is no option {given}. Did you mean {meant}' in capsys.readouterr().err


@pytest.mark.parametrize(
    'given', [['--workdir='], ['--workdir', ''], ['--workdir=x', '--classes=']]
)
def test_an_option_without_a_value_is_not_left_out_in_silence(given, capsys):
    """As of a shell's variable that is not set."""
    parser = cli.make_parser('evaluate', '')
    cli.add_weights_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    name = '--classes=' if len(given) > 1 and given[1] else given[0]
    assert f'{name} has no value: give it one, or leave the option out' in capsys.readouterr().err


def test_an_option_is_meant_once(capsys):
    parser = cli.make_parser('evaluate', '')
    parser.add_argument('--few', help='as --few=5')
    with pytest.raises(SystemExit):
        parser.parse_args(['--fwe=3'])
    said = capsys.readouterr().err
    assert 'There is no option --fwe. Did you mean --few' in said
    assert said.count('--few') == 1


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
    assert f'workdir runs/{workdir}, where the same command continues' in caplog.text


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (UserError('seed is x.'), 'error: seed is x.'),
        (FileNotFoundError(2, 'No such file', 'x.csv'), "error: [Errno 2] No such file: 'x.csv'"),
        (ModuleNotFoundError("No module named 'tensorflow'"), "pip install -e '.[train]'"),
        (KeyError('x'), 'stopped by an unexpected error'),
    ],
)
def test_an_error_is_a_message_and_a_code(error, message, caplog):
    @cli.command
    def fail(_):
        raise error

    assert fail() == 1
    assert message in caplog.text


@pytest.mark.parametrize(
    ('error', 'expected', 'said'),
    [
        ("UserError('the disk is full.')", 1, 'error: the disk is full.\n'),
        ('KeyboardInterrupt', 130, 'Stopped by SIGINT (Ctrl-C).\n'),
    ],
)
def test_what_is_cut_off_does_not_wait_for_threads(error, expected, said, tmp_path):
    """As Orbax has them after a checkpoint for which the disk had no room, and XLA compiling."""
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
    assert (tmp_path / 'log').read_text().endswith(said)


def test_codes_of_what_went_well():
    assert [cli.command(lambda code: code)(code) for code in (None, 143)] == [0, 143]


def test_commands_of_one_process_have_logs_of_their_own(tmp_path):
    @cli.command
    def command(name):
        log_file.log_to(str(tmp_path / name))
        raise UserError(f'of {name}')

    own = logging.FileHandler(tmp_path / 'own')  # of the program around them, which stays
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


def test_out_of_memory_says_what_to_do(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.jit(lambda: jax.numpy.ones((10**6, 10**9)).at[0].set(0))()
    errors.report(error.value)
    assert 'error: out of memory: ' in caplog.text
    assert 'Lower the batch size' in caplog.text
    assert 'accum_steps' not in caplog.text  # which is for commands that train
    assert 'Traceback' not in caplog.text


@pytest.mark.parametrize('command', [predict, evaluate])
def test_weights_without_their_option(command, tmp_path, capsys):
    (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
    for given, meant in (
        (str(tmp_path / 'run'), 'workdir'),
        ('b16.npz', 'pretrained'),
        ('hf:google/vit', 'pretrained'),
    ):
        with pytest.raises(SystemExit):
            command.main([given, 'photo.jpg'])
        assert f'Did you mean --{meant}={given}?' in capsys.readouterr().err
