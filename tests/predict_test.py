import argparse
import contextlib
import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.support import small
from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.forked import Forked
from tests.support.parameters import apply, randomised
from tests.support.runs import ROOT, environment
from vit_jax import models, predict, weights
from vit_jax.data import images, table_cells
from vit_jax.inspection import attention, maps

FIELDS = models.fields('b16') | dict(
    patch_size=(4, 4), hidden_size=16, num_layers=1, mlp_dim=24, num_heads=2
)
PREPROCESS = dict(
    image_size=(16, 16),
    fit='cover',
    crop_ratio=0.9,
    resize='bicubic',
    antialias=True,
    mean=(0.4, 0.4, 0.4),
    std=(0.3, 0.3, 0.3),
)


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """Returns a file of weights, and a function from an image file to its probabilities."""
    path = tmp_path_factory.mktemp('predict') / 'w.safetensors'
    model = models.build(FIELDS, 3)
    params = jax.device_get(randomised(model, jnp.zeros((1, 16, 16, 3))))
    weights.save(
        weights.Weights(params, FIELDS, 3, ['ant', 'bee', 'cat'], PREPROCESS, 'vit_jax', 'test'),
        str(path),
        'vit_jax',
    )

    def probabilities(file):
        image = images.load(str(file), (16, 16), PREPROCESS)[None]
        return np.asarray(jax.nn.softmax(apply(model, {'params': params}, image)))[0]

    return path, probabilities


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp('images')
    write_images(root, ['one', 'two'], 3, size=(20, 30))
    return root


def test_json_has_the_best_classes_in_order(exported, folder, capsys):
    path, probabilities = exported
    assert (
        predict.main([f'--pretrained={path}', '--json', '--top=2', '--batch_size=4', str(folder)])
        == 0
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row['image'] for row in rows] == sorted(map(str, folder.glob('*/*.png')))
    for row in rows:
        expected = probabilities(row['image'])
        best = np.argsort(-expected)[:2]
        assert [c['class'] for c in row['classes']] == [['ant', 'bee', 'cat'][k] for k in best]
        np.testing.assert_allclose(
            [c['probability'] for c in row['classes']], expected[best], rtol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    'command', ['predict', pytest.param('evaluate', marks=pytest.mark.nightly)]
)
def test_two_cpu_devices_equal_one(command, exported, tmp_path):
    """Five images in batches of 4: the last batch is padded."""
    write_images(tmp_path / 'test', ['ant', 'bee', 'cat'], 2, size=(20, 30))
    (tmp_path / 'test' / 'bee' / '000.png').write_text('no image')
    found = []
    for cores in (1, 2):
        log, path = tmp_path / f'{cores}.log', tmp_path / f'{cores}.npz'
        code = f"""
import jax
from vit_jax import cli, {command}, machine
machine.cores = lambda: {cores}
code = {command}.main()
print('devices:', jax.device_count())
cli.leave(code)"""
        arguments = (
            [f'--features={path}', str(tmp_path / 'test')]
            if command == 'predict'
            else [f'--save={path}', f'--dataset={tmp_path}', '--split=test']
        )
        process = Forked([f'--pretrained={exported[0]}', '--batch_size=4', *arguments], log, code)
        assert process.wait(600) == 0, log.read_text()
        assert f'devices: {cores}\n' in log.read_text()
        with np.load(path) as arrays:
            found.append(arrays['representation' if command == 'predict' else 'logits'])
    assert len(found[0]) == 5
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)


def test_independent_classes_have_independent_probabilities(exported, folder, tmp_path, capsys):
    """The weights or the command state the loss; JSON states the activation."""
    path, _ = exported
    given, image = weights.load(str(path)), str(folder / 'one' / '000.png')
    stated = dataclasses.replace(given, loss='sigmoid')
    weights.save(stated, str(tmp_path / 'x.safetensors'), 'vit_jax')
    logits = np.asarray(
        apply(
            models.build(given.model, 3),
            {'params': given.params},
            images.load(image, (16, 16), PREPROCESS)[None],
        )
    )[0]
    expected = np.sort(1 / (1 + np.exp(-logits)))[::-1]
    for arguments in (
        [f'--pretrained={tmp_path}/x.safetensors'],
        [f'--pretrained={path}', '--loss=sigmoid'],
    ):
        assert predict.main([*arguments, '--json', image]) == 0
        (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert row['activation'] == 'sigmoid'
        np.testing.assert_allclose([c['probability'] for c in row['classes']], expected, rtol=1e-4)
        assert predict.main([*arguments, image]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        assert [line.startswith('*') for line in lines] == (expected >= 0.5).tolist()
    assert predict.main([f'--pretrained={path}', '--json', image]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]['activation'] == 'softmax'


def test_csv_and_features(exported, folder, tmp_path):
    path, probabilities = exported
    assert (
        predict.main(
            [
                f'--pretrained={path}',
                f'--csv={tmp_path / "p.csv"}',
                f'--features={tmp_path / "f.npz"}',
                str(folder / 'one'),
            ]
        )
        == 0
    )
    with open(tmp_path / 'p.csv', encoding='utf-8') as file:
        rows = list(csv.DictReader(file))
    features = np.load(tmp_path / 'f.npz')
    assert list(features['path']) == [row['image'] for row in rows]
    assert features['representation'].shape == (3, 16)
    for row in rows:
        assert float(row['probability1']) == pytest.approx(
            probabilities(row['image']).max(), rel=1e-4
        )


@pytest.mark.parametrize('option', ['--all_classes', '--all-classes'])
def test_csv_may_have_a_column_for_each_class(option, exported, folder, tmp_path):
    path, probabilities = exported
    table = tmp_path / 'p.csv'
    options = [f'--pretrained={path}', f'--csv={table}', option, str(folder / 'one')]
    assert predict.main(options) == 0
    with open(table, encoding='utf-8', newline='') as file:
        header, *rows = csv.reader(file)
    assert header == ['image', 'ant', 'bee', 'cat']
    assert len(rows) == 3
    for image, *values in rows:
        np.testing.assert_allclose(list(map(float, values)), probabilities(image), rtol=1e-4)


def test_all_classes_needs_a_table(capsys):
    with pytest.raises(SystemExit):
        predict.main(['--pretrained=x', '--all_classes', 'image.png'])
    assert '--all_classes applies to a table: add --csv' in capsys.readouterr().err


@pytest.mark.parametrize('extra', [[], ['--all_classes']])
def test_csv_has_no_formulas(extra, exported, folder, tmp_path, monkeypatch):
    names = ['=1+1', '@bee', "'-cat"]
    (tmp_path / 'names.txt').write_text('\n'.join(map(table_cells.cell, names)))
    shutil.copy(folder / 'one' / '000.png', tmp_path / '+1.png')
    monkeypatch.chdir(tmp_path)
    options = [f'--pretrained={exported[0]}', '--classes=names.txt', '--csv=p.csv', *extra]
    assert predict.main([*options, '+1.png']) == 0
    with open('p.csv', encoding='utf-8', newline='') as file:
        header, row = csv.reader(file)
    assert row[0] == "'+1.png"
    assert not [cell for cell in header + row if cell[0] in '=+-@']
    classes = header[1:] if extra else row[1::2]
    assert sorted(map(table_cells.text_of, classes)) == sorted(names)


def test_csv_may_have_paths_of_any_bytes(exported, folder, tmp_path):
    odd = shutil.copy(folder / 'one' / '000.png', str(tmp_path / '\udcfe.png'))
    assert predict.main([f'--pretrained={exported[0]}', f'--csv={tmp_path / "p.csv"}', odd]) == 0
    assert os.fsencode(odd) in (tmp_path / 'p.csv').read_bytes()


def test_printed_paths_may_have_any_bytes(exported, folder, tmp_path):
    """A terminal accepts UTF-8 only."""
    odd = shutil.copy(folder / 'one' / '000.png', str(tmp_path / '\udcfe.png'))
    with open(tmp_path / 'out', 'w', encoding='utf-8') as file, contextlib.redirect_stdout(file):
        assert predict.main([f'--pretrained={exported[0]}', odd]) == 0
    assert (tmp_path / 'out').read_text().splitlines()[0] == f'{tmp_path}/\\xfe.png'


@pytest.mark.parametrize('extra', [['--csv=CSV'], ['--json'], []])
def test_weights_without_a_head_give_features_only(extra, folder, tmp_path, caplog):
    weights.save(small.make('headless'), str(tmp_path / 'w.safetensors'), 'vit_jax')
    options = [
        f'--pretrained={tmp_path}/w.safetensors',
        str(folder / 'one'),
        *(option.replace('CSV', str(tmp_path / 'x.csv')) for option in extra),
    ]
    features = f'--features={tmp_path}/f.npz'
    assert predict.main([*options, *[features] * bool(extra)]) == 1
    assert 'has no head and therefore no classes: use --features=FILE.npz alone' in (
        caplog.records[-1].getMessage()
    )
    assert os.listdir(tmp_path) == ['w.safetensors']
    assert predict.main([*options[:2], features]) == 0


def test_unwritable_table_is_reported(exported, folder, tmp_path, caplog):
    (tmp_path / 'x.csv').symlink_to('/dev/full')
    assert (
        predict.main(
            [f'--pretrained={exported[0]}', f'--csv={tmp_path}/x.csv', str(folder / 'one')]
        )
        == 1
    )
    assert f'{tmp_path}/x.csv cannot be written (No space left' in caplog.records[-1].getMessage()


def test_table_is_written_if_the_disk_is_full_for_the_features(exported, folder, tmp_path, caplog):
    (tmp_path / 'f.npz').symlink_to('/dev/full')
    assert (
        predict.main(
            [
                f'--pretrained={exported[0]}',
                f'--csv={tmp_path}/x.csv',
                f'--features={tmp_path}/f.npz',
                str(folder / 'one'),
            ]
        )
        == 1
    )
    assert f'{tmp_path}/f.npz cannot be written' in caplog.records[-1].getMessage()
    assert (tmp_path / 'x.csv').read_text().startswith('image,class1,')


def test_other_files_in_a_directory_are_left_out(exported, folder, tmp_path, caplog):
    path, probabilities = exported
    mixed = shutil.copytree(folder / 'one', tmp_path / 'mixed')
    (mixed / '.thumbnails').mkdir()
    for name in ('001a.png', '._000.png', 'thesis.pdf', '.thumbnails/000.png'):
        (mixed / name).write_text('no image')
    table = tmp_path / 'p.csv'
    assert (
        predict.main([f'--pretrained={path}', f'--csv={table}', '--batch_size=2', str(mixed)]) == 0
    )
    assert [r.getMessage() for r in caplog.records if r.levelname == 'WARNING'] == [
        f'Left out an image: {str(mixed / "001a.png")!r} cannot be read: not an image of '
        f'{", ".join(images.FORMATS)} or HEIC.'
    ]
    with open(table, encoding='utf-8') as file:
        rows = list(csv.DictReader(file))
    assert [row['image'] for row in rows] == [str(mixed / f'00{k}.png') for k in range(3)]
    for row in rows:
        assert float(row['probability1']) == pytest.approx(
            probabilities(row['image']).max(), rel=1e-4
        )
    broken = tmp_path / 'broken'
    broken.mkdir()
    (mixed / '001a.png').rename(broken / 'a.png')
    for arguments, message in [
        ([str(broken / 'a.png')], 'none of the 1 images can be read'),
        ([str(broken)], 'none of the 1 images can be read'),
    ]:
        assert predict.main([f'--pretrained={path}', *arguments]) == 1
        assert message in caplog.records[-1].getMessage()


def test_predictions_that_are_not_finite_are_refused(folder, tmp_path, capsys, caplog):
    path = str(tmp_path / 'w.safetensors')
    weights.save(small.with_nan(small.make('vit')), path, 'vit_jax')
    arguments = [f'--pretrained={path}', '--json', str(folder)]
    assert predict.main(arguments) == 1
    assert 'not finite: 1 of 128 in norm/scale. Its training diverged' in caplog.text
    assert predict.main([*arguments, '--allow_nonfinite']) == 1
    assert 'gives values that are not finite for 6 of 6 images, ' in caplog.text
    assert 'NaN' not in capsys.readouterr().out


def test_images_after_a_broken_one_are_classified(exported, folder, tmp_path, capsys, caplog):
    path, _ = exported
    good, gone, broken = str(folder / 'one/000.png'), str(tmp_path / 'gone'), tmp_path / 'b.jpg'
    broken.write_text('no image')
    arguments = [good, str(broken), gone, str(folder / 'two')]
    assert predict.main([f'--pretrained={path}', '--json', '--batch_size=2', *arguments]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row['image'] for row in rows] == [good, *map(str, sorted(folder.glob('two/*.png')))]
    left_out = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
    assert [text.startswith('Left out an image: ') for text in left_out] == [True, True]
    assert caplog.records[-1].getMessage() == (
        f'error: 2 of the 3 images on the command line cannot be read: {broken}, {gone}. The '
        'other images are done.'
    )


@pytest.mark.parametrize(
    ('first', 'second'), [('csv', 'features'), ('csv', 'unsure'), ('features', 'attention')]
)
def test_two_outputs_in_one_file_are_refused(first, second, capsys):
    with pytest.raises(SystemExit):
        predict.main(['--pretrained=x', f'--{first}=a', f'--{second}=a', 'image.png'])
    assert f'--{first} and --{second} both name a: one would replace' in capsys.readouterr().err


def options_of(*arguments, **values):
    """The options of the command, without the exit code that hides the kind of an error."""
    names = dict.fromkeys(
        ('workdir', 'csv', 'features', 'unsure', 'attention', 'step', 'classes', 'loss')
    )
    numbers = dict(top=5, batch_size=4, all_classes=False, json=False, allow_nonfinite=False)
    lists = dict(model=[], preprocess=[], images=[str(path) for path in arguments])
    return argparse.Namespace(**names | numbers | lists | values)


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_unsure_photos_are_in_the_order_of_the_probabilities(loss, exported, folder, tmp_path):
    """Five photos in batches of two; one file is no image."""
    path, _ = exported
    photos = shutil.copytree(folder, tmp_path / 'photos')
    (photos / 'one' / '001.png').write_text('no image')
    table = tmp_path / 'next.csv'
    arguments = [f'--pretrained={path}', f'--loss={loss}', '--batch_size=2', str(photos)]
    probabilities = f'--csv={tmp_path / "all.csv"}'
    assert predict.main([f'--unsure={table}', probabilities, '--all_classes', *arguments]) == 0
    with open(tmp_path / 'all.csv', encoding='utf-8', newline='') as file:
        values = {
            row.pop('image'): [float(p) for p in row.values()] for row in csv.DictReader(file)
        }
    margins = {}
    for image, row in values.items():
        if loss == 'softmax':
            margins[image] = max(row) - sorted(row)[-2]
        else:
            margins[image] = np.abs(np.subtract(row, 0.5)).min()
    with open(table, encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert [row['file'] for row in rows] == sorted(margins, key=margins.get)
    for row in rows:
        assert float(row['margin']) == pytest.approx(margins[row['file']], abs=1e-9)
        column = 'labels' if loss == 'sigmoid' else 'label'
        assert row[column] == ''


def test_a_table_with_labels_is_not_replaced(exported, folder, tmp_path):
    table = tmp_path / 'next.csv'
    table.write_text('file,label')
    options = options_of(folder, pretrained=str(exported[0]), unsure=str(table))
    with refused('conflict', field='--unsure', file=table):
        predict.predict(options)
    assert table.read_text() == 'file,label'


def test_the_table_of_unsure_photos_may_be_stdout(exported, folder):
    code = f"""
from vit_jax import cli, predict
cli.leave(predict.main(['--pretrained={exported[0]}', '--unsure=/dev/stdout', '{folder}']))"""
    result = subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert sorted(row['file'] for row in rows) == sorted(map(str, folder.glob('*/*.png')))


@pytest.mark.parametrize('name', ['photo.jpg', 'photo'])
def test_unsure_does_not_replace_a_photo(name, exported, tmp_path):
    path = str(tmp_path / name)
    options = options_of(path, pretrained=str(exported[0]), unsure=path)
    with refused('value', field='--unsure', value=path):
        predict.predict(options)


def test_unsure_needs_two_classes_unless_they_are_independent(folder, tmp_path):
    given = small.with_classes(small.make('vit'), ['ant'])
    path = str(tmp_path / 'w.safetensors')
    weights.save(given, path, 'vit_jax')
    table = str(tmp_path / 'next.csv')
    with refused('inapplicable', field='--unsure', value=table):
        predict.predict(options_of(folder, pretrained=path, unsure=table))
    assert not os.path.exists(table)
    predict.predict(options_of(folder, pretrained=path, unsure=table, loss='sigmoid'))
    with open(table, encoding='utf-8', newline='') as file:
        assert len(list(csv.DictReader(file))) == 6


def test_each_readable_photo_has_a_picture_of_its_attention(
    exported, folder, tmp_path, caplog, capsys
):
    photos = shutil.copytree(folder, tmp_path / 'photos')
    (photos / 'one' / '001.png').write_text('no image')
    out = tmp_path / 'new' / 'maps'
    arguments = [f'--pretrained={exported[0]}', '--batch_size=2', f'--attention={out}']
    assert predict.main([*arguments, str(photos)]) == 0
    pictures = {str(path.relative_to(out)) for path in out.rglob('*') if path.is_file()}
    assert pictures == {f'{a}/{b}.png' for a in ('one', 'two') for b in ('000', '001', '002')} - {
        'one/001.png'
    }
    for name in pictures:
        with Image.open(out / name) as picture:
            pixels = np.asarray(picture.convert('RGB'))
        assert pixels.shape[1] == 900
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30
    assert 'Wrote 5 pictures' in caplog.text
    assert capsys.readouterr().out == ''


def test_attention_of_a_picture_is_that_of_the_inspection(exported, folder, tmp_path, monkeypatch):
    path, probabilities = exported
    drawn = {}

    def one_rollout(photo, values, title):
        drawn[title.split('\n')[0]] = (photo, values, title.split('\n')[1])
        return original(photo, values, title)

    original = predict.drawing.one_rollout
    monkeypatch.setattr(predict.drawing, 'one_rollout', one_rollout)
    monkeypatch.chdir(folder)
    assert predict.main([f'--pretrained={path}', f'--attention={tmp_path}/maps', 'one']) == 0
    assert sorted(drawn) == ['one/000.png', 'one/001.png', 'one/002.png']
    loaded = weights.build(weights.load(str(path)))
    observe = attention.observer(loaded.module)
    for name, (photo, values, caption) in drawn.items():
        image = images.load(name, (16, 16), PREPROCESS)
        expected = maps.rollout(observe(loaded.params, image[None]))[0]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
        assert values.shape == (4, 4)
        pixels = np.clip((image * 0.3 + 0.4) * 255, 0, 255)
        np.testing.assert_allclose(photo, pixels, atol=0.51)
        row = probabilities(name)
        assert caption == f'{["ant", "bee", "cat"][row.argmax()]}, {100 * row.max():.2f} %'


@pytest.mark.parametrize(
    ('paths', 'names'),
    [
        (['a/x.jpg', 'b/x.jpg'], ['a/x.png', 'b/x.png']),
        (['a/x.jpg', 'a/x.gif', 'a/x.jpg.png'], ['x.jpg.png', 'x.gif.png', 'x.jpg.png.png']),
        (['a/x.jpg'], ['x.png']),
        (['a/x.jpg', 'x.jpg', '../x.jpg'], ['w/a/x.png', 'w/x.png', 'x.png']),
        (['a/x.jpg', './a/x.jpg'], ['x.png', 'x.png']),
    ],
)
def test_pictures_of_different_photos_have_different_names(paths, names, tmp_path, monkeypatch):
    (tmp_path / 'w').mkdir()
    monkeypatch.chdir(tmp_path / 'w')
    assert predict.picture_names(paths) == dict(zip(paths, names, strict=True))


def test_pictures_are_not_replaced(exported, folder, tmp_path):
    (tmp_path / 'two').mkdir()
    existing = tmp_path / 'two' / '001.png'
    existing.write_text('mine')
    options = options_of(folder, pretrained=str(exported[0]), attention=str(tmp_path))
    with refused('conflict', field='--attention', file=existing):
        predict.predict(options)
    assert existing.read_text() == 'mine'
    assert sorted(os.listdir(tmp_path)) == ['two']


def test_attention_needs_a_directory(exported, folder, tmp_path):
    path = tmp_path / 'file'
    path.write_text('mine')
    options = options_of(folder, pretrained=str(exported[0]), attention=str(path))
    with refused('unwritable', field='--attention', file=path):
        predict.predict(options)


@pytest.mark.parametrize('name', ['bit', 'axial-resnet'])
def test_models_without_attention_are_refused(name, folder, tmp_path):
    path = str(tmp_path / 'w.safetensors')
    weights.save(small.make(name), path, 'vit_jax')
    out = str(tmp_path / 'maps')
    with refused('inapplicable', field='--attention', value=out) as caught:
        predict.predict(options_of(folder, pretrained=path, attention=out))
    assert 'has no attention between patches' in str(caught.value)
    assert not os.path.exists(out)


def test_attention_needs_no_head(folder, tmp_path):
    path = str(tmp_path / 'w.safetensors')
    weights.save(small.make('headless'), path, 'vit_jax')
    out = tmp_path / 'maps'
    predict.predict(options_of(folder / 'one', pretrained=path, attention=str(out)))
    assert sorted(os.listdir(out)) == ['000.png', '001.png', '002.png']


def test_titles_of_pictures_may_have_any_characters(exported, folder, tmp_path):
    photo = shutil.copy(folder / 'one' / '000.png', str(tmp_path / '$\\frac{\udcfe.png'))
    (tmp_path / 'names.txt').write_text('$\\frac{\n' * 3)
    options = [f'--pretrained={exported[0]}', f'--classes={tmp_path}/names.txt']
    assert predict.main([*options, f'--attention={tmp_path}/maps', photo]) == 0
    assert len(os.listdir(tmp_path / 'maps')) == 1


def test_images_of_five_channels_are_refused(folder):
    with refused('inapplicable', value=5):
        predict.run(small.make('rectangle'), [str(folder / 'one/000.png')], 1)


def test_printed_lines_and_messages(exported, folder, tmp_path, capsys, caplog):
    path, _ = exported
    image = str(folder / 'one' / '000.png')
    assert predict.main([f'--pretrained={path}', '--top=1', image]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == image
    assert second.split()[-1] in ('ant', 'bee', 'cat')
    for arguments, message in [
        ([str(tmp_path)], 'there are no images below'),
        ([str(folder / 'gone.png')], 'none of the 1'),
        ([image, '--batch_size=0'], 'batch_size is 0'),
        (
            [image, '--features=f.csv'],
            '--features is f.csv: expected a name that ends in .npz. Use --csv for a table',
        ),
        (
            ['--csv', image, image],
            f'--csv is {image}, the name of an image that the table would replace: expected the '
            'name of the table, as in',
        ),
        ([image, f'--csv={tmp_path}/no.jpg'], 'no.jpg, the name of an image'),
        ([image, '--top=0'], 'top is 0: expected a whole number'),
        ([image, f'--csv={tmp_path}/no/x.csv'], 'there is no directory'),
    ]:
        assert predict.main([f'--pretrained={path}', *arguments]) == 1
        assert message in caplog.records[-1].getMessage()
