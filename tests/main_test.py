"""The command as a user types it: exit codes and messages without a traceback."""

import resource
import shlex
import subprocess

import pytest

from tests.support.datasets import write_images
from tests.support.runs import (
    ROOT,
    TINY,
    arguments,
    check_message,
    command,
    environment,
    run_here,
)
from vit_jax import cli, main
from vit_jax import config as config_lib
from vit_jax.training import accumulation, resolve, run_data
from vit_jax.workdir import lock


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'config': 'configs/vit.py:b61'}, "error: unknown model 'b61'. Did you mean b16"),
        ({'config': 'configs/vit.py:b16,imagnet21k'}, 'Did you mean imagenet21k'),
        (
            {'fields': {'optimzer.learning_rate': 1}},
            "error: this config has no field 'optimzer.learning_rate'. Did you mean "
            'optimizer.learning',
        ),
        (
            {'fields': {'model.hiden_size': 1}},
            "error: this config has no field 'model.hiden_size'. Did you mean model.hidden_size",
        ),
        (
            {'config': 'configs/vit.py:r50x1', 'fields': {'model.dropout_rate': 0.1}},
            "error: this config has no field 'model.dropout_rate'. ",
        ),
        (
            {'fields': {'model.resnet.units': '1,2'}},
            "error: this config has no field 'model.resnet.units'. ",
        ),
        (
            {'fields': {'dataset.name': '/nowhere/flowers'}},
            "error: no directory '/nowhere/flowers'",
        ),
        (
            {'fields': {'image_size': 15}},
            'image_size 15x15 is not divisible by patch_size 4x4. The '
            'nearest image sizes are 12x12 and 16x16',
        ),
        ({'fields': {'dataset.name': 'cifar11', 'dataset.data_dir': '/nowhere'}}, 'cifar10'),
        (
            {'fields': {'dataset.name': 'cifar10', 'dataset.data_dir': '/nowhere'}},
            "tfds.builder('cifar10', data_dir='/nowhere').download_and_prepare()",
        ),
    ],
)
def test_bad_input(kwargs, message, run_main, tmp_path):
    check_message(run_main(tmp_path / 'run', **kwargs), message)


def without_data(config, folder, monkeypatch):
    """The lines that a recipe prints on a machine without its data set."""
    monkeypatch.chdir(folder)
    result = run_here(f'--config={ROOT}/configs/{config}', '--config.dataset.data_dir=/nowhere')
    assert result.returncode == 1
    return result.stderr.splitlines()


def test_a_recipe_without_its_data_names_commands_that_run(tmp_path, monkeypatch):
    lines = without_data('vit.py:b16', tmp_path, monkeypatch)
    assert '  make quickstart' in lines
    assert any('--config.dataset.name=DATA' in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_data_that_the_user_named_are_not_replaced(run_main, tmp_path):
    fields = {'dataset.name': 'cifar11', 'dataset.data_dir': '/nowhere'}
    result = run_main(tmp_path / 'run', fields=fields)
    assert 'make quickstart' not in result.stderr
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_the_command_for_own_images_trains_on_a_small_folder(tmp_path, monkeypatch):
    """The command is pasted, with a smaller model and fewer steps."""
    lines = without_data('vit.py:b16', tmp_path, monkeypatch)
    command = next(line for line in lines if 'DATA ' in line and 'vit_jax.main' in line)
    for typed, small in (
        ('=DATA', f'={tmp_path}/data'),
        ('num_steps=1000', 'num_steps=20'),
        ('warmup_steps=100', 'warmup_steps=2'),
    ):
        assert typed in command
        command = command.replace(typed, small)
    command = command.replace(' --num_processes=1', '')  # run_here adds it again
    model = {name: TINY[name] for name in TINY if name.startswith('model.')}
    small = model | {'image_size': 16, 'model.patch_size': 4, 'model.representation_size': 0}
    write_images(tmp_path / 'data', ['ant', 'bee'], 12)
    result = run_here(
        *shlex.split(command)[3:], *(f'--config.{name}={small[name]}' for name in small)
    )
    assert result.returncode == 0, result.stderr
    assert 'done: 20 steps' in result.stderr


@pytest.mark.parametrize(
    'recipe',
    [
        'vit.py:b16',
        'vit.py:l16,imagenet21k',
        'plain.py:s16,300',
        'augreg.py:s16,imagenet2012,medium1',
        'masked.py:b16',
        'cifar10.py',
        'finetune.py:b16,cifar10',
        'bit.py:r50x1,cifar10',
        'bit_pretrain.py:r50x1',
    ],
)
def test_every_recipe_can_train_on_a_small_folder(recipe):
    config = cli.read_config([f'--config={ROOT}/configs/{recipe}'])
    changes = main.for_a_directory(config)
    arguments = [f'--config.{field}={value}' for field, value in changes.items()]
    changed = config_lib.checked(cli.override(config, arguments))
    complete = resolve.with_data(changed, num_examples=22, num_classes=2)
    assert config_lib.total_steps(complete) == 1000
    assert complete.batch_size == 16
    assert complete.dataset.name == 'DATA'


def test_a_batch_larger_than_the_training_split_is_refused(run_main, image_directory, tmp_path):
    fields = TINY | {'dataset.name': image_directory, 'batch_size': 64}
    check_message(
        run_main(tmp_path / 'run', fields=fields),
        'has 60 images: expected at most 60, as in --config.batch_size=32',
    )
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_run_that_started_with_a_larger_batch_resumes(
    run_main, image_directory, tmp_path, monkeypatch
):
    """Earlier versions started such runs."""
    fields = TINY | {'dataset.name': image_directory, 'image_size': 16, 'batch_size': 64}
    fields |= {'num_steps': 2, 'optimizer.warmup_steps': 1}
    with monkeypatch.context() as patch:
        patch.setattr(run_data, 'check_batch_size', lambda *_, **__: None)
        assert run_main(tmp_path, fields=fields).returncode == 0
    result = run_main(tmp_path, fields=fields | {'num_steps': 4})
    assert result.returncode == 0, result.stderr
    assert 'batch_size is 64, and dataset.train_split' in result.stderr
    assert 'done: 4 steps' in result.stderr


def test_missing_config_file(run_main, tmp_path):
    check_message(
        run_main(tmp_path / 'run', config='configs/vti.py:b16'),
        f'error: no config file {ROOT}/configs/vti.py. Expected a path relative to',
    )


def test_workdir_that_is_a_file(run_main, tmp_path):
    (tmp_path / 'run').write_text('')
    check_message(
        run_main(tmp_path / 'run'), f'error: --workdir {tmp_path}/run is a file: name a directory.'
    )


def test_a_workdir_among_the_photos_is_refused(tmp_path):
    write_images(tmp_path, ['ant', 'bee'], 2)
    check_message(
        run_here(*arguments(tmp_path / 'run', fields={'dataset.name': tmp_path})),
        f'error: --workdir {tmp_path}/run is in {tmp_path}, whose folders dataset.na',
    )
    assert not (tmp_path / 'run').exists()


def test_the_error_is_also_in_the_log_of_the_workdir(run_main, tmp_path):
    run_main(tmp_path, fields={'dataset.name': '/nowhere/flowers'})
    assert "error: no directory '/nowhere/flowers'" in (tmp_path / 'train.log').read_text()


def test_a_field_without_the_prefix_config(tmp_path):
    check_message(
        run_here(*arguments(tmp_path), '--pretrained=W'),
        ('error: there is no option --pretrained. Did you mean --config.pretrained'),
    )


def test_a_repeated_tuple_is_refused(tmp_path):
    """The two values do not become the rectangle 224x288."""
    result = run_here(*arguments(tmp_path), '--config.image_size=224', '--config.image_size=288')
    check_message(result, 'error: config.image_size is given twice')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (
            {'num_steps': 60},
            'optimizer.warmup_steps is 80: expected fewer than the 60 steps of the run. Train '
            'longer, or warm up for less, as in --config.optimizer.warmup_steps=6',
        ),
        ({'num_steps': -5}, 'num_steps is -5: expected a whole number, at least 0.'),
        ({'preprocess.crop_ratio': 'inf'}, 'preprocess.crop_ratio is inf: expected a number, at'),
        ({'seed': 10**21}, 'seed is 1000000000000000000000: expected a whole number of 64 bits.'),
        (
            {'image_size': 10**9},
            'image_size is [1000000000, 1000000000]: expected one or two whole',
        ),
        (
            {'optimizer.weight_decay': 'nan'},
            'optimizer.weight_decay is nan: expected a number',
        ),
        (
            {'optimizer.learning_rate': '0.1,0.2'},
            'use python -m vit_jax.sweep with the same options',
        ),
        ({'lr': 0.1}, "no field 'lr'. Did you mean optimizer.learning_rate?"),
    ],
)
def test_a_refused_config_leaves_no_workdir(fields, message, run_main, tmp_path):
    check_message(
        run_main(tmp_path / 'run', fields=fields),
        f'error: {message}' if (message.startswith(tuple(fields))) else message,
    )
    assert not (tmp_path / 'run').exists()


def test_a_batch_of_images_that_does_not_fit_is_refused(run_main, tmp_path):
    check_message(
        run_main(tmp_path, fields={'batch_size': 32, 'image_size': 40_960}),
        'error: a batch of images needs 644 GB of a device, and ',
    )


@pytest.mark.parametrize(
    ('gigabytes', 'message'),
    [
        (
            0.00015,
            'error: the state of a training step (parameters, their gradients, optimizer state and '
            'the batch) needs 0.000',
        ),
        (0.02, 'error: a training step needs 0.0'),
    ],
)
def test_a_step_that_does_not_fit_is_refused_before_it_runs(
    gigabytes, message, run_main, tmp_path, monkeypatch
):
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: gigabytes * 1e9)
    check_message(run_main(tmp_path, fields=TINY), message)
    assert not list(tmp_path.glob('checkpoints/*'))


def test_too_little_address_space(run_main, tmp_path, monkeypatch):
    """With ulimit -v 3500000 TensorFlow would abort without a message."""
    monkeypatch.setattr(resource, 'getrlimit', lambda _: (3_584_000_000, -1))
    check_message(
        run_main(tmp_path / 'run'), 'GB of address space, and the limit is 3.58 GB: raise it'
    )
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_without_workdir_the_config_names_it(tmp_path, monkeypatch):
    """The same command resumes there."""
    monkeypatch.chdir(tmp_path)
    argv = [a for a in arguments('-', **TINY | {'num_steps': 6}) if not a.startswith('--workdir')]
    lines = [run_here(*argv).stderr.splitlines() for _ in range(2)]
    assert (
        lines[0][0]
        == lines[1][0]
        == (
            'Using the workdir runs/quickstart. The same command resumes the run; --workdir=DIR '
            'chooses another directory'
        )
    )
    assert 'the run is complete at step 6' in lines[1][-1]
    assert (tmp_path / 'runs/quickstart/checkpoints/6').is_dir()


def test_help_has_every_field():
    text = run_here('--help').stdout
    assert all(f'--config.{field}=' in text for field in config_lib.all_fields())


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path):
    """These commands run in separate processes, unlike in other tests."""

    def run(*arguments):
        return subprocess.run(
            [*command(tmp_path), *arguments],
            cwd=ROOT,
            text=True,
            timeout=300,
            env=environment(as_a_user=True),
            capture_output=True,
            check=False,
        )

    check_message(
        run('--config.dataset.name=/nowhere/flowers'), "error: no directory '/nowhere/flowers'"
    )
    result = run('--help')
    assert result.returncode == 0
    assert '--workdir' in result.stdout


def test_a_start_that_is_refused_writes_nothing_into_the_log_of_the_run(run_main, tmp_path):
    (tmp_path / 'train.log').write_text('line of the running process\n')
    with lock.reserve(str(tmp_path)):
        result = run_main(tmp_path)
    check_message(result, f'another process is training in {tmp_path}')
    assert (tmp_path / 'train.log').read_text() == 'line of the running process\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['.lock', 'train.log']
