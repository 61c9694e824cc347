"""The folder of --to=web in Chromium: exact, private, by mouse and keyboard, light and dark."""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
from PIL import ExifTags, Image
from sklearn import datasets

from tests.support import interop, small
from tests.support.browser import browser, require_runtime, served
from tests.support.images import picture
from tests.support.photos import DATA, needs_photos, photos
from vit_jax import config, web, weights
from vit_jax.data import images, resizing
from vit_jax.weights import verify

pytestmark = pytest.mark.slow
STATUS = "document.getElementById('status').textContent"
EVIL = [
    '<script>window.hacked = 1</script>',
    '"><img src=x onerror="window.hacked = 1">',
    '&lt;b&gt;',
    'dog',
    "'",
    'ä 犬',
    'a plant whose name no line of a phone is long enough for',
]
SIZE = (16, 12)
SHAPES = {
    'large': (1100, 1500),
    'small': (11, 9),
    'flat': (3, 900),
    'thin': (1300, 2),
    'fits': SIZE,
    'photo': (90, 131),
}
CHAINS = [
    (method, antialias, False) for method in resizing.RESAMPLING for antialias in (True, False)
]
# Rounded like Pillow, which computes in whole numbers of 22 bits; the page has fractions.
ROUNDED = [('bilinear', True, True), ('bicubic', True, True)]


@pytest.fixture(scope='module')
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope='module')
def models():
    given = dataclasses.replace(small.make('vit'), classes=EVIL)
    params = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), given.params)
    return {'softmax': given, 'sigmoid': dataclasses.replace(given, loss='sigmoid', params=params)}


@pytest.fixture(scope='module')
def pages(models, tmp_path_factory):
    """(folder, address) with a page for each of `models`, moved there, and photos."""
    interop.require('jax2onnx')
    require_runtime()
    path = tmp_path_factory.mktemp('pages')
    for name, given in models.items():
        web.save(given, str(path / 'new'))
        os.rename(path / 'new', path / name)
    for name, shape in SHAPES.items():
        picture(*shape).save(path / f'{name}.png')
    photo = Image.open(datasets.load_sample_images().filenames[1])  # 640 x 427
    photo.save(path / 'flower.png')
    photo.save(path / 'flower.jpg', quality=90)
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[ExifTags.Base.Orientation] = orientation
        photo.save(path / f'turned{orientation}.png', exif=exif)
    photo.putalpha(Image.linear_gradient('L').resize(photo.size))
    photo.save(path / 'transparent.png')
    (path / 'broken.jpg').write_bytes((path / 'flower.jpg').read_bytes()[:5000])
    with served(path) as address:
        yield path, address


def opened(chromium, address, **window):
    for found in (chromium.requests, chromium.messages, chromium.errors):
        found.clear()
    chromium.open(address, **window)
    chromium.until(f"{STATUS}.includes('is ready')")


def called(chromium, function, name, *arguments):
    """The result of a function of the page for a file next to its folder."""
    return chromium.evaluate(
        f"import('./page.js').then(async (page) => {{ const file = await (await fetch('../{name}'))"
        f'.blob(); const found = await page.{function}({", ".join(["file", *arguments])}); return '
        '{...found, pixels: [...found.pixels]}; })'
    )


def taken(chromium, name):
    """The text of the page after it has classified a file."""
    chromium.until(f'!/is ready|^Looking/.test({STATUS}) && {STATUS}.startsWith({name!r})')
    return chromium.evaluate(STATUS)


@pytest.mark.parametrize('fit', config.FIELDS['preprocess.fit'].values.choices)
def test_pixels_equal_those_of_predict(fit, chromium, pages):
    """The difference is at most 0.01 grey levels, or 1 where passes are rounded."""
    path, address = pages
    opened(chromium, f'{address}softmax/')
    for method, antialias, rounded in [*CHAINS, *ROUNDED, ('area', True, False)]:
        preprocess = small.PREPROCESS | dict(
            fit=fit, resize=method, antialias=antialias, uint8_resize=rounded
        )
        record = preprocess | dict(
            image_size=SIZE, target_size=resizing.target_size(SIZE, preprocess)
        )
        for name in SHAPES:
            found = called(chromium, 'see', f'{name}.png', json.dumps(record))['pixels']
            expected = images.load(
                str(path / f'{name}.png'), SIZE, preprocess | dict(mean=0.0, std=1 / 255)
            )
            np.testing.assert_allclose(
                np.reshape(found, (*SIZE, 3)),
                expected,
                atol=1.001 if rounded else 0.01,
                err_msg=f'{name} by {method}',
            )


def differences(chromium, given, path, names):
    """The largest difference from our logits and probabilities for files next to the page.

    It also prints the largest of all, and times: the fastest and the median.
    """
    batch = weights.prepare(given, [str(path / name) for name in names])
    ours = verify.logits(given, batch), weights.predictor(given)(batch)[1]
    found = [called(chromium, 'classify', name) for name in names]
    largest = [
        max(
            np.abs(one[what] - expected[k]).max()
            for what, expected in zip(('logits', 'probabilities'), ours, strict=True)
        )
        for k, one in enumerate(found)
    ]
    times = {what: np.sort([one[what] for one in found]) for what in ('reading', 'model')}
    print(
        f'{names[0]} and others: largest difference {max(largest):.2g}; '
        + '; '.join(f'{what} {x[0]:.0f} ms, median {np.median(x):.0f}' for what, x in times.items())
    )
    return largest


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_logits_and_probabilities_equal_ours(loss, chromium, models, pages):
    """The photo has all orientations, and is last a JPEG, whose decoders may differ."""
    path, address = pages
    opened(chromium, f'{address}{loss}/')
    found = differences(
        chromium,
        models[loss],
        path,
        ['flower.png', *(f'turned{k}.png' for k in range(1, 9)), 'flower.jpg'],
    )
    assert max(found[:-1]) < 1e-4
    assert found[-1] < 0.01


@needs_photos
def test_released_weights_give_our_logits_on_photos(chromium, tmp_path):
    """The logits of ViT-Ti/16 reach 17."""
    require_runtime()
    given = weights.load(str(DATA / 'vit_tiny_patch16_224.safetensors'))
    web.save(given, str(tmp_path / 'page'))
    for k, photo in enumerate(photos()):
        for kind in ('png', 'jpg'):
            photo.save(tmp_path / f'{k}.{kind}')
    with served(tmp_path) as address:
        opened(chromium, f'{address}page/')
        for kind, most in (('png', 1e-4), ('jpg', 0.05)):
            names = [f'{k}.{kind}' for k in range(20)]
            assert max(differences(chromium, given, tmp_path, names)) < most


@pytest.mark.parametrize(('width', 'dark'), [(1280, False), (390, True)])
def test_a_photo_is_classified_and_no_other_file_requested(width, dark, chromium, models, pages):
    path, address = pages
    opened(chromium, f'{address}softmax/', width=width, dark=dark, touch=width < 500)
    chromium.drop(*chromium.place('footer'), path / 'flower.png')
    assert 'It took ' in taken(chromium, 'flower.png: ')
    assert chromium.evaluate("document.getElementById('file').files[0].name") == 'flower.png'
    given = models['softmax']
    batch = weights.prepare(given, [str(path / 'flower.png')])
    probabilities = weights.predictor(given)(batch)[1][0].tolist()
    best = sorted(zip(probabilities, EVIL, strict=True), reverse=True)[:5]
    assert chromium.evaluate(
        "[...document.querySelectorAll('#best li')].map((line) => [...line.children].slice(0, 2)"
        '.map((part) => part.textContent))'
    ) == [[name, f'{100 * p:.1f}\xa0%'] for p, name in best]
    bars = chromium.evaluate(
        "[...document.querySelectorAll('#best .bar')].map((bar) => "
        "getComputedStyle(bar).getPropertyValue('--v'))"
    )
    np.testing.assert_allclose([float(x) for x in bars], [p for p, _ in best], atol=1e-4)
    assert chromium.evaluate('window.hacked') is None
    assert chromium.evaluate('document.documentElement.scrollWidth') <= width
    assert set(chromium.requests) == {
        f'{address}softmax/{name}' for name in ('', *set(web.FILES) - {'index.html'})
    }
    assert (chromium.messages, chromium.errors) == ([], [])


def test_the_policy_blocks_other_addresses(chromium, pages):
    opened(chromium, f'{pages[1]}softmax/')
    assert chromium.evaluate("""new Promise((done) => {
        const found = [];
        addEventListener('securitypolicyviolation', (event) => {
            found.push(event.effectiveDirective);
            if (found.length === 2) done(found.sort());
        });
        fetch('http://127.0.0.1:9/').catch(() => {});
        new Image().src = 'http://127.0.0.1:9/x.png';
    })""") == ['connect-src', 'img-src']
    chromium.errors.clear()


def test_light_and_dark_modes_have_their_own_colours(chromium, pages):
    found = []
    for dark in (False, True):
        opened(chromium, f'{pages[1]}softmax/', dark=dark)
        found.append(
            chromium.evaluate(
                "['body', 'section', 'h1'].map((name) => getComputedStyle("
                'document.querySelector(name))).map((s, k) => '
                '[s.backgroundColor, s.borderColor, s.color][k])'
            )
        )
    assert all(a != b for a, b in zip(*found, strict=True))


def test_the_page_works_by_keyboard(chromium, pages):
    opened(chromium, f'{pages[1]}softmax/')
    chromium.press('Tab')
    assert chromium.evaluate('document.activeElement.id') == 'file'
    assert chromium.evaluate('getComputedStyle(document.activeElement).outlineStyle') == 'solid'
    assert chromium.evaluate('document.activeElement.labels[0].textContent') == (
        'Drop a photo anywhere on this page, or choose one.'
    )


def test_messages_of_the_page(chromium, pages, tmp_path):
    path, address = pages
    opened(chromium, f'{address}sigmoid/')
    chromium.choose('#file', path / 'transparent.png')
    taken(chromium, 'transparent.png: ')
    note = chromium.evaluate("document.getElementById('note').textContent")
    assert note == (
        'Each class has its own probability; classes from 50 % on are bold. '
        'Transparent parts of this picture count as black.'
    )
    probabilities = [
        float(x.split('\xa0')[0])
        for x in chromium.evaluate(
            "[...document.querySelectorAll('#best .n')].map((e) => e.textContent)"
        )
    ]
    assert chromium.evaluate(
        "[...document.querySelectorAll('#best li')].map((e) => "
        'getComputedStyle(e).fontWeight > 500)'
    ) == [p >= 50 for p in probabilities]
    chromium.choose('#file', path / 'broken.jpg')
    assert 'it is damaged, too large, or no photo' in taken(chromium, 'broken.jpg cannot be read: ')
    assert chromium.evaluate("document.getElementById('result').hidden")
    chromium.evaluate("dispatchEvent(new DragEvent('drop', {dataTransfer: new DataTransfer()}))")
    taken(chromium, 'That is not a file')
    chromium.choose('#file', path / 'large.png')  # the next photo does not wait for this one
    chromium.choose('#file', path / 'flower.png')
    taken(chromium, 'flower.png: ')
    assert (chromium.messages, chromium.errors) == ([], [])


def test_a_page_that_cannot_work_explains_it(chromium, pages, tmp_path):
    path, address = pages
    chromium.open(path / 'softmax/index.html')
    chromium.until("getComputedStyle(document.getElementById('status')).visibility === 'visible'")
    assert 'opened as a file: run python -m http.server in' in chromium.evaluate(STATUS)
    shutil.copytree(path / 'softmax', path / 'partial')
    os.remove(path / 'partial/model.onnx')
    chromium.open(f'{address}partial/')
    chromium.until(f"{STATUS}.startsWith('The model cannot be loaded: ')")
    chromium.errors.clear()
