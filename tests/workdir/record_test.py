import json
import logging

import pytest

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.workdir import record

CLASSES = ('ant', 'bee')


def run_config(**fields):
    config = config_lib.base()
    config.num_steps = 10
    config.update_from_flattened_dict({k.replace('__', '.'): v for k, v in fields.items()})
    return config_lib.complete(config_lib.checked(config), 50, 2)


def go_on(tmp_path, classes=CLASSES, **fields):
    """Begins a run that saves something, or continues the one that is there."""
    config, begun = run_config(**fields), record.begun(tmp_path)
    if begun:
        record.require_same_run(str(tmp_path), begun, config, classes)
    record.write(str(tmp_path), config, classes)
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True, exist_ok=True)
    return config


def test_keeps_config_and_classes(tmp_path):
    go_on(tmp_path, seed=3)
    config, classes = record.read(str(tmp_path))
    assert config['seed'] == 3
    assert config['dataset']['num_examples'] == 50
    assert classes == list(CLASSES)


def test_another_config_is_refused_with_what_differs(tmp_path):
    go_on(tmp_path)
    with pytest.raises(UserError) as error:
        go_on(tmp_path, seed=4, model__dropout_rate=0.5)
    assert 'holds a run of another config' in str(error.value)
    assert str(error.value).endswith('\n  model.dropout_rate: 0.0 in the workdir, 0.5 now'
                                     '\n  seed: 0 in the workdir, 4 now')


def test_fields_that_cannot_matter_may_differ(tmp_path):
    go_on(tmp_path)
    go_on(tmp_path, log_every=7, eval_every=3, checkpoint_every=2, num_steps=20,
          keep_checkpoints=9, mesh__data=2, dataset__data_dir='/elsewhere')


def test_data_directory_may_move_but_not_be_another(tmp_path):
    go_on(tmp_path, dataset__name='/here/flowers/')
    go_on(tmp_path, dataset__name='/there/flowers')
    with pytest.raises(UserError, match="dataset.name: '/there/flowers' in the workdir"):
        go_on(tmp_path, dataset__name='/there/clothes')


def test_another_accumulation_than_was_chosen_is_refused(tmp_path):
    go_on(tmp_path, accum_steps=4)
    with pytest.raises(UserError, match='accum_steps: 4 in the workdir, 2 now'):
        go_on(tmp_path, accum_steps=2)


@pytest.mark.parametrize(('classes', 'message'), [
    (('ant', 'cat'), "classes: number 1 is 'bee' in the workdir, 'cat' in the data now"),
    (('ant', 'bee', 'cat'), 'classes: 2 in the workdir, 3 in the data now')])
def test_other_classes_are_refused(classes, message, tmp_path):
    go_on(tmp_path)
    with pytest.raises(UserError, match=message):
        go_on(tmp_path, classes)


@pytest.mark.parametrize(('content', 'message'), [
    ('{"seed"', 'config.json cannot be read'),
    ('[1]', r'config.json holds \[1\], expected an object')])
def test_damaged_record(content, message, tmp_path):
    go_on(tmp_path)
    (tmp_path / 'config.json').write_text(content)
    with pytest.raises(UserError, match=message):
        go_on(tmp_path)


def test_no_directory_can_be_made(tmp_path):
    (tmp_path / 'file').write_text('')
    for path, message in [('file', 'is a file'), ('file/lr=0.1', 'is below a file')]:
        with pytest.raises(UserError, match=f'--workdir .*{path} {message}: name a directory'):
            record.lock(str(tmp_path / path))


def test_one_process_at_a_time(tmp_path):
    held = record.lock(str(tmp_path / 'new'))
    with pytest.raises(UserError, match='another process is training in'):
        record.lock(str(tmp_path / 'new'))
    held.close()
    record.lock(str(tmp_path / 'new')).close()


def test_a_workdir_in_which_nothing_was_saved_may_be_taken_over(tmp_path):
    go_on(tmp_path)
    (tmp_path / 'checkpoints' / '5').rmdir()
    assert record.begun(str(tmp_path)) is None
    assert go_on(tmp_path, seed=4).seed == 4


def test_a_new_length_is_said(tmp_path, caplog):
    go_on(tmp_path)
    go_on(tmp_path, num_steps=20)
    assert 'num_steps was 10 and is now 20: the learning-rate schedule changes' in caplog.text


def test_finds_a_workdir_and_its_checkpoints(tmp_path):
    go_on(tmp_path)
    assert record.find(str(tmp_path)) == (str(tmp_path), None)
    assert record.find(str(tmp_path / 'checkpoints' / '5')) == (str(tmp_path), 5)
    assert record.find(str(tmp_path / 'checkpoints')) is None
    assert record.find(str(tmp_path / 'checkpoints' / '6')) is None


def test_log_lines_go_to_the_workdir(tmp_path):
    handler = record.log_to(str(tmp_path / 'run'))
    logging.getLogger('vit_jax').warning('%d steps', 3)
    logging.getLogger('vit_jax').removeHandler(handler)
    handler.close()
    assert (tmp_path / 'run' / 'train.log').read_text().endswith(' WARNING 3 steps\n')


def test_a_json_file_is_written_whole(tmp_path):
    record.write_json(str(tmp_path / 'x.json'), {'a': [1, 2]})
    with pytest.raises(TypeError):
        record.write_json(str(tmp_path / 'x.json'), {'a': object()})
    assert json.loads((tmp_path / 'x.json').read_text()) == {'a': [1, 2]}
