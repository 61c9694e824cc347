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
    return resolve.with_data(config_lib.checked(config), 50, 2)


def start_or_resume(tmp_path, classes=CLASSES, **fields):
    """Starts a run that saves a checkpoint, or resumes the run in tmp_path."""
    config = run_config(**fields)
    begun = record.begun(tmp_path)
    if begun:
        record.require_same_run(str(tmp_path), begun, config, classes)
    record.write(str(tmp_path), config, classes)
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True, exist_ok=True)
    return config


def test_config_and_classes_are_read_as_written(tmp_path):
    start_or_resume(tmp_path, seed=3)
    config, classes = record.read(str(tmp_path))
    assert config['seed'] == 3
    assert config['dataset']['num_examples'] == 50
    assert classes == list(CLASSES)


def test_another_config_is_refused_with_its_differences(tmp_path):
    start_or_resume(tmp_path)
    lines = ['model.dropout_rate: 0.0 in the workdir, 0.5 now', 'seed: 0 in the workdir, 4 now']
    with refused(kind='conflict', file=tmp_path, value=lines) as error:
        start_or_resume(tmp_path, seed=4, model__dropout_rate=0.5)
    assert str(error.value) == (
        f'{tmp_path} contains a run of another config. Use another --workdir, or make these fields '
        'equal:\n  ' + '\n  '.join(lines)
    )


def test_fields_that_do_not_affect_the_result_may_differ(tmp_path):
    start_or_resume(tmp_path)
    start_or_resume(
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
    start_or_resume(tmp_path, dataset__name='/here/flowers/')
    start_or_resume(tmp_path, dataset__name='/there/flowers')
    lines = ["dataset.name: '/there/flowers' in the workdir, '/there/clothes' now"]
    with refused(kind='conflict', file=tmp_path, value=lines):
        start_or_resume(tmp_path, dataset__name='/there/clothes')


def test_another_accum_steps_is_refused(tmp_path):
    start_or_resume(tmp_path, accum_steps=4)
    with refused(kind='conflict', value=['accum_steps: 4 in the workdir, 2 now']):
        start_or_resume(tmp_path, accum_steps=2)


@pytest.mark.parametrize(
    ('classes', 'line'),
    [
        (('ant', 'cat'), "classes: number 1 is 'bee' in the workdir, 'cat' in the data now"),
        (('ant', 'bee', 'cat'), 'classes: 2 in the workdir, 3 in the data now'),
    ],
)
def test_other_classes_are_refused(classes, line, tmp_path):
    start_or_resume(tmp_path)
    with refused(kind='conflict', file=tmp_path, value=[line]):
        start_or_resume(tmp_path, classes)


def test_class_in_another_unicode_normalisation_is_refused(tmp_path):
    start_or_resume(tmp_path, ('bar', 'caf\u00e9'))
    with refused(kind='conflict', file=tmp_path) as error:
        start_or_resume(tmp_path, ('bar', 'cafe\u0301'))
    assert 'differ only in Unicode normalisation' in str(error.value)
    assert r"is 'caf\xe9' in the workdir and 'cafe\u0301' in the data now" in str(error.value)


@pytest.mark.parametrize('content', ['{"architectures": ["ViTForImageClassification"]}', 'x', '3'])
def test_config_of_another_program_is_not_replaced(content, tmp_path):
    path = tmp_path / 'config.json'
    path.write_text(content)
    with refused(kind='conflict', file=path):
        record.begun(str(tmp_path))
    assert path.read_text() == content


def test_config_without_a_checkpoint_is_no_run(tmp_path):
    record.write(str(tmp_path), run_config(), CLASSES)
    assert record.begun(str(tmp_path)) is None


@pytest.mark.parametrize('name', ['sweep.json', 'vtab.json'])
def test_one_run_and_several_do_not_share_a_directory(name, tmp_path):
    record.require_no_run(str(tmp_path))
    (tmp_path / name).write_text('{}')
    with refused(kind='conflict', file=tmp_path / name):
        record.begun(str(tmp_path))
    (tmp_path / 'run').mkdir()
    start_or_resume(tmp_path / 'run')
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
def test_workdir_in_the_image_folder_is_refused(photos, workdir, split, folder, tmp_path):
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
def test_name_of_a_data_set_is_no_image_folder(name, tmp_path, monkeypatch):
    """A directory named like a TFDS set would be the image folder; one named digits never is."""
    monkeypatch.chdir(tmp_path)
    dataset = run_config(dataset__name=name).dataset
    record.require_apart('run', dataset)
    (tmp_path / 'digits').mkdir()
    record.require_apart('digits', dataset)
    if name == 'cifar10':
        with refused(kind='conflict', field='--workdir'):
            record.require_apart('cifar10', dataset)


def damage(path, content):
    """Replaces a file by bytes, or by a 'directory', a 'device' or nothing ('missing')."""
    path.unlink()
    if content == 'directory':
        path.mkdir()
    elif content == 'device':
        path.symlink_to('/dev/zero')
    elif content != 'missing':
        path.write_bytes(content)


@pytest.mark.parametrize(
    ('name', 'content', 'kind'),
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
def test_damaged_file_is_refused(name, content, kind, tmp_path):
    """tests/files_test.py tests further kinds of damage to JSON files."""
    start_or_resume(tmp_path)
    damage(tmp_path / name, content)
    with refused(kind=kind, file=tmp_path / name) as error:
        start_or_resume(tmp_path, seed=4)
    assert 'Restore the file' in str(error.value)


@pytest.mark.parametrize('field', ['model', 'dataset', 'preprocess', 'optimizer'])
def test_section_that_is_a_value_is_refused(field, tmp_path):
    start_or_resume(tmp_path)
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
def test_invalid_recorded_field_is_refused(section, values, kind, tmp_path):
    start_or_resume(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    write_json(str(path), config | {section: config[section] | values})
    ((name, value),) = values.items()
    field = f'{section}.{name}'
    if isinstance(value, dict):  # a section instead of a value: its own names are unknown
        field += '.x'
    with refused(kind=kind, file=path, field=field):
        record.read(str(tmp_path))


def test_message_about_a_recorded_field_has_a_remedy(tmp_path):
    start_or_resume(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    write_json(str(path), config | {'loss': config['loss'] | {'pabel_smoothing': 0.1}})
    with pytest.raises(UserError) as error:
        record.read(str(tmp_path))
    assert str(error.value) == (
        f'{path}: loss.pabel_smoothing is not a field. Did you mean loss.label_smoothing? '
        'Restore the file.'
    )


def test_checkpoint_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / 'checkpoints').write_text('')
    with refused(kind='unreadable', file=tmp_path / 'checkpoints'):
        record.begun(str(tmp_path))


def test_incomplete_first_checkpoint_is_no_run(tmp_path):
    (tmp_path / 'checkpoints' / '5.orbax-checkpoint-tmp').mkdir(parents=True)
    assert record.begun(str(tmp_path)) is None


def test_another_run_may_use_a_workdir_without_checkpoints(tmp_path):
    start_or_resume(tmp_path)
    (tmp_path / 'checkpoints' / '5').rmdir()
    assert record.begun(str(tmp_path)) is None
    assert start_or_resume(tmp_path, seed=4).seed == 4


def test_new_length_of_the_run_is_a_warning(tmp_path, caplog):
    start_or_resume(tmp_path)
    start_or_resume(tmp_path, num_steps=20)
    assert 'num_steps was 10 and is now 20: the learning-rate schedule changes' in caplog.text


def test_find_recognises_a_workdir_and_its_checkpoints(tmp_path):
    start_or_resume(tmp_path)
    assert record.find(str(tmp_path)) == (str(tmp_path), None)
    assert record.find(str(tmp_path / 'checkpoints' / '5')) == (str(tmp_path), 5)
    assert record.find(str(tmp_path / 'checkpoints')) is None
    assert record.find(str(tmp_path / 'checkpoints' / '6')) is None


def test_only_ascii_numbers_are_names_of_checkpoints(tmp_path):
    for name in ('12', '0', '²', '٣', '007', '-1', 'bad-3', '1.0'):
        (tmp_path / 'checkpoints' / name).mkdir(parents=True)
    assert sorted(record.saved_steps(str(tmp_path / 'checkpoints'))) == [0, 12]
    assert record.find(str(tmp_path / 'checkpoints' / '12')) == (str(tmp_path), 12)
    for name in ('²', '٣', '007'):
        assert record.find(str(tmp_path / 'checkpoints' / name)) is None
