import errno
import json
import logging
import os
import types

import pytest

from tests.support.datasets import write_images
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


def test_a_bucket_must_be_mounted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='--workdir gs://b/run is no directory of this machine: mo'):
        record.make('gs://b/run')
    assert not any(tmp_path.iterdir())


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
    assert str(error.value).endswith(
        '\n  model.dropout_rate: 0.0 in the workdir, 0.5 now\n  seed: 0 in the workdir, 4 now'
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
    with pytest.raises(UserError, match="dataset.name: '/there/flowers' in the workdir"):
        go_on(tmp_path, dataset__name='/there/clothes')


def test_another_accumulation_than_was_chosen_is_refused(tmp_path):
    go_on(tmp_path, accum_steps=4)
    with pytest.raises(UserError, match='accum_steps: 4 in the workdir, 2 now'):
        go_on(tmp_path, accum_steps=2)


@pytest.mark.parametrize(
    ('classes', 'message'),
    [
        (('ant', 'cat'), "classes: number 1 is 'bee' in the workdir, 'cat' in the data now"),
        (('ant', 'bee', 'cat'), 'classes: 2 in the workdir, 3 in the data now'),
    ],
)
def test_other_classes_are_refused(classes, message, tmp_path):
    go_on(tmp_path)
    with pytest.raises(UserError, match=message):
        go_on(tmp_path, classes)


def test_a_class_in_another_unicode_normalisation_is_refused_and_explained(tmp_path):
    go_on(tmp_path, ('bar', 'caf\u00e9'))
    with pytest.raises(UserError) as error:
        go_on(tmp_path, ('bar', 'cafe\u0301'))
    assert 'differ in Unicode normalisation only (NFC and NFD)' in str(error.value)
    assert r"is 'caf\xe9' in the workdir and 'cafe\u0301' in the data now" in str(error.value)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{"seed"', 'config.json cannot be read'),
        ('[1]', r'config.json holds \[1\], expected an object'),
    ],
)
def test_damaged_record(content, message, tmp_path):
    go_on(tmp_path)
    (tmp_path / 'config.json').write_text(content)
    with pytest.raises(UserError, match=message):
        go_on(tmp_path)


@pytest.mark.parametrize('content', ['{"architectures": ["ViTForImageClassification"]}', 'x', '3'])
def test_the_config_of_another_program_is_not_replaced(content, tmp_path):
    path = tmp_path / 'config.json'
    path.write_text(content)
    with pytest.raises(UserError, match='config.json is not the config of a run, and would be re'):
        record.begun(str(tmp_path))
    assert path.read_text() == content


def test_a_run_that_has_saved_nothing_may_be_another(tmp_path):
    record.write(str(tmp_path), run_config(), CLASSES)
    assert record.begun(str(tmp_path)) is None


@pytest.mark.parametrize('name', ['sweep.json', 'vtab.json'])
def test_one_run_and_several_do_not_share_a_directory(name, tmp_path):
    record.require_no_run(str(tmp_path))
    (tmp_path / name).write_text('{}')
    with pytest.raises(UserError, match=rf'holds several runs \({name}\): take another --workdir'):
        record.begun(str(tmp_path))
    (tmp_path / 'run').mkdir()
    go_on(tmp_path / 'run')
    with pytest.raises(UserError, match=r'run holds a run or a model \(.*config.json'):
        record.require_no_run(str(tmp_path / 'run'))


@pytest.mark.parametrize(
    ('photos', 'workdir', 'split', 'refused'),
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
def test_a_run_is_not_among_its_photos(photos, workdir, split, refused, tmp_path):
    data = tmp_path / 'data'
    write_images(data / photos, ['ant', 'bee'], 1)
    (data / 'link').symlink_to(data / 'train' / 'run')
    dataset = run_config(dataset__name=str(data), dataset__train_split=split).dataset
    workdir = str(data / workdir)
    if not refused:
        record.require_apart(workdir, dataset)
        return
    with pytest.raises(UserError) as error:
        record.require_apart(workdir, dataset)
    assert str(error.value).startswith(f'--workdir {workdir} is in {(data / refused).resolve()}, ')


@pytest.mark.parametrize('name', ['cifar10', 'digits', 'gs://bucket/photos', ''])
def test_the_name_of_a_data_set_is_no_place(name, tmp_path, monkeypatch):
    """A directory named as a TFDS set would be taken for it; one named digits never is."""
    monkeypatch.chdir(tmp_path)
    dataset = run_config(dataset__name=name).dataset
    record.require_apart('run', dataset)
    (tmp_path / 'digits').mkdir()
    record.require_apart('digits', dataset)
    if name == 'cifar10':
        with pytest.raises(UserError, match='whose folders dataset.name takes for classes'):
            record.require_apart('cifar10', dataset)


def damage(path, how):
    path.unlink()
    if how == 'directory':
        path.mkdir()
    elif how == 'device':
        path.symlink_to('/dev/zero')
    elif how != 'missing':
        path.write_bytes(how)


@pytest.mark.parametrize('name', ['config.json', 'classes.json'])
@pytest.mark.parametrize(
    'how',
    [
        b'null',
        b'[' * 10**5,
        bytes(range(256)),
        b'{"model": 3}',
        'directory',
        'device',
        'missing',
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected(name, how, tmp_path):
    go_on(tmp_path)
    damage(tmp_path / name, how)
    with pytest.raises(UserError) as error:
        go_on(tmp_path, seed=4)
    assert str(error.value).startswith(str(tmp_path / name))
    assert ', expected ' in str(error.value)
    assert 'restore the file' in str(error.value)


@pytest.mark.parametrize('field', ['model', 'dataset', 'preprocess', 'optimizer'])
def test_a_section_that_is_none_is_named(field, tmp_path):
    go_on(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    record.write_json(str(tmp_path / 'config.json'), config | {field: [1]})
    with pytest.raises(UserError, match=rf'config.json has \[1\] for {field}, expected an object'):
        record.read(str(tmp_path))


@pytest.mark.parametrize(
    ('section', 'values', 'message'),
    [
        (
            'loss',
            {'pabel_smoothing': 0.1},
            'loss.pabel_smoothing is no field. Did you mean loss.label_smoothing?',
        ),
        ('loss', {'label_smoothing': 'x'}, "loss.label_smoothing is 'x': expected a number"),
        ('dataset', {'name': {'x': 1}}, 'dataset.name.x is no field'),
        ('preprocess', {'std': [0, 0, 0]}, 'preprocess.std is'),
        ('model', {'unroll': 'x'}, "model.unroll is 'x': expected a whole number"),
        ('model', {'attention_kernel': 'flash'}, "model.attention_kernel is 'flash'"),
        ('model', {'remat_policy': 'all'}, "model.remat_policy is 'all'"),
    ],
)
def test_a_field_that_cannot_be_is_named(section, values, message, tmp_path):
    go_on(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    record.write_json(str(tmp_path / 'config.json'), config | {section: config[section] | values})
    with pytest.raises(UserError) as error:
        record.read(str(tmp_path))
    assert f'config.json: {message}' in str(error.value)
    assert str(error.value).endswith(' Restore the file.')


def test_a_file_in_place_of_a_directory_and_the_reverse(tmp_path):
    (tmp_path / 'checkpoints').write_text('')
    with pytest.raises(UserError, match='checkpoints cannot be read .Not a directory.: a run has'):
        record.begun(str(tmp_path))
    (tmp_path / '.lock').mkdir()
    with pytest.raises(UserError, match='.lock cannot be written .Is a directory., which reserves'):
        record.lock(str(tmp_path))


def test_the_leftover_of_a_first_save_is_no_run(tmp_path):
    (tmp_path / 'checkpoints' / '5.orbax-checkpoint-tmp').mkdir(parents=True)
    assert record.begun(str(tmp_path)) is None


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'access', lambda *_: False)  # tests may run as root
    with pytest.raises(UserError, match='--workdir .* cannot be written .read-only'):
        record.log_to(str(tmp_path))


@pytest.mark.parametrize('kind', ['full', 'directory'])
def test_a_log_that_cannot_be_written_is_said_once(kind, tmp_path, caplog, capsys):
    if kind == 'full':
        (tmp_path / 'train.log').symlink_to('/dev/full')
    else:
        (tmp_path / 'train.log').mkdir()
    handler = record.log_to(str(tmp_path))
    for _ in range(3):
        logging.getLogger('vit_jax').warning('a line')
    logging.getLogger('vit_jax').removeHandler(handler)
    handler.close()
    reason = 'No space left on device' if kind == 'full' else 'Is a directory'
    assert caplog.text.count(f'train.log cannot be written ({reason}): the run goes on') == 1
    assert caplog.text.count('a line') == 3
    assert capsys.readouterr().err == ''


def test_a_log_that_is_lost_when_it_is_closed_is_said(tmp_path, caplog, monkeypatch):
    """As on a network disk that looks at its quota then."""

    def close():
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    handler = record.log_to(str(tmp_path))
    logging.getLogger('vit_jax').warning('a line')
    logging.getLogger('vit_jax').removeHandler(handler)
    with handler.stream:
        monkeypatch.setattr(
            handler, 'stream', types.SimpleNamespace(flush=lambda: None, close=close)
        )
        handler.close()
    assert caplog.text.count('train.log cannot be written (Disk quota exceeded): the run') == 1


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, limited_files):
    path = tmp_path / 'x.json'
    record.write_json(str(path), [1])
    with limited_files(100), pytest.raises(UserError, match=r'x.json cannot be written \(File too'):
        record.write_json(str(path), list(range(1000)))
    assert [p.name for p in tmp_path.iterdir()] == ['x.json']
    assert record.read_json(str(path), list) == [1]


def test_no_directory_can_be_made(tmp_path):
    (tmp_path / 'file').write_text('')
    (tmp_path / 'link').symlink_to(tmp_path / 'gone')
    for path, message in [
        ('file', 'is a file'),
        ('file/lr=0.1', 'is below a file'),
        ('link', 'is a link to nothing'),
    ]:
        with pytest.raises(UserError, match=f'--workdir .*{path} {message}: name a directory'):
            record.lock(str(tmp_path / path))
    with pytest.raises(UserError, match=r"runs/.udcfe' is not in UTF-8: name another directory"):
        record.lock('runs/\udcfe')


@pytest.mark.parametrize('name', [record.LOCK, record.LOG, 'metrics.jsonl', 'config.json'])
def test_a_pipe_in_the_workdir_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    for use in (record.log_to, record.lock):
        with pytest.raises(UserError, match=f'{name} is a pipe, and opening it would wait for'):
            use(str(tmp_path))


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


def test_folders_whose_names_are_digits_of_other_kinds_are_not_checkpoints(tmp_path):
    for name in ('12', '0', '²', '٣', '007', '-1', 'bad-3', '1.0'):
        (tmp_path / 'checkpoints' / name).mkdir(parents=True)
    assert sorted(record.saved_steps(str(tmp_path / 'checkpoints'))) == [0, 12]
    assert record.find(str(tmp_path / 'checkpoints' / '12')) == (str(tmp_path), 12)
    for name in ('²', '٣', '007'):
        assert record.find(str(tmp_path / 'checkpoints' / name)) is None
