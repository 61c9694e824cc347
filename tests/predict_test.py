import contextlib
import csv
import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small
from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.forked import Forked
from tests.support.parameters import apply, randomised
from vit_jax import models, predict, weights
from vit_jax.data import images, table_cells

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
        f'{", ".join(images.FORMATS)}.'
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


def test_csv_and_features_in_one_file_are_refused(capsys):
    with pytest.raises(SystemExit):
        predict.main(['--pretrained=x', '--csv=a', '--features=a', 'image.png'])
    assert '--csv and --features both name a: one would replace' in capsys.readouterr().err


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
