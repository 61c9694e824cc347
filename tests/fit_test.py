"""The command fit: its files, what it refuses, and that a stopped fit ends like any other."""

import json
import logging
import os
import pathlib
import re
import shlex
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from tests.support import small
from tests.support.datasets import prepare_tfds, write_images
from tests.support.errors import refused
from tests.support.forked import Forked
from vit_jax import cli, fit, predict
from vit_jax import config as config_lib
from vit_jax import weights as weights_lib
from vit_jax.data import photo_table
from vit_jax.data.photo_table import Row
from vit_jax.fitting import preparation

CLASSES = ['oak', 'rose', 'tulip']
FIT = 'from vit_jax import cli, fit; cli.leave(fit.main())'
# There is time for fine-tuning, for a few steps whose number does not depend on the machine.
FEW_STEPS = """
from vit_jax.fitting import budget
budget.measure = lambda config: budget.Measured(0.01, 0.1, 1)
budget._LEAST_SECONDS = 1.0
budget._FEWEST_STEPS = 1
budget._MOST_EPOCHS = 2.0
budget._MOST_EPOCHS_OF_A_TRY = 1.0
budget.RATES = (0.01, 0.03)
"""
# Kills the process before the write number N of a file.
KILLED = """
import itertools, os, signal
writes = itertools.count(1)
def armed(function):
    def replace(*arguments, **keywords):
        if next(writes) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)
    return replace
os.replace = armed(os.replace)
os.rename = armed(os.rename)
"""
COUNTED = KILLED.format(number=0) + 'import atexit; atexit.register(lambda: print(next(writes)))\n'
WRITTEN = {
    'photos.csv',
    'features.npz',
    'probe.safetensors',
    'model.safetensors',
    'suspects.csv',
    'mistakes.csv',
    'confusion.csv',
    'fit.json',
    'train.log',
}


@pytest.fixture(autouse=True)
def handlers():
    """Closes the log files of fits in this process."""
    logger = logging.getLogger('vit_jax')
    before = logger.handlers[:]
    yield
    for handler in set(logger.handlers).difference(before):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture(scope='session')
def pretrained(tmp_path_factory):
    path = str(tmp_path_factory.mktemp('weights') / 'pretrained.safetensors')
    weights_lib.save(small.make('vit'), path, 'vit_jax')
    return path


@pytest.fixture
def data(tmp_path):
    write_images(tmp_path / 'data', CLASSES, 12)
    return tmp_path / 'data'


def arguments(data, pretrained, workdir, *options):
    return [
        str(data),
        f'--pretrained={pretrained}',
        f'--workdir={workdir}',
        '--minutes=1',
        *options,
    ]


def run(data, pretrained, workdir, *options):
    """Fits in this process; raises its error."""
    return fit.main.__wrapped__(arguments(data, pretrained, workdir, *options))


def recorded(workdir):
    return json.loads((workdir / 'fit.json').read_text())


def start(data, pretrained, workdir, first=''):
    """A process that runs Python code and then fits."""
    log = workdir.with_name(f'{workdir.name}.log')
    log.unlink(missing_ok=True)
    return Forked(arguments(data, pretrained, workdir), log, first + FIT, optimized=False), log


def finish(data, pretrained, workdir, first=''):
    """The log of a fit in a process of its own that must succeed."""
    process, log = start(data, pretrained, workdir, first)
    assert process.wait(400) == 0, log.read_text()
    return log.read_text()


def test_model_classifies_new_photos(data, pretrained, tmp_path):
    workdir = tmp_path / 'fit'
    assert run(data, pretrained, workdir) == 0
    assert {path.name for path in workdir.iterdir()} >= WRITTEN
    write_images(tmp_path / 'new', CLASSES, 10, seed=1)
    answers = tmp_path / 'answers.csv'
    model = f'--pretrained={workdir / "model.safetensors"}'
    assert predict.main([model, f'--csv={answers}', str(tmp_path / 'new')]) == 0
    rows = [line.split(',') for line in answers.read_text().splitlines()[1:]]
    is_right = [pathlib.Path(file).parent.name == answer for file, answer, *_ in rows]
    assert len(is_right) == 30
    assert np.mean(is_right) > 0.75


def test_workdir_is_named_after_the_photos(data, pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data.rename(tmp_path / 'photos.v2')
    options = [f'--pretrained={pretrained}', '--minutes=1']
    assert fit.main.__wrapped__(['photos.v2', *options]) == 0
    before = (tmp_path / 'runs/fit-photos.v2/fit.json').read_bytes()
    assert fit.main.__wrapped__(['photos.v2/', *options]) == 0  # as a shell completes it
    assert (tmp_path / 'runs/fit-photos.v2/fit.json').read_bytes() == before


def test_one_class_is_refused(pretrained, tmp_path):
    write_images(tmp_path / 'data', ['oak'], 5)
    with refused('content', file=tmp_path / 'data', value=['oak']):
        run(tmp_path / 'data', pretrained, tmp_path / 'fit')
    assert not (tmp_path / 'fit').exists()


def test_empty_class_folder_is_refused(data, pretrained, tmp_path):
    (data / 'yew').mkdir()
    with refused('content', value=['yew 0']):
        run(data, pretrained, tmp_path / 'fit')
    (data / 'yew').rmdir()
    assert run(data, pretrained, tmp_path / 'fit') == 0


def test_three_photos_of_a_class_are_one_for_each_split(pretrained, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation.duplicates, 'near_pairs', lambda *arguments: [])
    write_images(tmp_path / 'data', CLASSES, 3)
    assert run(tmp_path / 'data', pretrained, tmp_path / 'fit') == 0
    rows = photo_table.read(str(tmp_path / 'fit/photos.csv')).rows
    assert sorted((row.labels[0], row.split) for row in rows) == sorted(
        (name, split) for name in CLASSES for split in ('train', 'val', 'test')
    )


def test_a_class_with_one_photo_is_refused_before_the_features(data, pretrained, tmp_path, caplog):
    write_images(data, ['yew'], 1)
    with refused('content', value=['yew 1']):
        run(data, pretrained, tmp_path / 'fit')
    assert 'features' not in caplog.text


def test_broken_photos(data, pretrained, tmp_path):
    (data / 'oak/x.jpg').write_bytes(b'no image')
    assert run(data, pretrained, tmp_path / 'fit') == 0
    assert [*recorded(tmp_path / 'fit')['scan']['broken']] == [str(data / 'oak/x.jpg')]
    for path in data.rglob('*.png'):
        path.write_bytes(b'no image')
    with refused('content') as error:
        run(data, pretrained, tmp_path / 'another')
    assert error.value.file in [str(path) for path in data.rglob('*.*')]


def test_copies_of_one_photo_are_refused(data, pretrained, tmp_path):
    photo = (data / 'oak/000.png').read_bytes()
    for path in data.rglob('*.png'):
        path.write_bytes(photo)
    with refused('content', value=['val', 'test']):
        run(data, pretrained, tmp_path / 'fit')


def test_tables_of_photos(data, pretrained, tmp_path):
    table = tmp_path / 'photos.csv'
    table.write_text('file,class\ndata/oak/000.png,oak\n')
    with refused('content', file=table, value='class'):
        run(table, pretrained, tmp_path / 'fit')
    table.write_text('file,label\ndata/oak/000.png,oak\ndata/rose/nowhere.png,rose\n')
    with refused('content', file=table):
        run(table, pretrained, tmp_path / 'fit')
    with refused('missing', file=tmp_path / 'nowhere'):
        run(tmp_path / 'nowhere', pretrained, tmp_path / 'fit')
    rows = [Row(str(path), (path.parent.name,)) for path in sorted(data.rglob('*.png'))]
    photo_table.write(str(table), rows, multi_label=False)
    assert run(table, pretrained, tmp_path / 'fit') == 0
    again = photo_table.read(str(tmp_path / 'fit/photos.csv')).rows
    assert [(row.file, row.labels) for row in again] == [(row.file, row.labels) for row in rows]


def test_prepared_tfds_set(pretrained, tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    monkeypatch.setattr(tfds.core.constants, 'DATA_DIR', str(tmp_path / 'tfds'))
    prepare_tfds(tmp_path / 'tfds', 'array_record')
    assert run('dots', pretrained, tmp_path / 'fit') == 0
    rows = photo_table.read(str(tmp_path / 'fit/photos.csv')).rows
    assert len(rows) == 72
    for row in rows:  # label k has pixels from 40 k to 40 k + 127
        number = ['ant', 'bee', 'cat'].index(row.labels[0])
        assert np.asarray(Image.open(row.file)).min() // 40 == number


@pytest.mark.parametrize('minutes', ['0.5', '0', '-1', 'nan', '1e9'])
def test_impossible_minutes_are_refused(minutes, pretrained, tmp_path):
    with refused('value', field='--minutes'):
        fit.main.__wrapped__(['digits', '--pretrained=x', f'--minutes={minutes}'])


def test_missing_weights_leave_no_workdir(data, pretrained, tmp_path):
    """The corrected command then starts afresh."""
    with refused('missing'):
        run(data, tmp_path / 'nowhere.safetensors', tmp_path / 'runs/fit')
    assert not (tmp_path / 'runs').exists()


def test_workdir_among_the_photos_is_refused(data, pretrained):
    with refused('conflict', field='--workdir', file=data):
        run(data, pretrained, data / 'fit')
    assert sorted(path.name for path in data.iterdir()) == CLASSES


def test_workdir_with_files_of_others_is_refused(data, pretrained, tmp_path):
    model = tmp_path / 'fit/model.safetensors'
    model.parent.mkdir()
    model.write_text('mine')
    with refused('conflict', field='--workdir', value=['model.safetensors']):
        run(data, pretrained, model.parent)
    assert [path.name for path in model.parent.iterdir()] == ['model.safetensors']
    assert model.read_text() == 'mine'


def test_workdir_of_another_fit_is_refused(data, pretrained, tmp_path):
    assert run(data, pretrained, tmp_path / 'fit') == 0
    write_images(tmp_path / 'others', CLASSES, 12)
    with refused('conflict', field='data', value=str(tmp_path / 'others')):
        run(tmp_path / 'others', pretrained, tmp_path / 'fit')
    with refused('conflict', field='seed', value=1):
        run(data, pretrained, tmp_path / 'fit', '--seed=1')


def test_workdir_that_cannot_be_written_is_refused(data, pretrained, tmp_path, monkeypatch):
    (tmp_path / 'fit').mkdir()
    access = os.access
    monkeypatch.setattr(
        os, 'access', lambda path, mode: path != str(tmp_path / 'fit') and access(path, mode)
    )
    with refused('unwritable', field='--workdir', file=tmp_path / 'fit'):
        run(data, pretrained, tmp_path / 'fit')


def test_fit_of_changed_photos_does_not_resume(data, pretrained, tmp_path):
    """A label that was corrected, a photo that was added, and one that was removed."""
    assert run(data, pretrained, tmp_path / 'fit') == 0
    changes = [
        lambda: (data / 'oak/000.png').rename(data / 'rose/corrected.png'),
        lambda: shutil.copy(data / 'oak/001.png', data / 'oak/new.png'),
        lambda: (data / 'oak/001.png').unlink(),
    ]
    for number, change in enumerate(changes):
        change()
        with refused('conflict', field='--workdir', file=data):
            run(data, pretrained, tmp_path / 'fit')
        assert run(data, pretrained, tmp_path / f'fit{number}') == 0
        shutil.rmtree(tmp_path / 'fit')
        (tmp_path / f'fit{number}').rename(tmp_path / 'fit')


@pytest.mark.parametrize(
    ('present', 'cut'),
    [(['train'], ['val', 'test']), (['train', 'test'], ['val']), (['train', 'valid'], ['test'])],
)
def test_missing_split_folders_are_cut_from_train(present, cut, pretrained, tmp_path):
    for seed, split in enumerate(present):
        write_images(tmp_path / 'data' / split, CLASSES, 8, seed=seed)
    assert run(tmp_path / 'data', pretrained, tmp_path / 'fit') == 0
    for row in photo_table.read(str(tmp_path / 'fit/photos.csv')).rows:
        folder = pathlib.Path(row.file).parts[-3].removesuffix('id')
        assert row.split == folder or (folder == 'train' and row.split in cut)


@pytest.mark.parametrize('present', [['val'], ['test'], ['val', 'test']])
def test_photos_without_the_split_train_are_refused(present, pretrained, tmp_path):
    for split in present:
        write_images(tmp_path / 'data' / split, CLASSES, 8)
    with refused('missing', value=present):
        run(tmp_path / 'data', pretrained, tmp_path / 'fit')


def test_unusual_names_links_and_suffixes(data, pretrained, tmp_path):
    (data / 'oak').rename(data / 'oak, "old"; été')
    (data / 'rose').rename(data / '=rose ')
    names = ['a,b.png', 'say "hi".png', 'two\nlines.png', '猫 é.png', '=1+1.png', ' .PNG', 'X.PNG']
    names.append(os.fsdecode(b'\xff\xfe.png'))
    folder = data / 'oak, "old"; été'
    for path, name in zip(sorted(folder.iterdir()), names, strict=False):
        path.rename(folder / name)
    (tmp_path / 'elsewhere').mkdir()
    shutil.move(data / 'tulip/000.png', tmp_path / 'elsewhere/x.png')
    (data / 'tulip/link.png').symlink_to(tmp_path / 'elsewhere/x.png')
    (data / 'tulip/to-nowhere.png').symlink_to(tmp_path / 'nowhere.png')
    expected = {str(path) for path in data.rglob('*.[pP][nN][gG]') if path.exists()}
    assert run(data, pretrained, tmp_path / 'fit') == 0
    rows = photo_table.read(str(tmp_path / 'fit/photos.csv')).rows
    assert {row.file for row in rows} == expected
    assert len(expected) == 36
    classes = weights_lib.load(str(tmp_path / 'fit/model.safetensors')).classes
    assert sorted(classes) == sorted(['oak, "old"; été', '=rose', 'tulip'])
    text = (tmp_path / 'fit/suspects.csv').read_text(errors='surrogateescape')
    assert '猫 é.png' in text


def test_photos_without_features_leave_some_to_choose_by(pretrained, tmp_path, monkeypatch):
    """Where the time for features is short, all splits have some."""
    monkeypatch.setattr(preparation, '_SHARE_OF_FEATURES', 0.0)
    for seed, split in enumerate(('train', 'val', 'test')):
        write_images(tmp_path / 'data' / split, CLASSES, 50, seed=seed)
    assert run(tmp_path / 'data', pretrained, tmp_path / 'fit') == 0
    features = np.load(tmp_path / 'fit/features.npz')['features']
    rows = photo_table.read(str(tmp_path / 'fit/photos.csv')).rows
    known = [rows[k].split for k in np.flatnonzero(np.isfinite(features[:, 0]))]
    assert len(known) == 128  # whole batches
    assert min(known.count(split) for split in ('train', 'val', 'test')) > 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ('limit', 'file'), [(10_000, 'features.npz'), (60_000, 'probe.safetensors')]
)
def test_full_disk_names_the_file_and_the_fit_resumes(limit, file, data, pretrained, tmp_path):
    """The limit is one on the size of a file; the log of the process is shorter."""
    first = f'from tests.campaign import limits; limits.impose("file size", {limit})\n'
    process, log = start(data, pretrained, tmp_path / 'fit', first)
    assert process.wait(400) == 1
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f'error: {tmp_path / "fit" / file} ')
    assert 'Traceback' not in log.read_text()
    finish(data, pretrained, tmp_path / 'fit')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'code', 'last'),
    [('SIGINT', 130, 'Stopped by SIGINT (Ctrl-C).'), ('SIGTERM', -signal.SIGTERM, None)],
)
def test_signal_before_training_ends_the_command_as_others(
    name, code, last, data, pretrained, tmp_path
):
    first = f"""
import os, signal
from vit_jax.fitting import preparation
cut = preparation._cut
def interrupted(*arguments):
    os.kill(os.getpid(), signal.{name})
    return cut(*arguments)
preparation._cut = interrupted
"""
    process, log = start(data, pretrained, tmp_path / 'fit', first)
    assert process.wait(400) == code, log.read_text()
    if last:
        assert log.read_text().splitlines()[-1] == last
    finish(data, pretrained, tmp_path / 'fit')


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'code'), [('SIGINT', 130), ('SIGTERM', 143)])
def test_signal_in_training_saves_and_the_fit_resumes(name, code, data, pretrained, tmp_path):
    first = f"""{FEW_STEPS}
import os, signal
from vit_jax.workdir import checkpoint
save = checkpoint.Checkpointer.save
def interrupted(self, *arguments, **keywords):
    checkpoint.Checkpointer.save = save
    os.kill(os.getpid(), signal.{name})
    return save(self, *arguments, **keywords)
checkpoint.Checkpointer.save = interrupted
"""
    process, log = start(data, pretrained, tmp_path / 'fit', first)
    assert process.wait(400) == code, log.read_text()
    assert re.search(rf'stopped by {name} after step \d+ of \d+ and saved', log.read_text())
    assert 'To continue, run the same command again' in log.read_text()
    log = finish(data, pretrained, tmp_path / 'fit', FEW_STEPS)
    assert 'Computing the features' not in log


@pytest.fixture(scope='session')
def undisturbed(pretrained, tmp_path_factory):
    """(photos, {first code: (workdir, number of writes)}) of fits that nothing stops."""
    root = tmp_path_factory.mktemp('undisturbed')
    write_images(root / 'data', CLASSES, 12)
    fits = {}
    for name, first in [('probe', ''), ('trained', FEW_STEPS)]:
        log = finish(root / 'data', pretrained, root / name, first + COUNTED)
        fits[first] = root / name, int(log.splitlines()[-1]) - 1
    return root / 'data', fits


def decisions(workdir):
    """What a fit has decided and found, without its paths."""
    record = json.dumps(recorded(workdir)).replace(str(workdir), 'WORKDIR')
    record = re.sub(r'"seconds": [\d.e-]+', '"seconds": 0', record)
    return json.loads(record)


def assert_equal_fits(workdir, expected):
    assert decisions(workdir) == decisions(expected)
    names = {path.name for path in workdir.iterdir()}
    assert names == {path.name for path in expected.iterdir()}  # nothing half-written is left
    small.assert_same_arrays(
        weights_lib.load(str(workdir / 'model.safetensors')).params,
        weights_lib.load(str(expected / 'model.safetensors')).params,
    )


def assert_not_recomputed(before, log):
    """A process does not do what fit.json already had at its start."""
    lines = {
        'scan': 'Computing the features',
        'probe': 'A linear probe of',
        **{stage: f'{stage}: ' for stage in before if stage.startswith(('try ', 'run'))},
    }
    for stage, line in lines.items():
        if stage in before:
            assert not re.search(f'^{re.escape(line)}', log, re.MULTILINE), (stage, log)


def kill_at(number, data, pretrained, workdir, first):
    """Starts a fit, kills it at a write, and returns whether it was complete before."""
    before = recorded(workdir) if (workdir / 'fit.json').exists() else {}
    process, log = start(data, pretrained, workdir, first + KILLED.format(number=number))
    code = process.wait(400)
    assert code in (0, -signal.SIGKILL), log.read_text()
    assert_not_recomputed(before, log.read_text())
    if (workdir / 'model.safetensors').exists():
        assert weights_lib.load(str(workdir / 'model.safetensors')).classes is not None
    return code == 0


@pytest.mark.nightly
def test_fit_killed_at_any_write_ends_like_the_undisturbed_one(undisturbed, pretrained, tmp_path):
    data, fits = undisturbed
    expected, writes = fits['']
    assert writes > 8
    for number in range(1, writes + 1):
        workdir = tmp_path / str(number)
        assert not kill_at(number, data, pretrained, workdir, '')
        finish(data, pretrained, workdir)
        assert_equal_fits(workdir, expected)


@pytest.mark.slow
def test_training_killed_many_times_ends_like_the_undisturbed_one(
    undisturbed, pretrained, tmp_path
):
    data, fits = undisturbed
    expected, writes = fits[FEW_STEPS]
    assert writes > 80
    kills = 0
    while not kill_at(4 + 3 * kills, data, pretrained, tmp_path / 'fit', FEW_STEPS):
        kills += 1
    assert kills >= 5
    assert_equal_fits(tmp_path / 'fit', expected)


@pytest.mark.slow
def test_the_command_of_the_run_by_hand_is_one_of_main(undisturbed):
    _, fits = undisturbed
    workdir, _ = fits[FEW_STEPS]
    assert recorded(workdir)['run'] is not None
    (line,) = re.findall(
        r'^  (python -m vit_jax\.main .*)$', (workdir / 'train.log').read_text(), re.M
    )
    words = shlex.split(line)[3:]
    by_hand = cli.read_config([word for word in words if not word.startswith('--workdir')])
    trained = json.loads((workdir / 'run/config.json').read_text())
    for field in ('num_steps', 'batch_size', 'image_size', 'optimizer', 'dataset'):
        asked = json.loads(json.dumps(config_lib.checked(by_hand).to_dict()[field]))
        if field == 'dataset':
            asked = {name: asked[name] for name in ('name', 'train_split', 'eval_split', 'balance')}
            assert {name: trained[field][name] for name in asked} == asked
        else:
            assert trained[field] == asked


@pytest.mark.slow
def test_log_of_a_run_ends_with_the_run(undisturbed):
    """The log of the first short run has no line of the second one."""
    _, fits = undisturbed
    workdir, _ = fits[FEW_STEPS]
    log = (workdir / 'tries/lr=0.01/train.log').read_text()
    assert 'lr=0.03' not in log
    assert 'temperature' not in log
