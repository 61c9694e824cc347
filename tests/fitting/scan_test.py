"""A scan finds what photos hold, and what is wrong with them."""

import shutil

from PIL import Image

from tests.support.datasets import write_images
from vit_jax.fitting import scan


def test_a_scan_reads_every_photo_and_names_broken_ones(tmp_path):
    write_images(tmp_path, ['oak'], 3, size=(10, 20))
    shutil.copy(tmp_path / 'oak/000.png', tmp_path / 'oak/copy.png')
    (tmp_path / 'oak/broken.png').write_bytes(b'no image')
    files = [str(tmp_path / f'oak/{name}.png') for name in ('000', '001', 'copy', 'broken', 'no')]
    photos = scan.scan(files)
    assert [photo.file for photo in photos] == files
    assert [(photo.width, photo.height) for photo in photos[:3]] == [(20, 10)] * 3
    assert photos[0].checksum == photos[2].checksum != photos[1].checksum
    assert [bool(photo.problem) for photo in photos] == [False, False, False, True, True]


def test_sizes_are_those_of_upright_photos(tmp_path):
    image = Image.new('RGB', (30, 10))
    exif = image.getexif()
    exif[274] = 6  # turned by 90 degrees
    image.save(tmp_path / 'x.jpg', exif=exif)
    photo = scan.look_at(str(tmp_path / 'x.jpg'))
    assert (photo.width, photo.height) == (10, 30)


def test_a_summary_counts_good_photos():
    photos = [
        scan.Photo('a.jpg', '1', 30, 20, ''),
        scan.Photo('b.jpg', '2', 30, 40, ''),
        scan.Photo('c.png', '3', 50, 60, ''),
        scan.Photo('d.png', '4', 0, 0, 'damaged'),
    ]
    labels = {'a.jpg': ['x'], 'b.jpg': ['x'], 'c.png': ['x', 'y'], 'd.png': ['z']}
    photos.append(scan.Photo('e.jpg', '1', 30, 30, ''))
    labels['e.jpg'] = ['y']
    summary = scan.summarise(photos, labels, {'.cr2': 2})
    assert summary.copies == 1
    assert summary.left_out == {'.cr2': 2}
    assert summary.images_per_class == {'x': 3, 'y': 2, 'z': 0}
    assert summary.sides == (20, 30, 50)
    assert summary.formats == {'.jpg': 3, '.png': 1}
    assert summary.broken == {'d.png': 'damaged'}
    assert summary.imbalance() == 3


def test_files_of_other_formats_are_counted(tmp_path):
    for name in ('a.CR2', 'b.cr2', 'c.jpg', 'notes', '.hidden.txt'):
        (tmp_path / name).write_bytes(b'')
    (tmp_path / 'folder.txt').mkdir()
    assert scan.other_formats([str(tmp_path)]) == {'.cr2': 2, 'notes': 1}
