"""The command as a user types it: exit codes and messages without a traceback."""

import subprocess

import pytest

from tests.support.runs import ROOT, arguments, check_message, command, environment, run_here


@pytest.mark.parametrize(('kwargs', 'message'), [
    ({'config': 'configs/vit.py:b61'}, "error: unknown model 'b61'. Did you mean b16"),
    ({'config': 'configs/vit.py:b16,imagnet21k'}, 'Did you mean imagenet21k'),
    ({'fields': {'optimzer.learning_rate': 1}},
     "error: this config has no field 'optimzer.learning_rate'. Did you mean optimizer.learning"),
    ({'fields': {'model.hiden_size': 1}},
     "error: this config has no field 'model.hiden_size'. Did you mean model.hidden_size"),
    ({'config': 'configs/vit.py:r50x1', 'fields': {'model.dropout_rate': 0.1}},
     "error: this config has no field 'model.dropout_rate'. "),
    ({'fields': {'model.resnet.units': '1,2'}},
     "error: this config has no field 'model.resnet.units'. "),
    ({'fields': {'dataset.name': '/nowhere/flowers'}}, "error: no directory '/nowhere/flowers'"),
    ({'fields': {'image_size': 15}}, 'image_size 15x15 is not divisible by patch_size 4x4. The '
                                     'nearest image sizes are 12x12 and 16x16'),
    ({'fields': {'dataset.name': 'cifar11', 'dataset.data_dir': '/nowhere'}}, 'cifar10'),
    ({'fields': {'dataset.name': 'cifar10', 'dataset.data_dir': '/nowhere'}},
     'tfds build cifar10 --data_dir=/nowhere'),
])
def test_bad_input(kwargs, message, run_main, tmp_path):
    check_message(run_main(tmp_path / 'run', **kwargs), message)


def test_missing_config_file(run_main, tmp_path):
    check_message(run_main(tmp_path / 'run', config='configs/vti.py'), 'error: no config file')


def test_workdir_that_is_a_file(run_main, tmp_path):
    (tmp_path / 'run').write_text('')
    check_message(run_main(tmp_path / 'run'),
                  f'error: --workdir {tmp_path}/run is a file: name a directory.')


def test_the_error_is_in_the_log_of_the_workdir_too(run_main, tmp_path):
    run_main(tmp_path, fields={'dataset.name': '/nowhere/flowers'})
    assert "error: no directory '/nowhere/flowers'" in (tmp_path / 'train.log').read_text()


def test_a_field_without_config_in_front(tmp_path):
    check_message(run_here(*arguments(tmp_path), '--pretrained=W'), (
        'error: there is no option --pretrained. Did you mean --config.pretrained'))


def test_a_repeated_tuple_is_refused(tmp_path):
    """And is not the rectangle 224x288."""
    result = run_here(*arguments(tmp_path), '--config.image_size=224', '--config.image_size=288')
    check_message(result, 'error: --config.image_size is given 2 times: give it once')


def test_as_a_user_types_it(tmp_path):
    """In processes of their own, unlike the others."""
    def run(*arguments):
        return subprocess.run([*command(tmp_path), *arguments], cwd=ROOT, text=True, timeout=300,
                              env=environment(as_a_user=True), capture_output=True, check=False)

    check_message(run('--config.dataset.name=/nowhere/flowers'),
                  "error: no directory '/nowhere/flowers'")
    result = run('--help')
    assert result.returncode == 0
    assert '--workdir' in result.stdout
