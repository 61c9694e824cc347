"""Which folders and files of a directory are splits, classes and images, and the errors."""

import os
import shutil
import time

import pytest

from tests.support.batches import encoded, write_directory
from tests.support.errors import refused
from vit_jax import predict
from vit_jax.data import folders, heic, sources
from vit_jax.errors import UserError


def write(root, *names):
    """Writes image files with these names; returns the directory as a string."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(number))
    return str(root)


def refusal(kind, root, split='train', **expected):
    """The message of the error of a kind when a split is opened."""
    with refused(kind, **expected) as caught:
        sources.open_source(str(root), split)
    return str(caught.value)


def test_a_flat_directory_is_cut_into_slices(tmp_path):
    root = write(tmp_path, *(f'{name}/{k}.png' for name in ('cat', 'dog') for k in range(20)))
    train, rest = (sources.open_source(root, f'train[{cut}]') for cut in (':90%', '90%:'))
    assert train.class_names == rest.class_names == ('cat', 'dog')
    assert (train.num_examples, rest.num_examples) == (36, 4)
    names = {source.name_of(k) for source in (train, rest) for k in range(source.num_examples)}
    assert len(names) == 40
    assert refusal('unknown', root, 'test', value='test') == (
        f"no split folder 'test' in '{root}', whose folders cat, dog are classes. Either make "
        f'folders {root}/train/CLASS/ and {root}/test/CLASS/ and move the images there, or cut '
        'splits from all images: --config.dataset.train_split=train[:90%] '
        '--config.dataset.eval_split=train[90%:] (vit_jax.evaluate: --split=train[90%:]).'
    )


@pytest.mark.parametrize('name', ['Training', 'test', 'valid'])
def test_folders_with_the_names_of_splits_are_not_classes(name, tmp_path):
    write(tmp_path, 'other/1.png', f'{name}/1.png')
    message = refusal('unknown', tmp_path, value='train')
    assert f'the folders there are: {", ".join(sorted([name, "other"]))}.' in message


@pytest.mark.parametrize('name', folders.VALIDATION)
def test_a_validation_folder_is_used_and_logged(name, tmp_path, caplog):
    caplog.set_level('INFO', 'vit_jax.data')
    root = write(tmp_path, 'train/a/1.png', f'{name}/a/1.png')
    for wanted in ('', 'test'):
        assert folders.choose_splits(root, 'train', wanted) == ('train', name)
        assert f"Evaluating on '{root}/{name}'" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("there is no folder 'test'")
    assert folders.choose_splits(root, 'train', 'test[:50%]') == ('train', f'{name}[:50%]')
    count = len(caplog.messages)
    for kept in (name, 'train[90%:]'):
        assert folders.choose_splits(root, 'train', kept) == ('train', kept)
    assert len(caplog.messages) == count


def test_without_a_validation_folder_a_tenth_is_held_out(tmp_path, caplog):
    caplog.set_level('INFO', 'vit_jax.data')
    root = write(tmp_path, 'train/a/1.png')
    for name in (root, 'cifar10'):
        assert folders.choose_splits(name, 'train', '') == ('train[:90%]', 'train[90%:]')
        assert caplog.messages[-1].startswith('Evaluating on the last 10 % of train, which')
    with refused('missing', field='dataset.eval_split'):
        folders.choose_splits(root, 'train[:50%]', '')


def test_a_folder_without_read_permission_is_an_error(tmp_path, monkeypatch):
    """The permission is simulated, because the tests may run as root."""

    def without_permission(folder):
        raise PermissionError(13, 'Permission denied', folder)

    monkeypatch.setattr(os, 'scandir', without_permission)
    with refused('unreadable', file=tmp_path):
        folders.entries(str(tmp_path))
    monkeypatch.setattr(os, 'listdir', without_permission)  # prediction uses this function
    with refused('unreadable', file=tmp_path):
        predict.find_images([str(tmp_path)])


def test_a_class_folder_whose_name_is_not_utf8_is_an_error(tmp_path):
    write(tmp_path, 'train/car/1.png', 'train/bl\udcfe/1.png')
    refusal('content', tmp_path, file=tmp_path / 'train', value=['bl\udcfe'])


def test_nested_class_folders_are_an_error(tmp_path):
    write(tmp_path, 'train/car/1.png', 'train/animal/cat/1.png', 'train/animal/dog/deep/1.png')
    folder = tmp_path / 'train'
    refusal('content', tmp_path, file=folder, value=['animal/cat', 'animal/dog'])
    flat = tmp_path / 'flat'
    write(flat, 'car/1.png', 'animal/cat/1.png')
    refusal('content', flat, file=flat, value=['animal/cat'])


def test_pipes_devices_and_broken_links_are_broken_images_and_never_opened(tmp_path, caplog):
    data = write_directory(tmp_path, count=12, batch_size=4, crop='none')
    folder = tmp_path / 'train' / 'a'
    os.mkfifo(folder / 'pipe.png')
    (folder / 'loop.png').symlink_to('loop.png')
    (folder / 'zero.jpg').symlink_to('/dev/zero')
    (folder / 'gone.gif').symlink_to('nowhere')
    (folder / 'folder.png').mkdir()
    (folder / 'around').symlink_to(folder.parent / 'b')
    (folder / 'link.png').symlink_to('000.png')
    (folder / 'around').unlink()
    source = data.source()
    assert source.num_examples == 12 + 5  # a folder is not an image
    batches = data.evaluation()
    assert sum(batch['mask'].sum() for batch in batches) == 13
    assert [os.path.basename(name) for name in batches.broken] == [
        'gone.gif',
        'loop.png',
        'pipe.png',
        'zero.jpg',
    ]
    assert len(data.batches(9)) == 9
    text = '\n'.join(caplog.messages)
    assert 'skipped: 1 folder' in text
    for name in ('gone.gif', 'loop.png', 'pipe.png', 'zero.jpg'):
        assert f'{folder}/{name}: it is neither a file nor a link to one (' in text


def test_prediction_reads_the_files_that_training_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(heic, 'is_installed', lambda: True)
    names = [
        f'train/a/{k}{ending}'
        for k, ending in enumerate((*sources.SUFFIXES, '.JPG', '.txt', '.pdf', '.svg', ''))
    ]
    source = sources.open_source(write(tmp_path, *names, 'train/a/.hidden.png'), 'train')
    assert sorted(map(source.name_of, range(source.num_examples))) == predict.find_images(
        [str(tmp_path / 'train')]
    )


def test_class_folders_may_be_links_and_macosx_folders_are_ignored(tmp_path):
    root = write(tmp_path / 'data', 'train/a/1.png', 'train/__MACOSX/a/1.png')
    write(tmp_path / 'elsewhere', '2.png')
    (tmp_path / 'data/train/b').symlink_to(tmp_path / 'elsewhere')
    source = sources.open_source(root, 'train')
    assert source.class_names == ('a', 'b')
    shutil.rmtree(tmp_path / 'data/train/__MACOSX')
    (tmp_path / 'elsewhere/back').symlink_to(tmp_path / 'data/train')  # a loop of links
    assert predict.find_images([f'{root}/train']) == sorted(
        map(source.name_of, range(source.num_examples))
    )


CAFE = ('caf\u00e9', 'cafe\u0301')  # the same word in NFC and in NFD


@pytest.mark.parametrize('trained', [0, 1])
def test_class_names_match_in_either_unicode_normalisation(trained, tmp_path):
    root = write(tmp_path, f'train/{CAFE[trained]}/1.png', 'train/bar/2.png')
    write(tmp_path, f'test/{CAFE[1 - trained]}/3.png', 'test/bar/4.png')
    train = sources.open_source(root, 'train')
    test = sources.open_source(root, 'test', class_names=train.class_names)
    assert test.class_names == train.class_names == ('bar', CAFE[trained])
    names = {os.path.basename(test.name_of(k)): test.labels[k] for k in range(2)}
    assert names == {'3.png': 1, '4.png': 0}


def test_two_folders_that_look_the_same_are_an_error(tmp_path):
    write(tmp_path, *(f'train/{name}/1.png' for name in (*CAFE, 'bar')))
    message = refusal('content', tmp_path, file=tmp_path / 'train', value=sorted(CAFE))
    assert all(ascii(name) in message for name in CAFE)


def test_the_time_to_compare_classes_grows_linearly_with_their_number(tmp_path, monkeypatch):
    names = [f'class {number:06}' for number in range(100_000)]
    entries = {str(tmp_path): dict.fromkeys(names, 'folder')}
    monkeypatch.setattr(folders, 'entries', lambda folder: entries.get(folder, {}))
    begin = time.monotonic()
    contents, classes = folders.class_contents(str(tmp_path), tuple(names))
    assert time.monotonic() - begin < 20  # comparing with lists would take minutes
    assert list(contents) == list(classes.values()) == names


def test_a_long_listing_reports_its_progress(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folders, 'SILENCE', 0)
    write(tmp_path, 'train/a/1.png', 'train/b/2.png')
    sources.open_source(str(tmp_path), 'train')
    lines = [line for line in caplog.messages if line.startswith('Listed')]
    assert lines[-1] == f"Listed 2 of 2 class folders in '{tmp_path}/train'"


@pytest.mark.parametrize(
    ('root', 'split', 'suggestion'),
    [
        ('.', 'train', 'data'),  # a level too high
        ('.', 'test', 'data'),
        ('data/train', 'test', 'data'),  # too low
        ('data/train/ant', 'train', 'data'),  # two levels too low
        ('flat/ant', 'train', 'flat'),
        ('twice', 'train', 'twice/photos'),  # as archives are unpacked
    ],
)
def test_a_directory_a_level_too_high_or_too_low_gets_a_suggestion(
    root, split, suggestion, tmp_path
):
    for part in ('data/train', 'data/test', 'twice/photos', 'flat'):
        write(tmp_path / part, 'ant/0.png', 'bee/1.png')
    if root == '.':
        for other in ('twice', 'flat'):
            shutil.rmtree(tmp_path / other)
    message = open_error(os.path.normpath(tmp_path / root), split)
    assert f'Did you mean --config.dataset.name={tmp_path / suggestion} ' in message


def open_error(root, split='train'):
    """The message of the error, of any kind, when a split is opened."""
    with pytest.raises(UserError) as caught:
        sources.open_source(str(root), split)
    return str(caught.value)


def test_classes_a_level_too_deep_get_a_suggestion(tmp_path):
    write(tmp_path / 'train', 'images/ant/0.png', 'images/bee/1.png')
    assert f'Did you mean --config.dataset.name={tmp_path}/train/images ' in open_error(tmp_path)
    other = tmp_path / 'other'
    write(other, 'data/train/ant/0.png', 'notes/1.png')
    assert f'Did you mean --config.dataset.name={other}/data ' in open_error(other)


def test_no_directory_is_suggested_where_none_fits(tmp_path):
    write(tmp_path / 'here', 'a/b/c/d/0.png')
    assert 'Did you mean' not in open_error(tmp_path / 'here')
    write(tmp_path / 'classes', 'train/animal/cat/1.png', 'train/plant/rose/1.png')
    assert 'Did you mean' not in open_error(tmp_path / 'classes')


def test_opening_one_of_several_splits_as_a_whole_data_set_is_a_warning(tmp_path, caplog):
    root = write(tmp_path, *(f'{part}/ant/{k}.png' for part in ('train', 'test') for k in range(9)))
    sources.open_source(f'{root}/train', 'train[:90%]')
    assert any(
        f"'{root}/train' is one split of '{root}', which has test, train. Did you mean" in message
        for message in caplog.messages
    )
    caplog.clear()
    alone = write(tmp_path / 'alone', 'train/ant/0.png')
    sources.open_source(f'{alone}/train', 'train')
    assert 'Did you mean' not in caplog.text
