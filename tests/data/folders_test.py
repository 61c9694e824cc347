"""What is a split, a class or an image in a directory, and what is said about others."""

import os
import shutil
import time

import pytest

from tests.support.batches import encoded, write_directory
from vit_jax import predict
from vit_jax.data import folders, sources
from vit_jax.errors import UserError


def write(root, *names):
    """Image files of these names."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(number))
    return str(root)


def refused(root, split='train'):
    with pytest.raises(UserError) as error:
        sources.open_source(str(root), split)
    return str(error.value)


def test_a_flat_directory_is_cut_into_slices(tmp_path):
    root = write(tmp_path, *(f'{name}/{k}.png' for name in ('cat', 'dog') for k in range(20)))
    train, rest = (sources.open_source(root, f'train[{cut}]') for cut in (':90%', '90%:'))
    assert train.class_names == rest.class_names == ('cat', 'dog')
    assert (train.num_examples, rest.num_examples) == (36, 4)
    found = {source.name_of(k) for source in (train, rest) for k in range(source.num_examples)}
    assert len(found) == 40
    message = refused(root, 'test')
    assert message.startswith(f"no split folder 'test' in '{root}', whose folders cat, dog are cl")
    assert f'{root}/train/CLASS/ and {root}/test/CLASS/' in message
    assert '--config.dataset.train_split=train[:90%] --config.dataset.eval_split=train[90%:]' in (
        message
    )


@pytest.mark.parametrize('name', ['Training', 'test', 'valid'])
def test_folders_with_the_names_of_splits_are_no_classes(name, tmp_path):
    write(tmp_path, 'other/1.png', f'{name}/1.png')
    assert f'the folders there are: {", ".join(sorted([name, "other"]))}.' in refused(tmp_path)


@pytest.mark.parametrize('name', folders.VALIDATION)
def test_a_folder_for_validation_is_taken_and_named(name, tmp_path, caplog):
    caplog.set_level('INFO', 'vit_jax.data')
    root = write(tmp_path, 'train/a/1.png', f'{name}/a/1.png')
    for wanted in ('', 'test'):
        assert folders.choose_splits(root, 'train', wanted) == ('train', name)
        assert f"evaluation takes '{root}/{name}'" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("there is no folder 'test'")
    assert folders.choose_splits(root, 'train', 'test[:50%]') == ('train', f'{name}[:50%]')
    count = len(caplog.messages)
    for kept in (name, 'train[90%:]'):
        assert folders.choose_splits(root, 'train', kept) == ('train', kept)
    assert len(caplog.messages) == count


def test_without_one_a_tenth_is_held_out(tmp_path, caplog):
    caplog.set_level('INFO', 'vit_jax.data')
    root = write(tmp_path, 'train/a/1.png')
    for name in (root, 'cifar10'):
        assert folders.choose_splits(name, 'train', '') == ('train[:90%]', 'train[90%:]')
        assert caplog.messages[-1].startswith('evaluation takes the last 10 % of train, which')
    with pytest.raises(UserError, match='eval_split is empty and .* is train.:50%.: name the rest'):
        folders.choose_splits(root, 'train[:50%]', '')


def test_a_folder_without_the_right_to_read_it(tmp_path, monkeypatch):
    """The tests may run as root, who has every right."""

    def refused(folder):
        raise PermissionError(13, 'Permission denied', folder)

    for name in ('scandir', 'listdir'):  # of training, and of prediction
        monkeypatch.setattr(os, name, refused)
    for read, given in ((folders.entries, str(tmp_path)), (predict.find_images, [str(tmp_path)])):
        with pytest.raises(UserError, match=f"folder '{tmp_path}' cannot be listed .Permission "):
            read(given)


def test_a_class_whose_name_is_no_text(tmp_path):
    write(tmp_path, 'train/car/1.png', 'train/bl\udcfe/1.png')
    assert r"class folder(s) with names that are not in UTF-8: 'bl\udcfe'. Rename" in refused(
        tmp_path
    )


def test_nested_class_folders_stop(tmp_path):
    write(tmp_path, 'train/car/1.png', 'train/animal/cat/1.png', 'train/animal/dog/deep/1.png')
    assert 'images in folders of their own: animal/cat, animal/dog. Each class is one' in refused(
        tmp_path
    )
    write(tmp_path / 'flat', 'car/1.png', 'animal/cat/1.png')
    assert 'images in folders of their own: animal/cat.' in refused(tmp_path / 'flat')


def test_what_is_no_file_is_broken_and_named_and_never_opened(tmp_path, caplog):
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
    assert 'left out: 1 folder' in text
    for name in ('gone.gif', 'loop.png', 'pipe.png', 'zero.jpg'):
        assert f'{folder}/{name}: it is neither a file nor a link to one (' in text


def test_prediction_reads_the_files_that_training_reads(tmp_path):
    names = [
        f'train/a/{k}{ending}'
        for k, ending in enumerate((*sources.SUFFIXES, '.JPG', '.txt', '.pdf', '.svg', ''))
    ]
    source = sources.open_source(write(tmp_path, *names, 'train/a/.hidden.png'), 'train')
    assert sorted(map(source.name_of, range(source.num_examples))) == predict.find_images(
        [str(tmp_path / 'train')]
    )


def test_classes_may_be_links_and_what_macos_adds_is_none(tmp_path):
    root = write(tmp_path / 'data', 'train/a/1.png', 'train/__MACOSX/a/1.png')
    write(tmp_path / 'elsewhere', '2.png')
    (tmp_path / 'data/train/b').symlink_to(tmp_path / 'elsewhere')
    source = sources.open_source(root, 'train')
    assert source.class_names == ('a', 'b')
    shutil.rmtree(tmp_path / 'data/train/__MACOSX')
    (tmp_path / 'elsewhere/back').symlink_to(tmp_path / 'data/train')  # round and round
    assert predict.find_images([f'{root}/train']) == sorted(
        map(source.name_of, range(source.num_examples))
    )


CAFE = ('caf\u00e9', 'cafe\u0301')  # the same word in NFC and in NFD


@pytest.mark.parametrize('trained', [0, 1])
def test_a_class_is_known_in_either_unicode_normalisation(trained, tmp_path):
    root = write(tmp_path, f'train/{CAFE[trained]}/1.png', 'train/bar/2.png')
    write(tmp_path, f'test/{CAFE[1 - trained]}/3.png', 'test/bar/4.png')
    train = sources.open_source(root, 'train')
    test = sources.open_source(root, 'test', class_names=train.class_names)
    assert test.class_names == train.class_names == ('bar', CAFE[trained])
    names = {os.path.basename(test.name_of(k)): test.labels[k] for k in range(2)}
    assert names == {'3.png': 1, '4.png': 0}


def test_two_folders_that_look_the_same_are_named(tmp_path):
    write(tmp_path, *(f'train/{name}/1.png' for name in (*CAFE, 'bar')))
    message = refused(tmp_path)
    assert 'differ in Unicode normalisation only' in message
    assert all(ascii(name) in message for name in CAFE)


def test_the_time_to_compare_classes_grows_with_their_number_only(tmp_path, monkeypatch):
    names = [f'class {number:06}' for number in range(100_000)]
    found = {str(tmp_path): dict.fromkeys(names, 'folder')}
    monkeypatch.setattr(folders, 'entries', lambda folder: found.get(folder, {}))
    begin = time.monotonic()
    contents, classes = folders.class_contents(str(tmp_path), tuple(names))
    assert time.monotonic() - begin < 20  # of lists it is minutes
    assert list(contents) == list(classes.values()) == names


def test_a_long_listing_reports_its_progress(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folders, 'SILENCE', 0)
    write(tmp_path, 'train/a/1.png', 'train/b/2.png')
    sources.open_source(str(tmp_path), 'train')
    lines = [line for line in caplog.messages if line.startswith('listing')]
    assert lines[-1] == f"listing '{tmp_path}/train': 2 of 2 class folders"


@pytest.mark.parametrize(
    ('given', 'split', 'right'),
    [
        ('.', 'train', 'data'),  # a level too high
        ('.', 'test', 'data'),
        ('data/train', 'test', 'data'),  # too low
        ('data/train/ant', 'train', 'data'),  # two levels too low
        ('flat/ant', 'train', 'flat'),
        ('twice', 'train', 'twice/photos'),  # as archives are unpacked
    ],
)
def test_a_directory_a_level_too_high_or_too_low(given, split, right, tmp_path):
    for part in ('data/train', 'data/test', 'twice/photos', 'flat'):
        write(tmp_path / part, 'ant/0.png', 'bee/1.png')
    if given != '.':
        message = refused(os.path.normpath(tmp_path / given), split)
    else:
        for other in ('twice', 'flat'):
            shutil.rmtree(tmp_path / other)
        message = refused(tmp_path, split)
    assert f'Did you mean --config.dataset.name={tmp_path / right} ' in message


def test_classes_a_level_too_deep(tmp_path):
    write(tmp_path / 'train', 'images/ant/0.png', 'images/bee/1.png')
    assert f'Did you mean --config.dataset.name={tmp_path}/train/images ' in refused(tmp_path)
    write(tmp_path / 'other', 'data/train/ant/0.png', 'notes/1.png')
    assert f'Did you mean --config.dataset.name={tmp_path}/other/data ' in refused(
        tmp_path / 'other'
    )


def test_no_other_directory_is_named_where_none_fits(tmp_path):
    write(tmp_path / 'here', 'a/b/c/d/0.png')
    assert 'Did you mean' not in refused(tmp_path / 'here')
    write(tmp_path / 'classes', 'train/animal/cat/1.png', 'train/plant/rose/1.png')
    assert 'Did you mean' not in refused(tmp_path / 'classes')


def test_one_split_of_several_as_the_whole_is_a_warning(tmp_path, caplog):
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
