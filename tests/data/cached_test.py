"""The cache of photos: its pixels, and how it survives damage, crashes and full disks."""

import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.support.batches import Data, assert_equal, break_files, make, numbers, write_directory
from tests.support.errors import refused
from tests.support.images import encode, oriented, picture
from tests.support.marks import nightly_but
from tests.support.runs import ROOT, environment
from vit_jax import files
from vit_jax.data import cached, images, pipeline, resizing
from vit_jax.workdir.interrupts import Interrupts

SIZES = ((48, 30), (30, 48), (20, 20), (12, 40), (61, 17))


@dataclasses.dataclass
class Cached(Data):
    """A data set that is read through the cache."""

    folder: str = ''
    short_side: int = 0
    processes: tuple[int, int] = (0, 1)

    def source(self, split='train'):
        return cached.cached(super().source(split), self.folder, self.short_side, self.processes)


def write_photos(root):
    """Writes photos of several sizes; one photo is stored on its side."""
    for number, size in enumerate(2 * SIZES):
        folder = root / 'train' / 'ab'[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{number}.jpg').write_bytes(
            encode(picture(*size, seed=number), 'JPEG', exif=oriented(6 if number == 3 else 1))
        )
    return Data(str(root), image_size=(10, 8))


def through(data, folder, **settings):
    """The same data through the cache in a folder."""
    return Cached(**vars(data), folder=str(folder), **settings)


def contents(folder):
    """The bytes of all files below a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in pathlib.Path(folder).rglob('*')
        if path.is_file()
    }


def by_photo(data, source):
    """The pixels of the files that a source reads, by the name of the photo."""
    paths = source.fetch(tf.range(source.num_examples, dtype=tf.int64))['path'].numpy()
    return {
        source.name_of(k): images.decode(files.read_bytes(path)) for k, path in enumerate(paths)
    }


def test_pixels_equal_the_photo_or_the_reduced_photo(tmp_path):
    data = write_photos(tmp_path / 'data')
    seen = set()
    for name, pixels in by_photo(
        data, through(data, tmp_path / 'f', short_side=20).source()
    ).items():
        original = images.decode(files.read_bytes(name))
        height, width = original.shape[:2]
        factor = min(1, 20 / min(height, width))
        assert pixels.shape == (round(height * factor), round(width * factor), 3)
        seen.add(pixels.shape[:2])
        if factor == 1:
            np.testing.assert_array_equal(pixels, original)
        else:  # reduced by Pillow, as in data/resizing.py
            expected = resizing.resize_and_central_crop(
                original,
                pixels.shape[:2],
                {'fit': 'squash', 'crop_ratio': 1, 'resize': 'bilinear', 'antialias': True},
            )
            assert np.abs(pixels - expected).max() <= 0.51
    assert seen == {(32, 20), (20, 32), (20, 20), (12, 40), (40, 12), (61, 17)}


@pytest.mark.parametrize('crop', ['inception', 'pad'])
def test_photos_of_their_own_size_give_the_same_batches_bit_for_bit(crop, tmp_path):
    data = dataclasses.replace(write_photos(tmp_path / 'data'), crop=crop)
    assert_equal(through(data, tmp_path / 'f').batches(5), data.batches(5))
    smaller = through(data, tmp_path / 'f', short_side=12).batches(5)
    assert not np.array_equal(smaller[0]['image'], data.batches(1)[0]['image'])


def test_a_later_start_other_processes_and_threads_give_the_same_batches(tmp_path, monkeypatch):
    """The test also covers subsets and an empty folder."""
    data = dataclasses.replace(write_photos(tmp_path / 'data'), subset='8')
    small = through(data, tmp_path / 'f', short_side=15)
    whole = small.batches(9)
    assert len(contents(tmp_path / 'f')) == 8
    assert_equal(small.batches(4, start=5), whole[5:])
    parts = [
        dataclasses.replace(small, processes=(process, 2)).batches(9, 0, process, 2)
        for process in (0, 1)
    ]
    assert_equal(
        [
            {key: np.concatenate([part[key] for part in step]) for key in step[0]}
            for step in zip(*parts, strict=True)
        ],
        whole,
    )
    monkeypatch.setattr(pipeline, '_PARALLEL', 1)
    monkeypatch.setattr(os, 'cpu_count', lambda: 1)
    again = dataclasses.replace(small, folder=str(tmp_path / 'g'))
    assert_equal(again.batches(4, start=5), whole[5:])
    assert contents(tmp_path / 'g') == contents(tmp_path / 'f')


PROGRAM = """
import sys
{first}
from vit_jax.data import cached, sources
root, folder, process = sys.argv[1:]
source = cached.cached(sources.open_source(root, 'train'), folder, 15, (int(process), 2))
"""


def prepare(data, folder, process=0, first=''):
    """Starts a process that fills the cache with files of a short side of 15."""
    return subprocess.Popen(
        [sys.executable, '-c', PROGRAM.format(first=first), data.name, folder, str(process)],
        env=environment(),
        cwd=ROOT,
    )


@pytest.mark.slow
def test_processes_write_at_the_same_time(tmp_path):
    data = write_photos(tmp_path / 'data')
    running = [prepare(data, tmp_path / 'f', process) for process in (0, 1)]
    assert [process.wait(300) for process in running] == [0, 0]
    through(data, tmp_path / 'g', short_side=15).source()
    assert len(contents(tmp_path / 'f')) == 10
    assert contents(tmp_path / 'f') == contents(tmp_path / 'g')


def test_only_changed_photos_are_decoded_again(tmp_path, monkeypatch):
    data = write_photos(tmp_path / 'data')
    decoded = []
    decode = cached._pixels
    small = through(data, tmp_path / 'f', short_side=15)

    def counted(photo, short_side):
        decoded.append(os.path.basename(photo).decode())
        return decode(photo, short_side)

    counted.get_concrete_function = decode.get_concrete_function
    monkeypatch.setattr(cached, '_pixels', counted)
    before = by_photo(data, small.source())
    assert sorted(decoded) == [f'{number}.jpg' for number in range(10)]
    small.source()
    assert len(decoded) == 10
    photo = tmp_path / 'data/train/a/2.jpg'
    photo.write_bytes((tmp_path / 'data/train/a/0.jpg').read_bytes())
    after = by_photo(data, small.source())
    assert decoded[10:] == ['2.jpg']
    assert {name for name in after if not np.array_equal(after[name], before[name])} == {str(photo)}
    np.testing.assert_array_equal(after[str(photo)], after[str(photo.with_name('0.jpg'))])
    os.utime(photo, (1, 1))  # another time: the photo may have changed
    small.source()
    assert decoded[11:] == ['2.jpg']
    dataclasses.replace(small, short_side=16).source()
    assert len(decoded) == 22


def flipped(byte, bit):
    return lambda x: x[:byte] + bytes([x[byte] ^ 1 << bit]) + x[byte + 1 :]


@pytest.mark.parametrize(
    'damage',
    [
        b'',
        b'BM',
        lambda x: x[:-1],
        lambda x: x + b'0',
        flipped(18, 0),
        flipped(18, 3),
        flipped(22, 1),
        flipped(28, 3),
        flipped(30, 0),
    ],
)  # width, height, bits of a pixel, compression
def test_a_damaged_file_is_rebuilt_at_the_next_start(damage, tmp_path):
    small = through(write_photos(tmp_path / 'data'), tmp_path / 'f', short_side=15)
    small.source()
    good = contents(tmp_path / 'f')
    file = tmp_path / 'f' / sorted(good)[3]
    file.write_bytes(damage if isinstance(damage, bytes) else damage(file.read_bytes()))
    assert contents(tmp_path / 'f') != good
    small.source()
    assert contents(tmp_path / 'f') == good


@pytest.mark.slow
def test_files_of_a_killed_process_are_never_read(tmp_path):
    data = write_photos(tmp_path / 'data')
    folder = tmp_path / 'f'
    kill = 'import os; os.replace = lambda *files: os.kill(os.getpid(), 9)'
    assert prepare(data, folder, first=kill).wait(300) == -signal.SIGKILL
    left = contents(folder)
    assert left
    assert not any(name.endswith('.bmp') for name in left)
    assert_equal(
        through(data, folder, short_side=15).batches(3),
        through(data, tmp_path / 'g', short_side=15).batches(3),
    )
    assert contents(folder) == left | contents(tmp_path / 'g')


def zeroed(path):
    """Sets the pixels of a file to zero; its header stays."""
    content = path.read_bytes()
    path.write_bytes(content[:54] + bytes(len(content) - 54))


def bit_flipped(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    'damage',
    nightly_but([bit_flipped], [zeroed, bit_flipped, pathlib.Path.unlink]),
)
def test_a_file_that_is_damaged_during_a_run_is_rebuilt_before_it_is_used(damage, tmp_path, caplog):
    data = write_photos(tmp_path / 'data')
    folder = tmp_path / 'f'
    small = through(data, folder, short_side=15)
    whole = small.batches(6)
    good = contents(folder)
    stream = small.training()
    for path in sorted(folder.rglob('*.bmp'))[:3]:
        damage(path)
    assert contents(folder) != good
    assert_equal(list(itertools.islice(stream, 6)), whole)
    assert contents(folder) == good
    lines = [line for line in caplog.messages if 'was damaged or missing' in line]
    assert len(lines) == 3
    assert all(f'{tmp_path}/data/train/' in line for line in lines)
    assert 'Skipped broken image' not in caplog.text


def test_a_file_of_a_version_without_checksums_is_rebuilt(tmp_path):
    small = through(write_photos(tmp_path / 'data'), tmp_path / 'f', short_side=15)
    small.source()
    good = contents(tmp_path / 'f')
    path = tmp_path / 'f' / min(good)
    path.write_bytes(good[min(good)][:6] + bytes(4) + good[min(good)][10:])
    small.source()
    assert contents(tmp_path / 'f') == good


def test_a_damaged_file_is_not_rebuilt_from_a_changed_photo(tmp_path):
    data = write_photos(tmp_path / 'data')
    folder = tmp_path / 'f'
    stream = through(data, folder, short_side=15).training()
    for path in folder.rglob('*.bmp'):
        zeroed(path)
    for photo in (tmp_path / 'data').rglob('*.jpg'):
        photo.write_bytes(photo.read_bytes() + b'0')
    with refused('content') as caught:
        next(stream)
    assert caught.value.file.endswith('.jpg')


def test_a_disk_that_damages_a_file_again_is_named(tmp_path):
    source = through(write_photos(tmp_path / 'data'), tmp_path / 'f', short_side=15).source()
    path = pathlib.Path(os.fsdecode(source.fetch(tf.constant([0], tf.int64))['path'].numpy()[0]))
    zeroed(path)
    assert source.restore(0)
    assert not source.restore(0)
    zeroed(path)
    with refused('content', field='dataset.cache_dir', file=path):
        source.restore(0)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    fsync = os.fsync
    replace = os.replace
    monkeypatch.setattr(os, 'cpu_count', lambda: 1)
    monkeypatch.setattr(os, 'fsync', lambda file: (calls.append('fsync'), fsync(file)))
    monkeypatch.setattr(os, 'replace', lambda *paths: (calls.append('replace'), replace(*paths)))
    through(write_photos(tmp_path / 'data'), tmp_path / 'f').source()
    assert calls.count('fsync') == calls.count('replace') == 10
    assert calls[0] == 'fsync'


def test_progress_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cached, '_PART', 4)
    monkeypatch.setattr(cached, '_SILENCE', 0)
    with caplog.at_level('INFO', 'vit_jax.data'):
        through(write_photos(tmp_path / 'data'), tmp_path / 'f').source()
    assert [line for line in caplog.messages if 'photos' in line] == [
        f'dataset.cache: {number} of 10 photos are in {tmp_path}/f' for number in (4, 8, 10)
    ]


def test_a_signal_ends_the_work_early_and_the_next_start_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(cached, '_PART', 4)
    source = write_photos(tmp_path / 'data').source()
    with Interrupts() as interrupts:

        def check():
            if len(contents(tmp_path / 'f')) == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            interrupts.check()

        with pytest.raises(SystemExit, match='143'):
            cached.cached(source, str(tmp_path / 'f'), 0, check=check)
    before = contents(tmp_path / 'f')
    assert len(before) == 4
    cached.cached(source, str(tmp_path / 'f'), 0)
    assert before.items() < contents(tmp_path / 'f').items()


def test_a_photo_without_read_permission_is_broken(tmp_path, monkeypatch):
    """The error does not blame the folder of the cache."""
    source = write_photos(tmp_path / 'data').source()
    stat = os.stat

    def without_permission(path, *args, **kwargs):
        if os.fspath(path) == os.fsencode(source.name_of(3)):
            raise PermissionError(13, 'Permission denied', path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, 'stat', without_permission)
    read = cached.cached(source, str(tmp_path / 'f'), 0)
    paths = read.fetch(tf.range(10, dtype=tf.int64))['path'].numpy()
    assert [k for k in range(10) if not paths[k].endswith(b'.bmp')] == [3]


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    data = write_photos(tmp_path / 'data')

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', interrupted)
        with pytest.raises(KeyboardInterrupt):
            through(data, tmp_path / 'f').source()
    assert not contents(tmp_path / 'f')


def test_a_full_disk_and_a_file_in_place_of_the_folder(tmp_path, limited_files):
    data = write_photos(tmp_path / 'data')
    folder = tmp_path / 'f'
    with (
        limited_files(1500),
        refused('unwritable', field='dataset.cache_dir', file=folder) as caught,
    ):
        through(data, folder).source()
    assert 'File too large' in str(caught.value)
    assert all(len(content) <= 1500 for content in contents(folder).values())
    through(data, folder).source()  # the limit is gone
    assert len(contents(folder)) == 10
    (tmp_path / 'file').touch()
    with refused('unwritable', field='dataset.cache_dir', file=tmp_path / 'file'):
        through(data, tmp_path / 'file').source()


@pytest.mark.slow
def test_broken_photos_are_skipped_as_without_the_cache(tmp_path, caplog):
    data = write_directory(tmp_path / 'data', crop='none')
    broken = (5, 11, 12, 30, 44)
    break_files(data, broken)
    os.mkfifo(tmp_path / 'data/train/a/pipe.png')  # opening it would wait forever
    batches = through(data, tmp_path / 'f').batches(14)
    assert len([line for line in caplog.messages if line.startswith('Skipped broken image')]) == 6
    assert_equal(batches, data.batches(14))
    assert not set(broken) & set(numbers(batches))


def test_storage_that_fails_does_not_change_the_run(tmp_path, monkeypatch):
    def fails(photo, short_side):
        raise tf.errors.UnavailableError(None, None, 'try again')

    fails.get_concrete_function = cached._pixels.get_concrete_function
    monkeypatch.setattr(cached, '_pixels', fails)
    with pytest.raises(tf.errors.UnavailableError):
        through(write_photos(tmp_path / 'data'), tmp_path / 'f').source()


def test_location_of_the_cache(tmp_path, monkeypatch):
    data = write_photos(tmp_path / 'data')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'x'))
    through(data, '').source()
    assert len(contents(tmp_path / 'x/vit_jax/photos')) == 10
    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    through(data, '').source()
    assert len(contents(tmp_path / 'home/.cache/vit_jax/photos')) == 10
    through(data, '~/mine').source()
    assert len(contents(tmp_path / 'home/mine')) == 10


@pytest.mark.parametrize('kind', ['digits', 'tfrecord', 'array_record'])
def test_only_directories_can_be_cached(kind, tmp_path):
    data = make(kind, tmp_path)
    with refused('inapplicable', field='dataset.cache', value='disk'):
        through(data, tmp_path / 'f').source()


def test_a_multi_label_source_can_be_cached(tmp_path):
    folder = tmp_path / 'data/train'
    folder.mkdir(parents=True)
    rows = ['file,labels']
    for number in range(8):
        Image.fromarray(np.full((9, 7, 3), number, np.uint8)).save(folder / f'{number}.png')
        rows.append(f'{number}.png,{"a;b" if number % 2 else "a"}')
    (folder / 'labels.csv').write_text('\n'.join(rows))
    data = Data(str(tmp_path / 'data'))
    batches = through(data, tmp_path / 'f').batches(2)
    assert_equal(batches, data.batches(2))
    assert batches[0]['label'].sum(0).tolist() == [8, 4]
