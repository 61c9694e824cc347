"""Every reader of images gets the same pixels of a file, for every format and kind.

The readers are training, training from the cache of photos, evaluation, prediction, and the scan of
`fit`, which decodes a photo as prediction does.
"""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support import interop
from tests.support.images import encode, files, heic, oriented, picture
from vit_jax.data import cached, images, pipeline, sources
from vit_jax.fitting import scan

SIZE = (45, 61)
# Images already have this size, and keep their pixels.
PREPROCESS = {
    'fit': 'squash',
    'crop_ratio': 1.0,
    'resize': 'bilinear',
    'antialias': True,
    'uint8_resize': False,
    'mean': (0.0, 0.0, 0.0),
    'std': (1.0, 1.0, 1.0),
}
AUGMENT = {
    'crop': 'none',
    'min_area': 1.0,
    'pad': 0,
    'flip': False,
    'resize': 'same',
    'randaugment': {'num_ops': 0, 'magnitude': 10, 'translate': 2, 'cutout': 1},
}
SUFFIXES = {
    'AVIF': '.avif',
    'BMP': '.bmp',
    'GIF': '.gif',
    'JPEG': '.jpg',
    'JPEG2000': '.jp2',
    'MPO': '.jpg',
    'PNG': '.png',
    'PPM': '.ppm',
    'TIFF': '.tif',
    'WEBP': '.webp',
}
# Pillow has other pixels: it rounds the colours of CMYK, and clips grey of 16 bits.
NOT_AS_PILLOW = ('16', 'CMYK', 'YCCK')


def reference(encoded):
    """Pillow's own way to an upright image."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    return np.asarray(image.convert('RGB'))


def by_shape(encoded_by_name):
    """The names of the files whose upright images have the size SIZE, and of the turned files."""
    shapes = {name: images.decode(encoded).shape[:2] for name, encoded in encoded_by_name.items()}
    assert set(shapes.values()) == {SIZE, SIZE[::-1]}
    for size in (SIZE, SIZE[::-1]):
        yield size, [name for name in encoded_by_name if shapes[name] == size]


def write(root, encoded_by_name, suffix_of):
    """Writes each file as the only image of the class of its name; returns {name: path}."""
    paths = {}
    for name, encoded in encoded_by_name.items():
        folder = root / 'train' / name
        folder.mkdir(parents=True)
        paths[name] = folder / f'photo{suffix_of(encoded)}'
        paths[name].write_bytes(encoded)
    return paths


def by_class(batch, source):
    """{name of the class: image} of a batch with one image of each class."""
    assert batch['mask'].all()
    assert sorted(batch['label'].tolist()) == list(range(len(source.class_names)))
    names = [source.class_names[label] for label in batch['label']]
    return dict(zip(names, batch['image'], strict=True))


def trained(source, size):
    """The images of the first epoch of training."""
    settings = pipeline.TrainSettings(
        batch_size=source.num_examples,
        image_size=size,
        seed=0,
        augment=AUGMENT,
        preprocess=PREPROCESS,
        shuffle_buffer=10,
        files_at_once=1,
        max_broken_fraction=0.0,
    )
    return by_class(next(iter(pipeline.train_batches(source, settings))), source)


def evaluated(source, size):
    """The images of an evaluation."""
    batches = pipeline.eval_batches(
        source,
        batch_size=source.num_examples,
        image_size=size,
        preprocess=PREPROCESS,
        files_at_once=1,
        max_broken_fraction=0.0,
    )
    return by_class(next(iter(batches)), source)


def check_readers(tmp_path, encoded_by_name, suffix_of, expected_pixels):
    """Asserts that all readers of these files have equal pixels.

    Args:
      encoded_by_name: the bytes of each file.
      suffix_of: a function from the bytes of a file to its ending.
      expected_pixels: {name: uint8 pixels} of the files with an independent reference.
    """
    for number, (size, names) in enumerate(by_shape(encoded_by_name)):
        root = tmp_path / f'data{number}'
        paths = write(root, {name: encoded_by_name[name] for name in names}, suffix_of)
        source = sources.open_source(str(root), 'train')
        assert sorted(source.class_names) == sorted(names)
        kept = cached.cached(source, str(tmp_path / 'cache'), 0)
        readers = {
            'training': trained(source, size),
            'training from the cache': trained(kept, size),
            'evaluation': evaluated(source, size),
        }
        for name in names:
            predicted = images.load(str(paths[name]), size, PREPROCESS)
            for reader, read in readers.items():
                np.testing.assert_array_equal(read[name], predicted, f'{reader}: {name}')
            photo = scan.look_at(str(paths[name]))
            assert (photo.problem, photo.height, photo.width) == ('', *size), name
            if name in expected_pixels:
                levels = np.round(255 * predicted).astype(np.uint8)
                np.testing.assert_array_equal(levels, expected_pixels[name], name)


def suffix_of(encoded):
    return SUFFIXES[Image.open(io.BytesIO(encoded)).format]


def test_all_readers_have_the_pixels_of_pillow(tmp_path):
    encoded_by_name = dict(files(SIZE))
    encoded_by_name['jpeg turned right'] = encode(picture(*SIZE), 'JPEG', exif=oriented(8))
    expected = {
        name: reference(encoded)
        for name, encoded in encoded_by_name.items()
        if not any(word in name for word in NOT_AS_PILLOW)
    }
    assert len(expected) > 50
    check_readers(tmp_path, encoded_by_name, suffix_of, expected)


def test_the_ending_of_a_file_does_not_decide_about_its_format(tmp_path):
    encoded_by_name = {
        kind: encode(picture(*SIZE), kind, exif=oriented(orientation))
        for kind, orientation in {'PNG': 1, 'TIFF': 6, 'WEBP': 1}.items()
    }
    expected = {name: reference(encoded) for name, encoded in encoded_by_name.items()}
    check_readers(tmp_path, encoded_by_name, lambda encoded: '.jpg', expected)


@pytest.mark.parametrize('suffix', ['.heic', '.HEIF', '.hif', '.jpg'])
def test_all_readers_have_the_pixels_of_a_heic_photo(suffix, tmp_path):
    interop.require('pillow_heif')
    pictures = {mode: picture(*SIZE, mode) for mode in ('RGB', 'L', 'LA', 'RGBA')}
    encoded_by_name = {mode: heic(image) for mode, image in pictures.items()}
    encoded_by_name['turned'] = heic(pictures['RGB'], exif=oriented(6).tobytes())
    expected = {mode: np.asarray(image.convert('RGB')) for mode, image in pictures.items()}
    expected['turned'] = np.rot90(expected['RGB'], -1)
    check_readers(tmp_path, encoded_by_name, lambda encoded: suffix, expected)
