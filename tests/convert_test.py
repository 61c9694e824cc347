"""The command that converts: the files it writes, verification, and errors."""

import importlib.util
import json
import logging
import os

import huggingface_hub
import numpy as np
import pytest

from tests.support import interop, published, small
from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.images import picture
from tests.support.runs import TINY, check_message, run_here
from vit_jax import convert, evaluate, weights
from vit_jax.config import base
from vit_jax.publishing import repository
from vit_jax.scoring import exported
from vit_jax.weights import export, verify
from vit_jax.workdir import metrics


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


def converted(*arguments):
    """Runs the command in this process; errors are raised."""
    convert.run(convert.make_parser().parse_args([str(argument) for argument in arguments]))


def test_command_writes_a_file_and_reports_it(source, tmp_path):
    result = run(source(), tmp_path / 'x.npz', '--to=google', '--dtype=float16')
    assert result.returncode == 0, result.stderr
    assert f'Converted {tmp_path}/vit.safetensors (vit_jax) to ' in result.stderr
    assert 'x.npz (google): 209,351 parameters, float16, 7 classes' in result.stderr
    found = weights.load(str(tmp_path / 'x.npz'))
    assert found.params['cls'].dtype == np.float16
    check_message(
        run(source(), tmp_path / 'x.npz', '--to=google'),
        'x.npz exists already: name another destination, or add --overwrite.',
    )


@pytest.mark.parametrize(
    ('arguments', 'kind', 'expected'),
    [
        (['missing.npz', 'x', '--to=timm'], 'missing', dict(file='missing.npz')),
        (['setup.py', 'x', '--to=timm'], 'content', dict(file='setup.py')),
        (['setup.py', 'x', '--to=onnx'], 'value', dict(field='DST', value='x')),
        (['setup.py', 'x.onnx', '--to=huggingface'], 'value', dict(field='DST', value='x.onnx')),
        (['setup.py', 'x.onnx', '--to=web'], 'value', dict(field='DST', value='x.onnx')),
        (['setup.py', 'x.npz', '--to=web'], 'value', dict(field='DST', value='x.npz')),
        (['setup.py', 'x', '--to=timm', '--runtime=y.tgz'], 'inapplicable', dict(value='y.tgz')),
        (['setup.py', 'no/x', '--to=timm'], 'unwritable', dict(file='no/x')),
    ],
)
def test_impossible_sources_and_destinations_are_refused(arguments, kind, expected):
    with refused(kind, **expected):
        converted(*arguments)


@pytest.mark.parametrize(
    ('arguments', 'kind', 'expected'),
    [
        (['x', '--to=timm', '--embed_preprocessing'], 'inapplicable', dict(value='timm')),
        (['x', '--to=web', '--embed_preprocessing'], 'inapplicable', dict(value='web')),
        (['x', '--to=timm', '--dtype=int8'], 'inapplicable', dict(field='--dtype', value='int8')),
        (['x', '--to=web', '--dtype=int8'], 'inapplicable', dict(field='--dtype', value='int8')),
        (['x.onnx', '--to=onnx', '--data=d'], 'inapplicable', dict(field='--data', value='d')),
        (['x.onnx', '--to=onnx', '--split=s'], 'inapplicable', dict(field='--split')),
        (['x.onnx', '--to=onnx', '--max_loss=2'], 'inapplicable', dict(field='--max_loss')),
        (['x', '--to=timm', '--dtype=float16', '--data=d'], 'inapplicable', dict(field='--data')),
        (['x.onnx', '--to=onnx', '--dtype=int8'], 'missing', dict(field='--data')),
        (['x.onnx', '--to=onnx', '--dtype=int8', '--split=s'], 'missing', dict(field='--data')),
        (['x.onnx', '--to=onnx', '--dtype=int8', '--data=d'], 'missing', dict(field='--split')),
        (['x.onnx', '--to=onnx', '--dtype=float16', '--data=d'], 'missing', dict(field='--split')),
        (
            ['x.onnx', '--to=onnx', '--dtype=int8', '--max_loss=-1'],
            'value',
            dict(field='--max_loss', value=-1.0),
        ),
        (
            ['x.onnx', '--to=onnx', '--dtype=int8', '--verify'],
            'inapplicable',
            dict(field='--verify'),
        ),
    ],
)
def test_options_for_onnx_files_are_refused_where_they_do_not_apply(
    arguments, kind, expected, source, tmp_path, monkeypatch
):
    path = source()
    monkeypatch.chdir(tmp_path)
    with refused(kind, **expected):
        converted(path, *arguments)
    assert os.listdir(tmp_path) == ['vit.safetensors']


def test_embedding_needs_a_model_that_classifies_rgb_photos(source, tmp_path):
    with refused('inapplicable', field='--embed_preprocessing'):
        converted(source('headless'), tmp_path / 'x.onnx', '--to=onnx', '--embed_preprocessing')
    with refused('inapplicable', value=5):  # channels
        converted(source('rectangle'), tmp_path / 'x.onnx', '--to=onnx', '--embed_preprocessing')
    assert not (tmp_path / 'x.onnx').exists()


@pytest.mark.slow
@pytest.mark.parametrize('options', [[], ['--dtype=float16']], ids=['float32', 'float16'])
def test_a_file_with_preprocessing_gives_the_probabilities_of_predict(
    options, source, tmp_path, monkeypatch, capsys, caplog
):
    """The printed lines run it, on photos of any size; --verify compares it too."""
    interop.require('jax2onnx')
    onnx = interop.require('onnx')
    path = source()
    monkeypatch.chdir(tmp_path)
    converted(path, 'x.onnx', '--to=onnx', '--embed_preprocessing', '--verify', *options)
    assert 'on 3 photos: largest difference of probabilities' in caplog.text
    lines = capsys.readouterr().out
    given = weights.load(path)
    for size in ((40, 90), (333, 77), (11, 9)):
        picture(*size).save('photo.jpg')
        variables = {}
        exec(lines, variables)
        expected = weights.predictor(given)(weights.prepare(given, ['photo.jpg']))[1]
        atol = 1e-2 if options else 1e-4
        np.testing.assert_allclose(variables['probabilities'], expected, atol=atol)
        assert variables['probabilities'].argmax() == expected.argmax()
    found = {entry.key: entry.value for entry in onnx.load('x.onnx').metadata_props}
    assert json.loads(found['vit_jax.classes']) == small.CLASSES
    assert json.loads(found['vit_jax.preprocess'])['resize'] == 'bicubic'
    assert found['vit_jax.loss'] == 'softmax'


@pytest.mark.slow
def test_int8_is_written_only_if_it_keeps_the_accuracy(source, tmp_path, monkeypatch, caplog):
    interop.require('jax2onnx')
    write_images(tmp_path / 'data/val', small.CLASSES, 3)
    path = source()
    options = ['--to=onnx', '--dtype=int8', f'--data={tmp_path}/data', '--split=val']

    measure = exported.accuracies

    def accuracies(*arguments):
        _, num_images = measure(*arguments)
        return [0.9, 0.85], num_images

    monkeypatch.setattr(exported, 'accuracies', accuracies)
    with refused('inapplicable', field='--dtype', value='int8') as error:
        converted(path, tmp_path / 'x.onnx', *options)
    assert 'accuracy 85.00 % in int8 and 90.00 % in float32 on 21 photos' in str(error.value)
    assert not (tmp_path / 'x.onnx').exists()
    converted(path, tmp_path / 'x.onnx', *options, '--max_loss=5')
    assert 'Measured accuracy 85.00 % in int8' in caplog.text
    assert 'int8, 7 classes' in caplog.text
    given = weights.load(path)
    batch = small.images(given)
    actual, _ = export.run(str(tmp_path / 'x.onnx'), 'onnx', batch)
    expected = small.logits(given, batch)
    difference = np.abs(actual - expected).max()
    assert 0 < difference < 0.2 * np.abs(expected).max()


@pytest.mark.slow
def test_int8_of_a_run_is_measured_on_the_evaluation_split_of_the_run(run_main, tmp_path, caplog):
    interop.require('jax2onnx')
    result = run_main(tmp_path / 'run', fields=TINY | {'num_steps': 6})
    assert result.returncode == 0, result.stderr
    converted(tmp_path / 'run', tmp_path / 'x.onnx', '--to=onnx', '--dtype=int8', '--max_loss=100')
    assert 'on 360 photos of digits, test' in caplog.text


def test_message_of_the_command():
    check_message(
        run('setup.py', 'x', '--to=onnx'),
        "error: 'x' is not a name for onnx: a name ending in .onnx is for --to=onnx, and for that",
    )


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['a.npz', '--to=timm'], 'the following arguments are required: DST'),
        (['a', 'b'], 'the following arguments are required: --to'),
        (['a', 'b', '--to=tim'], "invalid choice: 'tim' (choose from "),
    ],
)
def test_wrong_arguments_end_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit):
        convert.main(arguments)
    assert message in capsys.readouterr().err


def verified(caplog):
    """The part of the log line that names how a file was verified."""
    line = next(line for line in caplog.messages if line.startswith('Verified '))
    return line.partition(' by ')[2]


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
            else 'reading it again, because a program that reads torchvision cannot be',
        ),
        pytest.param(
            'hidden-head',
            'google',
            'x.npz',
            'reading it again, because timm computes this model by other',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            'axial',
            'vit_jax',
            'x.safetensors',
            'reading it again, because vit_jax is a layout of vit_jax',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_files_are_verified_by_the_other_program_where_possible(
    model, to, name, how, source, tmp_path, caplog
):
    interop.import_timm()
    interop.require('transformers')
    inexact = name == 'x.pth'
    options = ['--inexact'] if inexact else []
    converted(source(model), tmp_path / name, f'--to={to}', '--verify', *options)
    assert verified(caplog).startswith(how)
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
        ('big_vision', 'bfloat16', 'reading it again, because timm reads no bfloat16'),
    ],
)
def test_models_trained_in_bfloat16_are_verified_in_float32(
    to, dtype, how, source, tmp_path, caplog
):
    interop.import_timm()
    interop.require('jax2onnx')
    path = tmp_path / {'timm': 'x', 'big_vision': 'x.npz'}.get(to, f'x.{to}')
    options = [f'--dtype={dtype}'] if dtype else []
    converted(source('gap', dtype='bfloat16'), path, f'--to={to}', '--verify', *options)
    assert verified(caplog).startswith(how)


def test_bfloat16_in_a_file_of_google_is_refused(source, tmp_path):
    """Neither Google's own code nor timm can read such a file."""
    with refused('inapplicable', field='layout', value='google'):
        converted(source(), tmp_path / 'x.npz', '--to=google', '--dtype=bfloat16', '--verify')
    assert not (tmp_path / 'x.npz').exists()


def test_weights_that_are_not_finite_need_an_option(tmp_path, caplog):
    path = str(tmp_path / 'x.safetensors')
    weights.save(small.with_nan(small.make('vit')), path, 'vit_jax')
    assert convert.main([path, str(tmp_path / 'y.npz'), '--to=google']) == 1
    assert 'x.safetensors has values that are not finite: 1 of 128 in norm/scale' in caplog.text
    assert 'predict and convert accept it with --allow_nonfinite' in caplog.text
    assert convert.main([path, str(tmp_path / 'y.npz'), '--to=google', '--allow_nonfinite']) == 0
    assert (
        convert.main(
            [path, str(tmp_path / 'y.safetensors'), '--to=vit_jax', '--verify', '--allow_nonfinite']
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
def test_a_loss_that_a_layout_cannot_state_is_logged(to, name, lost, source, tmp_path, caplog):
    converted(source(gelu='erf'), tmp_path / name, f'--to={to}', '--loss=sigmoid')
    lines = [line for line in caplog.messages if 'does not state' in line]
    assert len(lines) == lost
    assert all(line.endswith('--loss=sigmoid: add it where you use the file') for line in lines)
    found = weights.load(str(tmp_path / name))
    assert found.loss == (None if lost else 'sigmoid')


def test_a_missing_description_is_logged_as_options(source, tmp_path, caplog):
    path = str(tmp_path / 'x.npz')
    converted(source(), path, '--to=google')
    assert (
        f'{path} does not state --preprocess=fit=squash,antialias=True,uint8_resize=True,'
        'crop_ratio=0.8,resize=bicubic,mean=0.4,0.5,0.6,std=0.3,0.2,0.1, the names of the classes: '
        'add it where'
    ) in caplog.text
    converted(source('rectangle'), path, '--to=google', '--overwrite')
    assert 'std=0.3,0.2,0.1,image_size=16,12, the names' in caplog.text
    stated = weights.described(weights.load(path), ['mean=0,0,0,image_size=16,12'])
    assert stated.image_size() == (16, 12)


def test_a_missing_description_is_completed_by_options(source, tmp_path, caplog):
    path = str(tmp_path / 'x.safetensors')
    names = tmp_path / 'names.txt'
    converted(source(), path, '--to=timm', '--inexact')
    names.write_text('\n'.join(small.CLASSES))
    converted(
        path,
        tmp_path / 'x',
        '--to=huggingface',
        '--preprocess=mean=0.1,0.2,0.3',
        f'--classes={names}',
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


def test_directories_for_timm_state_how_images_are_prepared(source, tmp_path):
    """If the source states nothing, they state the defaults or the usual values of its layout."""
    for name, layout, expected in [
        ('x.safetensors', 'timm', dict(fit='torchvision', uint8_resize=True)),
        ('x.npz', 'google', dict(fit='squash', crop_ratio=1.0, uint8_resize=True)),
    ]:
        converted(source(), tmp_path / name, f'--to={layout}', '--inexact')
        converted(tmp_path / name, tmp_path / layout, '--to=timm')
        assert (
            weights.load(str(tmp_path / layout)).preprocess
            == dict(base().preprocess, image_size=(16, 16)) | expected
        )


def test_other_formulas_need_an_option(source, tmp_path):
    path = str(tmp_path / 'x.safetensors')
    with refused('inapplicable', field='--to', value='torchvision') as error:
        converted(source(), path, '--to=torchvision')
    assert str(error.value) == (
        "layout torchvision cannot store this model exactly:\n  model.gelu is 'tanh': the layout "
        "requires 'erf'\nAdd --inexact to write it nevertheless; --verify shows how that changes "
        'logits.'
    )
    converted(source(), path, '--to=torchvision', '--inexact')
    assert weights.load(path).model['gelu'] == 'erf'
    with refused('inapplicable', field='layout', value='torchvision'):
        converted(source('gap'), tmp_path / 'y.safetensors', '--to=torchvision', '--inexact')


@pytest.mark.parametrize('error', [2e-4, np.nan])
def test_a_difference_of_logits_is_an_error(error, source, tmp_path, monkeypatch):
    def wrong(given, path, to, images):
        return small.logits(given, images) + error, 'a program with a mistake'

    monkeypatch.setattr(verify, 'other_logits', wrong)
    with refused('content', file=tmp_path / 'x'):
        converted(source(), tmp_path / 'x', '--to=timm', '--verify')


def test_a_second_file_of_the_destination_is_not_overwritten(source, tmp_path):
    (tmp_path / 'x.onnx.data').write_text('of another model')
    with refused('conflict', file=tmp_path / 'x.onnx.data'):
        converted(source(), tmp_path / 'x.onnx', '--to=onnx')
    assert (tmp_path / 'x.onnx.data').read_text() == 'of another model'


def test_weights_of_an_unknown_grid_are_converted(source, tmp_path):
    """Six patches form no square grid; the log line does not need the image size."""
    converted(source('rectangle'), tmp_path / 'x.npz', '--to=google')
    converted(tmp_path / 'x.npz', tmp_path / 'y.npz', '--to=big_vision')
    assert weights.load(str(tmp_path / 'y.npz')).grid() is None


def test_overwriting_needs_an_option_and_spares_other_files(source, tmp_path):
    converted(source(), tmp_path / 'x', '--to=timm')
    with refused('conflict', file=tmp_path / 'x'):
        converted(source(), tmp_path / 'x', '--to=huggingface')
    converted(source(), tmp_path / 'x', '--to=huggingface', '--overwrite')
    assert weights.load(str(tmp_path / 'x')).layout == 'huggingface'
    (tmp_path / 'x/thesis.tex').write_text('')
    for to in ('timm', 'stablehlo'):
        with refused('conflict', file=tmp_path / 'x') as error:
            converted(source(), tmp_path / 'x', f'--to={to}', '--overwrite')
        assert '(thesis.tex)' in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ['vit.safetensors', 'x']


PUSH = '--push=my-lab/flowers'


@pytest.fixture
def uploads(monkeypatch):
    """What would be uploaded: (repository, its files). There is a token, and no Hub."""
    sent = []

    class Hub:
        def __init__(self, token):
            assert token == 'secret'

        def create_repo(self, name, exist_ok):
            return f'https://hub/{name}'

        def list_repo_files(self, name):
            return []

        def upload_folder(self, *, repo_id, folder_path, **_):
            sent.append((repo_id, sorted(os.listdir(folder_path))))

    monkeypatch.setattr(huggingface_hub, 'HfApi', Hub)
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: 'secret')
    return sent


@pytest.mark.parametrize(
    ('options', 'names'),
    [
        ([], ['README.md', 'config.json', 'model.safetensors', 'preprocessor_config.json']),
        (['--to=timm'], ['README.md', 'config.json', 'model.safetensors']),
    ],
)
def test_push_writes_a_folder_with_a_card_and_uploads_it(options, names, source, tmp_path, uploads):
    converted(source(), tmp_path / 'x', PUSH, *options)
    assert uploads == [('my-lab/flowers', names)]
    small.assert_same_arrays(
        weights.load(str(tmp_path / 'x')).params, weights.load(source()).params
    )


def test_the_card_of_a_fit_has_its_numbers(tmp_path, uploads):
    outcome = published.write_fit(tmp_path / 'fit')
    converted(tmp_path / 'fit', tmp_path / 'x', PUSH)
    card = huggingface_hub.ModelCard.load(tmp_path / 'x/README.md')
    (result,) = card.data.eval_results
    assert result.metric_value == outcome.accuracy
    assert card.data.base_model == 'google/base'


def test_a_dry_run_needs_no_token_and_uploads_nothing(
    source, tmp_path, uploads, monkeypatch, capsys, caplog
):
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: None)
    converted(source(), tmp_path / 'x', PUSH, '--dry_run')
    output = capsys.readouterr().out
    assert (tmp_path / 'x/README.md').read_text() in output
    assert repository.listing(str(tmp_path / 'x'), 'my-lab/flowers') in output
    assert 'The author must choose a licence' in caplog.text
    assert not uploads


def test_without_a_token_the_folder_is_complete(source, tmp_path, uploads, monkeypatch):
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: None)
    with refused('missing', field='HF_TOKEN', file=tmp_path / 'x'):
        converted(source(), tmp_path / 'x', PUSH)
    assert weights.load(str(tmp_path / 'x')).classes == small.CLASSES
    assert (tmp_path / 'x/README.md').exists()
    assert not uploads


def test_a_card_is_replaced_only_with_the_whole_folder(source, tmp_path, uploads):
    converted(source(), tmp_path / 'x', PUSH)
    (tmp_path / 'x/README.md').write_text('license: mit')
    for options in ([PUSH], ['--to=timm', '--overwrite']):
        with refused('conflict', file=tmp_path / 'x'):
            converted(source(), tmp_path / 'x', *options)
    assert (tmp_path / 'x/README.md').read_text() == 'license: mit'
    converted(source(), tmp_path / 'x', PUSH, '--overwrite')
    assert (tmp_path / 'x/README.md').read_text() != 'license: mit'


@pytest.mark.parametrize(
    ('arguments', 'kind', 'expected'),
    [
        (['x', '--push=flowers'], 'value', dict(field='--push', value='flowers')),
        (['x', PUSH, '--to=vit_jax'], 'inapplicable', dict(field='--to', value='vit_jax')),
        (['x', PUSH, '--to=web'], 'inapplicable', dict(field='--to', value='web')),
        (['x.safetensors', PUSH, '--to=timm'], 'value', dict(field='DST', value='x.safetensors')),
        (['x', '--to=timm', '--dry_run'], 'inapplicable', dict(field='--dry_run', value=True)),
        (
            ['x', '--to=timm', '--evaluation=r.json'],
            'inapplicable',
            dict(field='--evaluation', value='r.json'),
        ),
    ],
)
def test_impossible_pushes_are_refused_before_weights_are_read(arguments, kind, expected, tmp_path):
    with refused(kind, **expected):
        converted(tmp_path / 'missing.npz', *arguments)


def test_models_of_other_images_than_rgb_are_not_pushed(source, tmp_path, uploads):
    with refused('inapplicable', value=5):
        converted(source('rectangle'), tmp_path / 'x', PUSH)
    assert not (tmp_path / 'x').exists()


@pytest.mark.slow
def test_the_card_of_a_run_has_the_numbers_of_the_run_and_of_evaluate(tmp_path, run_main, uploads):
    workdir = tmp_path / 'run'
    assert run_main(workdir, fields=TINY | {'num_steps': 6, 'eval_every': 6}).returncode == 0
    row = next(row for row in metrics.read(str(workdir)) if 'eval/accuracy' in row)
    converted(workdir, tmp_path / 'x', PUSH)
    (result,) = huggingface_hub.ModelCard.load(tmp_path / 'x/README.md').data.eval_results
    assert (result.dataset_name, result.metric_value) == ('digits', row['eval/accuracy'])
    scored = run_here(f'--workdir={workdir}', '--json', command=evaluate).stdout.splitlines()[-1]
    (tmp_path / 'result.json').write_text(scored)
    options = [f'--evaluation={tmp_path}/result.json', '--overwrite']
    converted(workdir, tmp_path / 'x', PUSH, *options)
    text = (tmp_path / 'x/README.md').read_text()
    (result,) = huggingface_hub.ModelCard(text).data.eval_results
    assert result.metric_value == json.loads(scored)['eval/accuracy']
    rows = published.table(text, '### Classes, the worst first')
    expected = json.loads(scored)['classes']
    assert {name: (value, count) for name, value, count in rows} == {
        name: (f'{100 * values["accuracy"]:.2f} %', str(values['num_examples']))
        for name, values in expected.items()
    }
