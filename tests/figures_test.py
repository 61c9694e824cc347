"""The command draws all possible figures, saves their arrays, and explains the other figures.

inspection/subject.py, inspection/arrays.py and drawing/ are tested here.
"""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from tests.inspection.runs_test import benchmark, rows, write_run
from tests.support import small
from tests.support.datasets import write_images
from tests.support.parameters import apply
from vit_jax import figures, models, weights
from vit_jax.drawing import canvas, photos, runs
from vit_jax.drawing import models as of_models
from vit_jax.inspection import attention, attribution, maps
from vit_jax.inspection import subject as subject_lib

PREPROCESS = dict(
    image_size=(16, 24),
    fit='squash',
    crop_ratio=1.0,
    resize='bilinear',
    antialias=True,
    mean=(0.4, 0.5, 0.6),
    std=(0.5, 0.4, 0.3),
)
OF_MODEL = {'filters', 'positions'}
OF_IMAGES = {'distance', 'rollout', 'attention', 'threshold', 'attribution', 'compare'}
OF_RUNS = {'compute', 'data_size', 'fewshot'}


@pytest.fixture(scope='module')
def given(tmp_path_factory):
    """A file of weights for images of 16x24 px in 4x6 patches, and three such images."""
    folder = tmp_path_factory.mktemp('figures')
    fields = small.MODELS['vit'] | dict(
        patch_size=(4, 4), hidden_size=32, num_layers=3, num_heads=2
    )
    own = small.Weights(
        None, models.fields('b16') | fields, 7, small.CLASSES, PREPROCESS, 'test', 'test'
    )
    params = small.randomised(models.build(own.model, 7), np.zeros((1, 16, 24, 3)))
    path = str(folder / 'w.safetensors')
    weights.save(dataclasses.replace(own, params=small.jax.device_get(params)), path, 'vit_jax')
    write_images(folder, ['one'], 3, size=(16, 24))
    return path, [str(folder / 'one' / f'00{k}.png') for k in range(3)]


def run(out, *arguments):
    return figures.main([f'--out={out}', *map(str, arguments)])


def arrays(out, name):
    return dict(np.load(out / f'{name}.npz'))


def assert_drawn(path):
    """Asserts that a picture is 900 pixels wide and not empty."""
    pixels = np.asarray(Image.open(path).convert('RGB'))
    assert pixels.shape[1] == 900
    assert (pixels != pixels[0, 0]).any(-1).mean() > 0.01, path
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30, path


def test_names_are_not_read_as_mathematics():
    figure, (axes,) = canvas.charts(1, r'$\frac{$')
    canvas.bare(axes, r'$\frac{$').plot([1, 2], label=r'$\frac{$')
    canvas.legend(figure, axes)
    figure.draw_without_rendering()


def test_figures_and_their_arrays_are_written(given, tmp_path, capsys):
    path, _ = given
    out = tmp_path / 'new' / 'folder'
    assert run(out, f'--pretrained={path}', '--only=positions,filters') == 0
    assert capsys.readouterr().out.splitlines() == [
        f'{name}: {out}/{name}.png and {out}/{name}.npz' for name in ('positions', 'filters')
    ]
    assert arrays(out, 'positions')['similarity'].shape == (4, 6, 4, 6)
    assert arrays(out, 'filters')['filters'].shape == (28, 4, 4, 3)
    for name in OF_MODEL:
        assert_drawn(out / f'{name}.png')


@pytest.mark.slow
def test_all_figures_of_a_model_are_drawn(given, tmp_path, capsys):
    path, images = given
    assert run(tmp_path, f'--pretrained={path}', *images) == 0
    drawn = OF_MODEL | OF_IMAGES
    assert {file.stem for file in tmp_path.glob('*.png')} == drawn
    assert {file.stem for file in tmp_path.glob('*.npz')} == drawn
    for name in drawn:
        assert_drawn(tmp_path / f'{name}.png')
    assert [line for line in capsys.readouterr().out.splitlines() if 'not drawn' in line] == [
        'compute: not drawn, because it needs runs: use --workdir once for each',
        'data_size: not drawn, because it needs runs: use --workdir once for each',
        'fewshot: not drawn, because it needs runs: use --workdir once for each',
        'speed: not drawn, because it needs --benchmark files, which vit_jax.benchmark --json '
        'prints',
    ]
    assert_arrays_equal_those_of_the_model(tmp_path, path, images)


def assert_arrays_equal_those_of_the_model(out, path, images):
    """Asserts that the arrays have the photos, and the model's attention for them."""
    own = weights.load(path)
    model, batch = models.build(own.model, 7), weights.prepare(own, images)
    seen = attention.observer(model)(own.params, batch)
    photos = np.stack([np.asarray(Image.open(image)) for image in images])
    for name in OF_IMAGES - {'distance'}:
        np.testing.assert_array_equal(arrays(out, name)['photos'], photos)
    np.testing.assert_allclose(arrays(out, 'rollout')['maps'], maps.rollout(seen), atol=1e-6)
    saved = arrays(out, 'distance')
    np.testing.assert_allclose(saved['distance'], maps.distances(seen, (4, 4)).mean(1), rtol=1e-5)
    np.testing.assert_allclose(saved['uniform'], maps.between_patches((4, 6), (4, 4)).mean())
    np.testing.assert_allclose(arrays(out, 'attention')['maps'], maps.of_query(seen)[-1], atol=1e-6)
    np.testing.assert_array_equal(
        arrays(out, 'threshold')['maps'], maps.most_of_mass(arrays(out, 'attention')['maps'])
    )
    logits = apply(model, {'params': own.params}, batch)
    expected = attribution.attributor(model)(own.params, batch, logits.argmax(-1))
    saved = arrays(out, 'attribution')
    np.testing.assert_allclose(saved['maps'], expected, atol=1e-4 * np.max(expected))
    assert [caption.split(',')[0] for caption in saved['captions']] == [
        small.CLASSES[k] for k in logits.argmax(-1)
    ]
    compared = arrays(out, 'compare')
    np.testing.assert_array_equal(compared['rollout'], arrays(out, 'rollout')['maps'])
    np.testing.assert_array_equal(compared['attribution'], saved['maps'])


@pytest.mark.parametrize(
    ('options', 'panels', 'chosen'),
    [
        pytest.param(
            ['--layer=1'],
            ['layer 1, head 0', 'layer 1, head 1'],
            lambda x: x[1],
            marks=pytest.mark.nightly,
        ),
        (
            ['--head=1'],
            ['layer 0, head 1', 'layer 1, head 1', 'layer 2, head 1'],
            lambda x: x[:, 1],
        ),
        (['--layer=0', '--head=1', '--query=3,5'], ['layer 0, head 1'], lambda x: x[:1, 1]),
    ],
)
def test_attention_of_a_chosen_layer_head_or_query(given, tmp_path, options, panels, chosen):
    path, images = given
    assert run(tmp_path, f'--pretrained={path}', '--only=attention', *options, images[0]) == 0
    own = weights.load(path)
    seen = attention.observer(models.build(own.model, 7))(
        own.params, weights.prepare(own, images[:1])
    )
    query = (3, 5) if len(options) == 3 else None
    saved = arrays(tmp_path, 'attention')
    assert saved['panels'].tolist() == panels
    assert saved['query'].tolist() == list(query or ())
    np.testing.assert_allclose(
        saved['maps'][0], chosen(np.asarray(maps.of_query(seen, query))[:, 0]), atol=1e-6
    )


@pytest.mark.slow
def test_figures_have_the_chosen_format_and_class(given, tmp_path):
    path, images = given
    for ending, start in (('pdf', b'%PDF'), ('svg', b'<?xml')):
        options = ['--only=attribution', f'--format={ending}', '--class=gnu']
        assert run(tmp_path, f'--pretrained={path}', *options, images[0]) == 0
        assert (tmp_path / f'attribution.{ending}').read_bytes().startswith(start)
    assert arrays(tmp_path, 'attribution')['captions'][0].startswith('gnu, ')


def test_a_model_without_attention_has_only_filters(tmp_path, capsys, caplog):
    path = str(tmp_path / 'w.safetensors')
    weights.save(small.make('bit'), path, 'vit_jax')
    assert run(tmp_path / 'out', f'--pretrained={path}', 'photo.jpg') == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('filters: ')
    assert lines[1] == 'positions: not drawn, because a ResNet has no position embedding of patches'
    assert lines[2:8] == [
        f'{name}: not drawn, because a ResNet has no attention between patches'
        for name in figures.FIGURES
        if name in OF_IMAGES
    ]
    assert run(tmp_path, f'--pretrained={path}', '--only=filters,rollout', 'photo.jpg') == 1
    assert caplog.records[-1].getMessage() == (
        'error: rollout cannot be drawn: a ResNet has no attention between patches.'
    )


@pytest.mark.slow
def test_figures_of_runs_are_drawn(tmp_path, capsys, caplog):
    workdirs = [
        write_run(tmp_path / 'a', rows(0.5, 0.75, shots=True)),
        write_run(tmp_path / 'b', rows(0.4, 0.5, shots=True), examples=300),
    ]
    options = [f'--workdir={workdir}' for workdir in workdirs]
    assert run(tmp_path / 'out', *options) == 0
    assert {file.stem for file in (tmp_path / 'out').glob('*.png')} == OF_RUNS
    for name in OF_RUNS:
        assert_drawn(tmp_path / 'out' / f'{name}.png')
        np.testing.assert_array_equal(
            arrays(tmp_path / 'out', name)['accuracy'], [0.5, 0.75, 0.4, 0.5]
        )
    assert (
        'rollout: not drawn, because it needs one model: use one --workdir or --pretrained'
        in capsys.readouterr().out.splitlines()
    )
    empty = write_run(tmp_path / 'c', [])
    assert run(tmp_path / 'out', *options, f'--workdir={empty}', '--only=compute') == 0
    assert 'Skipped runs that have no evaluation' in caplog.records[-1].getMessage()
    np.testing.assert_array_equal(
        arrays(tmp_path / 'out', 'compute')['accuracy'], [0.5, 0.75, 0.4, 0.5]
    )
    assert run(tmp_path / 'out', f'--workdir={empty}', '--only=compute') == 1
    assert (
        f'compute cannot be drawn: these runs have no evaluation (eval/accuracy in '
        f'metrics.jsonl): {empty}'
    ) in caplog.records[-1].getMessage()


def test_runs_of_one_model_are_labelled_by_their_workdirs(tmp_path):
    """No line joins two runs with the same number of images."""
    same = [write_run(tmp_path / name / 'run', rows(0.5, 0.75)) for name in 'ab']
    wider = write_run(tmp_path / 'c', rows(0.5), model={'hidden_size': 32})
    assert run(tmp_path, *(f'--workdir={x}' for x in (*same, wider))) == 0
    saved = arrays(tmp_path, 'compute')
    (axes,) = runs.compute(saved, '').axes
    labels = [text.get_text() for text in axes.texts]
    assert labels == ['16x2 of a/run', '16x2 of b/run', '32x2']
    (axes, *_) = runs.data_size(saved, '').axes
    assert {line.get_label(): len(line.get_xdata()) for line in axes.lines} == {
        '16x2 of a/run': 1,
        '16x2 of b/run': 1,
        '32x2': 1,
    }


def test_runs_of_one_model_with_different_numbers_of_images_are_one_line(tmp_path):
    workdirs = [write_run(tmp_path / f'{n}', rows(0.5), examples=n) for n in (300, 1000)]
    assert run(tmp_path, *(f'--workdir={x}' for x in workdirs), '--only=data_size') == 0
    (axes, *_) = runs.data_size(arrays(tmp_path, 'data_size'), '').axes
    (line,) = axes.lines
    assert (line.get_label(), line.get_xdata().tolist()) == ('16x2', [300, 1000])


def test_names_of_runs_are_as_short_as_possible():
    assert runs.names_of_runs(['/x/a/run', '/y/a/run']) == {
        '/x/a/run': 'x/a/run',
        '/y/a/run': 'y/a/run',
    }


@pytest.mark.parametrize(
    ('kept', 'text'),
    [
        ([(0, 0), (13, 13), (0, 13)], '3 patches of 196\nall in the corners'),
        ([(0, 0), (5, 5)], '2 patches of 196'),
        ([(5, 5)], '1 patch of 196'),
    ],
)
def test_the_threshold_picture_has_the_number_of_patches(kept, text):
    values = np.zeros((14, 14), bool)
    for patch in kept:
        values[patch] = True
    figure = photos.threshold(
        {
            'photos': np.zeros((1, 56, 56, 3), np.uint8),
            'maps': values[None, None],
            'panels': np.array(['head 0']),
            'what': np.array('patches'),
        },
        '',
    )
    assert [t.get_text() for axes in figure.axes for t in axes.texts] == [text]


@pytest.mark.parametrize(('count', 'text'), [(1, 'mean over 1 image of'), (2, 'over 2 images of')])
def test_the_number_of_images_has_its_noun(count, text):
    distances = {
        'distance': np.ones((2, 3)),
        'of_each_image': np.ones((count, 2, 3)),
        'uniform': np.array(1.0),
        'image_size': np.array([16, 16]),
    }
    assert text in of_models.distance(distances, '').get_suptitle()


def test_the_figure_of_speed_is_drawn(tmp_path):
    options = []
    for size, batch, rate in ((32, 8, 90.0), (32, 64, 120.0), (64, 16, 30.0)):
        file = tmp_path / f'{size}-{batch}'
        options.append(f'--benchmark={file}')
        subjects = {'inference': {'images_per_second': rate}}
        result = benchmark(image_size=[size, size], batch_size=batch, subjects=subjects)
        file.write_text(json.dumps(result))
    assert run(tmp_path, *options) == 0
    assert_drawn(tmp_path / 'speed.png')
    assert arrays(tmp_path, 'speed')['images_per_second'].tolist() == [90, 120, 30]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--only=rolout', 'IMAGE'],
            "--only is 'rolout'. Did you mean rollout? It is one of: "
            'filters, positions, distance, rollout, attention, threshold, attribution, '
            'compare, compute, '
            'data_size, fewshot, speed.',
        ),
        (['--only=rollout'], 'rollout cannot be drawn: it needs images: name image files.'),
        (['--only=rollout', 'gone.jpg'], "there is no image 'gone.jpg'"),
        (['--only=compare', 'IMAGE', 'TEXT'], 'cannot be read: not an image of'),
        (
            ['--only=rollout', '--query=4,0', 'IMAGE'],
            '--query is 4,0: expected ROW,COLUMN of one of the 4x6 patches, from 0,0 to 3,5.',
        ),
        (['--only=attention', '--query=-1', 'IMAGE'], '--query is -1: expected ROW,COLUMN'),
        (['--layer=3', '--only=distance', 'IMAGE'], '--layer is 3: expected a whole number from 0'),
        (['--only=attention', '--head=2', 'IMAGE'], '--head is 2: expected a whole number from 0'),
        (['--only=attribution', '--class=gnn', 'IMAGE'], '--class is gnn: Did you mean gnu?'),
        (['--workdir=DIR', '--only=filters'], 'filters cannot be drawn: it needs one model'),
        (
            ['--only=compute', '--workdir=DIR'],
            '--workdir is DIR, which is not the workdir of a run',
        ),
    ],
)
def test_impossible_options_are_refused(given, tmp_path, arguments, message, caplog):
    path, images = given
    (tmp_path / 'x.png').write_text('no image')
    words = {
        'IMAGE': images[0],
        'TEXT': str(tmp_path / 'x.png'),
    }
    assert run(tmp_path, f'--pretrained={path}', *(words.get(a, a) for a in arguments)) == 1
    assert message in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ('below', 'message'),
    [('', 'which is a file: expected a directory'), ('/x', 'cannot be written (Not a directory)')],
)
def test_a_file_is_refused_as_the_directory_of_figures(given, below, message, caplog):
    path, _ = given
    assert figures.main([f'--pretrained={path}', f'--out={path}{below}']) == 1
    assert message in caplog.records[-1].getMessage()


def test_a_command_without_sources_is_refused(tmp_path, caplog):
    for arguments in ([], ['photo.jpg']):
        assert run(tmp_path, *arguments) == 1
        assert caplog.records[-1].getMessage() == (
            'error: There is nothing to draw: use --workdir, --pretrained or --benchmark.'
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        'map',
        'headless',
        'hybrid',
        'axial',
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ('gap', 'no-position', 'hidden-head', 'sincos', 'root')
        ),
    ],
)
def test_every_kind_of_model_has_finite_arrays(name):
    own = small.make(name)
    model = models.build(own.model, own.num_classes)
    subject = subject_lib.Subject(weights.Loaded(own, model, own.params))
    images = 0.1 * small.images(own)
    subject.__dict__['images'] = images, np.zeros(images.shape, np.uint8)
    missing = {'no-position': {'positions'}, 'headless': {'attribution'}}.get(name, set())
    for figure in (OF_MODEL | OF_IMAGES) - missing:
        for key, x in figures.FIGURES[figure].arrays(subject).items():
            assert x.dtype.kind in 'US' or np.isfinite(x).all(), (figure, key)
    assert ('attribution' in figures.FIGURES['compare'].arrays(subject)) == (name != 'headless')
    for figure in missing:
        with pytest.raises(figures.Inapplicable):
            figures.FIGURES[figure].arrays(subject)


def test_every_run_is_in_the_legend(tmp_path):
    """Matplotlib omits labels that start with an underscore."""
    workdirs = [
        write_run(tmp_path / name / 'run', rows(0.5, 0.75, shots=True))
        for name in ('_sweep', 'other')
    ]
    assert run(tmp_path, *(f'--workdir={x}' for x in workdirs), '--only=fewshot') == 0
    figure = runs.fewshot(arrays(tmp_path, 'fewshot'), '')
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert all(any(f'{name}/run' in label for label in labels) for name in ('_sweep', 'other'))
