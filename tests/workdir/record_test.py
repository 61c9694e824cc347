import json

import pytest

from tests.support.datasets import write_images
from tests.support.errors import refused
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.files import write_json
from vit_jax.training import resolve
from vit_jax.workdir import record

CLASSES = ('ant', 'bee')


def run_config(**fields):
    config = config_lib.base()
    config.num_steps = 10
    config.update_from_flattened_dict({k.replace('__', '.'): v for k, v in fields.items()})
    return resolve.with_data(resolve.checked(config), 50, 2)


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
    lines = ['model.dropout_rate: 0.0 in the workdir, 0.5 now', 'seed: 0 in the workdir, 4 now']
    with refused(kind='conflict', file=tmp_path, value=lines) as error:
        go_on(tmp_path, seed=4, model__dropout_rate=0.5)
    assert str(error.value) == (
        f'{tmp_path} holds a run of another config. Take another --workdir, or make these fields '
        'equal:\n  ' + '\n  '.join(lines)
    )


def test_fields_that_cannot_matter_may_differ(tmp_path):
    go_on(tmp_path)
    go_on(
        tmp_path,
        log_every=7,
        eval_every=3,
        checkpoint_every=2,
        num_steps=20,
        keep_checkpoints=9,
        mesh__data=2,
        dataset__data_dir='/elsewhere',
    )


def test_data_directory_may_move_but_not_be_another(tmp_path):
    go_on(tmp_path, dataset__name='/here/flowers/')
    go_on(tmp_path, dataset__name='/there/flowers')
    lines = ["dataset.name: '/there/flowers' in the workdir, '/there/clothes' now"]
    with refused(kind='conflict', file=tmp_path, value=lines):
        go_on(tmp_path, dataset__name='/there/clothes')


def test_another_accumulation_than_was_chosen_is_refused(tmp_path):
    go_on(tmp_path, accum_steps=4)
    with refused(kind='conflict', value=['accum_steps: 4 in the workdir, 2 now']):
        go_on(tmp_path, accum_steps=2)


@pytest.mark.parametrize(
    ('classes', 'line'),
    [
        (('ant', 'cat'), "classes: number 1 is 'bee' in the workdir, 'cat' in the data now"),
        (('ant', 'bee', 'cat'), 'classes: 2 in the workdir, 3 in the data now'),
    ],
)
def test_other_classes_are_refused(classes, line, tmp_path):
    go_on(tmp_path)
    with refused(kind='conflict', file=tmp_path, value=[line]):
        go_on(tmp_path, classes)


def test_a_class_in_another_unicode_normalisation_is_refused_and_explained(tmp_path):
    go_on(tmp_path, ('bar', 'caf\u00e9'))
    with refused(kind='conflict', file=tmp_path) as error:
        go_on(tmp_path, ('bar', 'cafe\u0301'))
    assert 'differ in Unicode normalisation only (NFC and NFD)' in str(error.value)
    assert r"is 'caf\xe9' in the workdir and 'cafe\u0301' in the data now" in str(error.value)


@pytest.mark.parametrize('content', ['{"architectures": ["ViTForImageClassification"]}', 'x', '3'])
def test_the_config_of_another_program_is_not_replaced(content, tmp_path):
    path = tmp_path / 'config.json'
    path.write_text(content)
    with refused(kind='conflict', file=path):
        record.begun(str(tmp_path))
    assert path.read_text() == content


def test_a_run_that_has_saved_nothing_may_be_another(tmp_path):
    record.write(str(tmp_path), run_config(), CLASSES)
    assert record.begun(str(tmp_path)) is None


@pytest.mark.parametrize('name', ['sweep.json', 'vtab.json'])
def test_one_run_and_several_do_not_share_a_directory(name, tmp_path):
    record.require_no_run(str(tmp_path))
    (tmp_path / name).write_text('{}')
    with refused(kind='conflict', file=tmp_path / name):
        record.begun(str(tmp_path))
    (tmp_path / 'run').mkdir()
    go_on(tmp_path / 'run')
    with refused(kind='conflict', file=tmp_path / 'run/config.json'):
        record.require_no_run(str(tmp_path / 'run'))


@pytest.mark.parametrize(
    ('photos', 'workdir', 'split', 'folder'),
    [
        ('.', '.', 'train[:90%]', '.'),
        ('.', 'run', 'train', '.'),
        ('.', 'ant/run', 'train', '.'),
        ('train', '.', 'train', ''),
        ('train', 'run', 'train[:90%]', ''),
        ('train', 'run', 'train+more', ''),
        ('train', 'train/run', 'train', 'train'),
        ('train', 'link', 'train', 'train'),
        ('.', '../run', 'train', ''),
    ],
)
def test_a_run_is_not_among_its_photos(photos, workdir, split, folder, tmp_path):
    data = tmp_path / 'data'
    write_images(data / photos, ['ant', 'bee'], 1)
    (data / 'link').symlink_to(data / 'train' / 'run')
    dataset = run_config(dataset__name=str(data), dataset__train_split=split).dataset
    workdir = str(data / workdir)
    if not folder:
        record.require_apart(workdir, dataset)
        return
    with refused(kind='conflict', field='--workdir', file=(data / folder).resolve()):
        record.require_apart(workdir, dataset)


@pytest.mark.parametrize('name', ['cifar10', 'digits', 'gs://bucket/photos', ''])
def test_the_name_of_a_data_set_is_no_place(name, tmp_path, monkeypatch):
    """A directory named as a TFDS set would be taken for it; one named digits never is."""
    monkeypatch.chdir(tmp_path)
    dataset = run_config(dataset__name=name).dataset
    record.require_apart('run', dataset)
    (tmp_path / 'digits').mkdir()
    record.require_apart('digits', dataset)
    if name == 'cifar10':
        with refused(kind='conflict', field='--workdir'):
            record.require_apart('cifar10', dataset)


def damage(path, how):
    path.unlink()
    if how == 'directory':
        path.mkdir()
    elif how == 'device':
        path.symlink_to('/dev/zero')
    elif how != 'missing':
        path.write_bytes(how)


@pytest.mark.parametrize(
    ('name', 'how', 'kind'),
    [
        ('config.json', b'{"seed": ', 'unreadable'),
        ('config.json', b'[1]', 'content'),
        ('config.json', b'{}', 'content'),
        ('config.json', b'{"model": 3}', 'content'),
        ('config.json', 'directory', 'unreadable'),
        ('config.json', 'device', 'unreadable'),
        ('config.json', 'missing', 'unreadable'),
        ('classes.json', b'["ant', 'unreadable'),
        ('classes.json', b'{}', 'content'),
        ('classes.json', b'[1]', 'content'),
        ('classes.json', b'["\xe9"]', 'unreadable'),
        ('classes.json', 'device', 'unreadable'),
        ('classes.json', 'missing', 'unreadable'),
    ],
)
def test_a_damaged_file_is_named(name, how, kind, tmp_path):
    """Every kind of damage to a JSON file is in tests/files_test.py."""
    go_on(tmp_path)
    damage(tmp_path / name, how)
    with refused(kind=kind, file=tmp_path / name) as error:
        go_on(tmp_path, seed=4)
    assert 'restore the file' in str(error.value)


@pytest.mark.parametrize('field', ['model', 'dataset', 'preprocess', 'optimizer'])
def test_a_section_that_is_none_is_named(field, tmp_path):
    go_on(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    write_json(str(tmp_path / 'config.json'), config | {field: [1]})
    with refused(kind='content', file=tmp_path / 'config.json', field=field, value=[1]):
        record.read(str(tmp_path))


@pytest.mark.parametrize(
    ('section', 'values', 'kind'),
    [
        ('loss', {'pabel_smoothing': 0.1}, 'unknown'),
        ('loss', {'label_smoothing': 'x'}, 'value'),
        ('dataset', {'name': {'x': 1}}, 'unknown'),
        ('preprocess', {'std': [0, 0, 0]}, 'value'),
        ('model', {'unroll': 'x'}, 'value'),
        ('model', {'attention_kernel': 'flash'}, 'choice'),
        ('model', {'remat_policy': 'all'}, 'choice'),
    ],
)
def test_a_field_that_cannot_be_is_named(section, values, kind, tmp_path):
    go_on(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    write_json(str(path), config | {section: config[section] | values})
    ((name, value),) = values.items()
    field = f'{section}.{name}'
    if isinstance(value, dict):  # in place of a value: its own names are no fields
        field += '.x'
    with refused(kind=kind, file=path, field=field):
        record.read(str(tmp_path))


def test_the_message_on_a_recorded_field_says_what_to_do(tmp_path):
    go_on(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    write_json(str(path), config | {'loss': config['loss'] | {'pabel_smoothing': 0.1}})
    with pytest.raises(UserError) as error:
        record.read(str(tmp_path))
    assert str(error.value) == (
        f'{path}: loss.pabel_smoothing is not a field. Did you mean loss.label_smoothing? '
        'Restore the file.'
    )


def test_a_file_in_place_of_the_directory_of_checkpoints_is_named(tmp_path):
    (tmp_path / 'checkpoints').write_text('')
    with refused(kind='unreadable', file=tmp_path / 'checkpoints'):
        record.begun(str(tmp_path))


def test_the_leftover_of_a_first_save_is_no_run(tmp_path):
    (tmp_path / 'checkpoints' / '5.orbax-checkpoint-tmp').mkdir(parents=True)
    assert record.begun(str(tmp_path)) is None


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


def test_folders_whose_names_are_digits_of_other_kinds_are_not_checkpoints(tmp_path):
    for name in ('12', '0', '²', '٣', '007', '-1', 'bad-3', '1.0'):
        (tmp_path / 'checkpoints' / name).mkdir(parents=True)
    assert sorted(record.saved_steps(str(tmp_path / 'checkpoints'))) == [0, 12]
    assert record.find(str(tmp_path / 'checkpoints' / '12')) == (str(tmp_path), 12)
    for name in ('²', '٣', '007'):
        assert record.find(str(tmp_path / 'checkpoints' / name)) is None
