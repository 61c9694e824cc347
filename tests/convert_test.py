"""The command that converts: what it writes, how it verifies, what it refuses."""

import importlib.util
import logging
import os

import numpy as np
import pytest

from tests.support import interop, small
from tests.support.runs import check_message, run_here
from vit_jax import convert, weights
from vit_jax.config import base
from vit_jax.errors import UserError
from vit_jax.weights import verify


@pytest.fixture
def source(tmp_path):
    """Writes a small model as a file of this project: (name of small.MODELS, fields) -> path."""

    def write(name='vit', **change):
        path = str(tmp_path / f'{name}.safetensors')
        weights.save(small.make(name, **change), path, 'vit_jax')
        return path

    return write


def run(*arguments):
    return run_here(*arguments, command=convert)


def test_command(source, tmp_path):
    result = run(source(), tmp_path / 'x.npz', '--to=google', '--dtype=float16')
    assert result.returncode == 0, result.stderr
    assert 'x.npz (google): 209,351 parameters, float16, 7 classes' in result.stderr
    found = weights.load(str(tmp_path / 'x.npz'))
    assert found.params['cls'].dtype == np.float16
    check_message(
        run(source(), tmp_path / 'x.npz', '--to=google'),
        'x.npz exists already: name another destination, or add --overwrite.',
    )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['missing.npz', 'x', '--to=timm'],
            "error: there is no file 'missing.npz': expected a file",
        ),
        (['setup.py', 'x', '--to=timm'], 'error: setup.py is not a weights file: it begins with b'),
        (['setup.py', 'x', '--to=onnx'], "error: 'x' is not a name for onnx: a name ending in"),
        (
            ['setup.py', 'x.onnx', '--to=huggingface'],
            "error: 'x.onnx' is not a name for huggingface",
        ),
        (
            ['setup.py', 'x.onnx', '--to=web'],
            "error: 'x.onnx' is not a name for web: a name ending in",
        ),
        (
            ['setup.py', 'x.npz', '--to=web'],
            "error: 'x.npz' is not a name for web, which is a folder",
        ),
        (
            ['setup.py', 'x', '--to=timm', '--runtime=y.tgz'],
            '--runtime=y.tgz is for --to=web, and for',
        ),
        (['setup.py', 'no/x', '--to=timm'], 'no/x cannot be written: there is no directory no'),
    ],
)
def test_messages_of_the_command(arguments, message):
    check_message(run(*arguments), message)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['a.npz', '--to=timm'], 'the following arguments are required: DST'),
        (['a', 'b'], 'the following arguments are required: --to'),
        (['a', 'b', '--to=tim'], "invalid choice: 'tim' (choose from "),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        convert.main(arguments)
    assert message in capsys.readouterr().err


def verified(caplog):
    return next(line for line in caplog.messages if line.startswith('verified by '))


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger='vit_jax')


@pytest.mark.parametrize(
    ('model', 'to', 'name', 'how'),
    [
        ('vit', 'timm', 'x', 'timm '),
        pytest.param('map', 'timm', 'x.pth', 'timm ', marks=pytest.mark.slow),
        pytest.param('gap', 'google', 'x.npz', 'the .npz reader of timm', marks=pytest.mark.slow),
        ('vit', 'huggingface', 'x', 'transformers '),
        (
            'hidden-head',
            'torchvision',
            'x.pth',
            'torchvision '
            if importlib.util.find_spec('torchvision')
            else 'reading back, because a program that reads torchvision cannot be',
        ),
        pytest.param(
            'hidden-head',
            'google',
            'x.npz',
            'reading back, because timm computes this model by other',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            'axial',
            'vit_jax',
            'x.safetensors',
            "reading back, because layout vit_jax is this project's",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_verified_by_the_other_program_where_that_is_possible(
    model, to, name, how, source, tmp_path, caplog
):
    interop.import_timm()
    interop.require('transformers')
    inexact = name == 'x.pth'
    convert.convert(source(model), str(tmp_path / name), to, verify=True, inexact=inexact)
    assert verified(caplog).startswith(f'verified by {how}')
    assert ('--inexact, with --dtype if given, changed logits by up to' in caplog.text) == inexact


@pytest.mark.parametrize(
    ('to', 'dtype', 'how'),
    [
        ('timm', None, 'timm '),
        *(
            pytest.param('onnx', dtype, 'onnxruntime ', marks=pytest.mark.slow)
            for dtype in ('bfloat16', None)
        ),
        pytest.param('stablehlo', 'bfloat16', 'jax.export ', marks=pytest.mark.slow),
        ('big_vision', 'bfloat16', 'reading back, because timm reads no bfloat16'),
    ],
)
def test_models_trained_in_bfloat16_are_verified_in_float32(
    to, dtype, how, source, tmp_path, caplog
):
    interop.import_timm()
    interop.require('jax2onnx')
    path = str(tmp_path / {'timm': 'x', 'big_vision': 'x.npz'}.get(to, f'x.{to}'))
    convert.convert(source('gap', dtype='bfloat16'), path, to, verify=True, dtype=dtype)
    assert verified(caplog).startswith(f'verified by {how}')


def test_googles_file_of_bfloat16_is_refused(source, tmp_path):
    """Neither Google's own code nor timm could read it."""
    with pytest.raises(
        UserError,
        match="bfloat16.*Google's code and timm cannot read them: add "
        '--dtype=float32, or --to=big_vision',
    ):
        convert.convert(source(), str(tmp_path / 'x.npz'), 'google', dtype='bfloat16', verify=True)
    assert not (tmp_path / 'x.npz').exists()


def test_weights_that_are_not_finite(tmp_path, caplog):
    path = str(tmp_path / 'x.safetensors')
    weights.save(small.with_nan(small.make('vit')), path, 'vit_jax')
    assert convert.main([path, str(tmp_path / 'y.npz'), '--to=google']) == 1
    assert 'x.safetensors has values that are not finite: 1 of 128 in norm/scale' in caplog.text
    assert 'predict and convert have --allow-nonfinite' in caplog.text
    assert convert.main([path, str(tmp_path / 'y.npz'), '--to=google', '--allow-nonfinite']) == 0
    assert (
        convert.main(
            [path, str(tmp_path / 'y.safetensors'), '--to=vit_jax', '--verify', '--allow-nonfinite']
        )
        == 1
    )
    assert 'y.safetensors gives other logits than' in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ('to', 'name', 'lost'),
    [
        ('timm', 'x', True),
        ('timm', 'x.safetensors', True),
        ('huggingface', 'x', False),
        ('vit_jax', 'y.safetensors', False),
    ],
)
def test_a_layout_that_has_no_place_for_the_loss_is_told(to, name, lost, source, tmp_path, caplog):
    convert.convert(source(gelu='erf'), str(tmp_path / name), to, loss='sigmoid')
    said = [r.getMessage() for r in caplog.records if 'does not hold' in r.getMessage()]
    assert len(said) == lost
    assert all(text.endswith('--loss=sigmoid: say it where the file is used') for text in said)
    found = weights.load(str(tmp_path / name))
    assert found.loss == (None if lost else 'sigmoid')


def test_what_weights_do_not_say(source, tmp_path, caplog):
    path, names = str(tmp_path / 'x.npz'), tmp_path / 'names.txt'
    convert.convert(source(), path, 'google')
    assert (
        f'{path} does not hold --preprocess=fit=squash,antialias=True,uint8_resize=True,'
        'crop_ratio=0.8,resize=bicubic,mean=0.4,0.5,0.6,std=0.3,0.2,0.1, the names of the classes: '
        'say it where'
    ) in caplog.text
    convert.convert(source('rectangle'), path, 'google', overwrite=True)
    assert 'std=0.3,0.2,0.1,image_size=16,12, the names' in caplog.text
    assert weights.described(weights.load(path), ['mean=0,0,0,image_size=16,12']).image_size() == (
        16,
        12,
    )
    path = str(tmp_path / 'x.safetensors')
    convert.convert(source(), path, 'timm', inexact=True)
    names.write_text('\n'.join(small.CLASSES))
    convert.convert(
        path,
        str(tmp_path / 'x'),
        'huggingface',
        preprocess=['mean=0.1,0.2,0.3'],
        classes=str(names),
    )
    assert (
        f'{path} does not say antialias, crop_ratio, fit, resize, std, uint8_resize of images'
        in caplog.text
    )
    found = weights.load(str(tmp_path / 'x'))
    assert found.classes == small.CLASSES
    assert found.preprocess.pop('crop_ratio') == 16 / round(16 / base().preprocess.crop_ratio)
    assert found.preprocess == dict(
        image_size=(16, 16),
        fit='transformers',
        antialias=True,
        uint8_resize=True,
        resize='bilinear',
        mean=(0.1, 0.2, 0.3),
        std=base().preprocess.std,
    )


def test_directories_for_timm_say_how_images_are_prepared(source, tmp_path):
    """Also where the file does not: by defaults, or as files of its layout are prepared."""
    for name, layout, expected in [
        ('x.safetensors', 'timm', dict(fit='torchvision', uint8_resize=True)),
        ('x.npz', 'google', dict(fit='squash', crop_ratio=1.0, uint8_resize=True)),
    ]:
        convert.convert(source(), str(tmp_path / name), layout, inexact=True)
        convert.convert(str(tmp_path / name), str(tmp_path / layout), 'timm')
        assert (
            weights.load(str(tmp_path / layout)).preprocess
            == dict(base().preprocess, image_size=(16, 16)) | expected
        )


def test_inexact_is_asked_for(source, tmp_path):
    path = str(tmp_path / 'x.safetensors')
    with pytest.raises(
        UserError,
        match="exactly:\n  model.gelu is 'tanh', there it is 'erf'\nWith "
        '--inexact it is written nevertheless',
    ):
        convert.convert(source(), path, 'torchvision')
    convert.convert(source(), path, 'torchvision', inexact=True)
    assert weights.load(path).model['gelu'] == 'erf'
    with pytest.raises(UserError, match="cannot hold this model:\n  model.pool is 'gap'"):
        convert.convert(source('gap'), str(tmp_path / 'y.safetensors'), 'torchvision', inexact=True)


@pytest.mark.parametrize('error', [2e-4, np.nan])
def test_a_difference_is_an_error(error, source, tmp_path, monkeypatch):
    def wrong(given, path, to, images):
        return small.logits(given, images) + error, 'a program with a mistake'

    monkeypatch.setattr(verify, 'other_logits', wrong)
    with pytest.raises(UserError, match='at most 0.0001 was expected'):
        convert.convert(source(), str(tmp_path / 'x'), 'timm', verify=True)


def test_nothing_beside_the_destination_is_lost(source, tmp_path):
    (tmp_path / 'x.onnx.data').write_text('of another model')
    with pytest.raises(UserError, match='x.onnx.data exists already: name another destination'):
        convert.convert(source(), str(tmp_path / 'x.onnx'), 'onnx')
    assert (tmp_path / 'x.onnx.data').read_text() == 'of another model'


def test_weights_of_a_grid_that_they_do_not_state(source, tmp_path):
    """Six patches are no square; nothing that is said afterwards needs their image."""
    convert.convert(source('rectangle'), str(tmp_path / 'x.npz'), 'google')
    convert.convert(str(tmp_path / 'x.npz'), str(tmp_path / 'y.npz'), 'big_vision')
    assert weights.load(str(tmp_path / 'y.npz')).grid() is None


def test_overwriting(source, tmp_path):
    convert.convert(source(), str(tmp_path / 'x'), 'timm')
    with pytest.raises(UserError, match='x exists already'):
        convert.convert(source(), str(tmp_path / 'x'), 'huggingface')
    convert.convert(source(), str(tmp_path / 'x'), 'huggingface', overwrite=True)
    assert weights.load(str(tmp_path / 'x')).layout == 'huggingface'
    (tmp_path / 'x/thesis.tex').write_text('')
    for to in ('timm', 'stablehlo'):
        with pytest.raises(UserError, match=r'holds more than what is .* \(thesis.tex\)'):
            convert.convert(source(), str(tmp_path / 'x'), to, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ['vit.safetensors', 'x']
