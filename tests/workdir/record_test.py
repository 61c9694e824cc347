import json

import pytest

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.workdir import record as workdir

CLASSES = ('ant', 'bee')


def settled(**fields):
    config = config_lib.base()
    config.num_steps = 10
    for name, value in fields.items():
        config.update_from_flattened_dict({name.replace('__', '.'): value})
    return config_lib.settle(config, 50, 2)


def claim(tmp_path, classes=CLASSES, **fields):
    """Begins or continues a run that has saved something."""
    config = workdir.claim(str(tmp_path), settled(**fields), classes)
    workdir.record(str(tmp_path), config, classes)
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True, exist_ok=True)
    return config


def test_records_config_and_classes(tmp_path):
    claim(tmp_path, seed=3)
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['seed'] == 3
    assert config['dataset']['num_examples'] == 50
    assert json.loads((tmp_path / 'classes.json').read_text()) == list(CLASSES)


def test_another_config_is_refused_with_what_differs(tmp_path):
    claim(tmp_path)
    with pytest.raises(UserError) as error:
        claim(tmp_path, seed=4, model__dropout_rate=0.5)
    assert 'holds a run of another config' in str(error.value)
    assert str(error.value).endswith('\n  model.dropout_rate: 0.0 in the workdir, 0.5 now'
                                     '\n  seed: 0 in the workdir, 4 now')


def test_fields_that_cannot_matter_may_differ(tmp_path):
    claim(tmp_path)
    claim(tmp_path, log_every=7, eval_every=3, checkpoint_every=2, num_steps=20, keep_checkpoints=9,
          mesh__data=2, dataset__data_dir='/elsewhere')


def test_data_directory_may_move_but_not_be_another(tmp_path):
    claim(tmp_path, dataset__name='/here/flowers/')
    claim(tmp_path, dataset__name='/there/flowers')
    with pytest.raises(UserError, match="dataset.name: '/there/flowers' in the workdir"):
        claim(tmp_path, dataset__name='/there/clothes')


def test_automatic_accumulation_keeps_what_was_chosen(tmp_path):
    config = claim(tmp_path, accum_steps=0)
    config.accum_steps = 4
    workdir.record(str(tmp_path), config, CLASSES)
    assert claim(tmp_path, accum_steps=0).accum_steps == 4
    with pytest.raises(UserError, match='accum_steps: 4 in the workdir, 2 now'):
        claim(tmp_path, accum_steps=2)


@pytest.mark.parametrize(('classes', 'message'), [
    (('ant', 'cat'), "classes: number 1 is 'bee' in the workdir, 'cat' in the data now"),
    (('ant', 'bee', 'cat'), 'classes: 2 in the workdir, 3 in the data now')])
def test_other_classes_are_refused(classes, message, tmp_path):
    claim(tmp_path)
    with pytest.raises(UserError, match=message):
        claim(tmp_path, classes)


def test_damaged_record(tmp_path):
    claim(tmp_path)
    (tmp_path / 'config.json').write_text('{"seed"')
    with pytest.raises(UserError, match='config.json cannot be read'):
        claim(tmp_path)


def test_no_directory_can_be_made(tmp_path):
    (tmp_path / 'file').write_text('')
    for path, message in [('file', 'is a file'), ('file/lr=0.1', 'is below a file')]:
        with pytest.raises(UserError, match=f'--workdir .*{path} {message}: name a directory'):
            workdir.lock(str(tmp_path / path))


def test_one_process_at_a_time(tmp_path):
    held = workdir.lock(str(tmp_path / 'new'))
    with pytest.raises(UserError, match='another process is training in'):
        workdir.lock(str(tmp_path / 'new'))
    held.close()
    workdir.lock(str(tmp_path / 'new')).close()


def test_a_workdir_in_which_nothing_was_saved_may_be_taken_over(tmp_path):
    claim(tmp_path)
    (tmp_path / 'checkpoints' / '5').rmdir()
    assert claim(tmp_path, seed=4).seed == 4


def test_a_new_length_is_said(tmp_path, caplog):
    claim(tmp_path)
    claim(tmp_path, num_steps=20)
    assert 'num_steps was 10 and is now 20: the learning-rate schedule changes' in caplog.text
