"""Runs that start from pre-trained weights, through the command."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from tests.support import small
from tests.support.errors import refused
from tests.support.runs import ROOT, TINY, load
from vit_jax import cli, evaluate, models, plan, predict, weights
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.planning.estimate import Target
from vit_jax.training import accumulation, pretrained
from vit_jax.training import run as run_lib
from vit_jax.weights import adapt
from vit_jax.workdir import record

FIELDS = TINY | {'num_steps': 6, 'eval_every': 0, 'checkpoint_every': 3, 'image_size': 16}


@pytest.fixture(scope='module')
def digits_run(tmp_path_factory, run_main):
    """A workdir with a model of 10 digits, exact GELU."""
    workdir = tmp_path_factory.mktemp('pretrained') / 'digits'
    result = run_main(workdir, fields=FIELDS | {'model.gelu': 'erf'})
    assert result.returncode == 0, result.stderr
    return workdir


@pytest.fixture(scope='module')
def digits_file(tmp_path_factory):
    """Random weights of such a model, for tests that read only their fields."""
    fields = {'patch_size': (4, 4), 'hidden_size': 16, 'mlp_dim': 32}
    path = str(tmp_path_factory.mktemp('pretrained') / 'digits.safetensors')
    weights.save(
        small.with_classes(small.make('vit', gelu='erf', **fields), [str(k) for k in range(10)]),
        path,
        'vit_jax',
    )
    return path


def finetune(run_main, workdir, source, data, **fields):
    return run_main(
        workdir,
        fields=FIELDS
        | {
            'pretrained': source,
            'dataset.name': data,
            'image_size': 24,
            'transfer.take': ('model.gelu', 'preprocess.crop_ratio'),
        }
        | fields,
    )


@pytest.mark.slow
def test_linear_probe_keeps_all_but_the_head(digits_run, image_directory, run_main, tmp_path):
    """The weights are a workdir with smaller images. The run resumes without the weights."""
    source = shutil.copytree(digits_run, tmp_path / 'digits')
    frozen = {'optimizer.lr_factors': '^head/=1,.=0'}
    result = finetune(
        run_main,
        tmp_path / 'run',
        source,
        image_directory,
        num_steps=3,
        **frozen,
        **{'optimizer.warmup_steps': 1},
    )
    assert result.returncode == 0, result.stderr
    assert 'resized      position/embedding               (1, 37, 16), was (1, 17, 16)' in (
        result.stderr
    )
    assert 'training 51 of 5,923 parameters' in result.stderr
    config = json.loads((tmp_path / 'run' / 'config.json').read_text())
    assert config['model']['gelu'] == 'erf'  # the config file says tanh
    assert (
        "model.gelu is 'erf' from the weights, instead of 'tanh': to keep yours, leave it out "
        'of transfer.take'
    ) in result.stderr
    assert 'preprocess.crop_ratio is' not in result.stderr  # the same in both
    before, after = (weights.load(str(w)) for w in (source, tmp_path / 'run'))
    assert (before.num_classes, after.num_classes) == (10, 3)
    for part in ('blocks', 'norm', 'embedding', 'cls'):
        jax.tree.map(np.testing.assert_array_equal, before.params[part], after.params[part])
    assert np.abs(after.params['head']['kernel']).max() > 0

    shutil.rmtree(source)
    result = finetune(
        run_main,
        tmp_path / 'run',
        source,
        image_directory,
        **frozen,
        **{'optimizer.warmup_steps': 1},
    )
    assert result.returncode == 0, result.stderr
    assert 'continuing from the checkpoint of step 3' in result.stderr


def test_weights_that_are_not_finite_are_refused(tmp_path):
    path = str(tmp_path / 'x.safetensors')
    weights.save(small.with_nan(small.make('vit')), path, 'vit_jax')
    config = cli.read_config(
        [f'--config={ROOT}/configs/quickstart.py', f'--config.pretrained={path}']
    )
    with refused('content', field='pretrained', file=path):
        pretrained.take_fields(config, None)


@pytest.mark.slow
def test_weights_of_images_that_are_not_rgb_are_refused(tmp_path):
    path = str(tmp_path / 'x.safetensors')
    weights.save(small.make('rectangle'), path, 'vit_jax')
    config = config_lib.base()
    config.pretrained = path
    with refused('inapplicable', field='pretrained', file=path):
        pretrained.take_fields(config, None)
    config.pretrained = str(tmp_path / 'gone.npz')
    with refused('missing', field='pretrained', file=config.pretrained):
        pretrained.take_fields(config, None)


def test_an_empty_list_takes_no_fields(digits_file):
    """--config.transfer.take= is the empty list."""
    arguments = [f'--config={ROOT}/configs/quickstart.py', '--config.transfer.take=']
    assert pretrained.take_fields(cli.read_config(arguments), None) == ({}, None)
    config = cli.read_config([*arguments, f'--config.pretrained={digits_file}'])
    assert pretrained.take_fields(config, None)[0] == {}


@pytest.mark.slow
def test_resumed_run_keeps_its_fields_of_the_weights(digits_run):
    config = cli.read_config(
        [
            f'--config={ROOT}/configs/quickstart.py',
            f'--config.pretrained={digits_run}',
            "--config.transfer.take=('model.gelu', 'preprocess.mean')",
        ]
    )
    taken, loaded = pretrained.take_fields(config, None)
    assert taken == {'model.gelu': 'erf', 'preprocess.mean': (0.5, 0.5, 0.5)}
    assert loaded.num_classes == 10
    begun = {'model': {'gelu': 'tanh'}, 'preprocess': {'mean': [0.1, 0.2, 0.3]}}
    assert pretrained.take_fields(config, begun) == (
        {'model.gelu': 'tanh', 'preprocess.mean': (0.1, 0.2, 0.3)},
        None,
    )


@pytest.mark.slow
def test_local_paths_are_recorded_absolute_and_resume_in_any_spelling(
    digits_file, tmp_path, monkeypatch
):
    """Older workdirs may have relative paths. The recorded path is used while it exists."""
    name, workdir = os.path.basename(digits_file), tmp_path / 'run'

    def resolve(path):
        config = load('quickstart').get_config()
        config.update_from_flattened_dict(
            TINY | {'num_epochs': 0.0, 'pretrained': path, 'teacher.weights': path}
        )
        return run_lib.resolve(config, str(workdir))[0]

    monkeypatch.chdir(os.path.dirname(digits_file))
    run = resolve(name)
    assert (run.config.pretrained, run.config.teacher.weights) == (digits_file, digits_file)
    (workdir / 'checkpoints' / '3').mkdir(parents=True)
    for before in (digits_file, name):
        config = config_lib.changed(run.config, {'pretrained': before, 'teacher.weights': before})
        record.write(str(workdir), config, run.train_data.class_names)
        for path in (digits_file, name, f'./{name}'):
            assert resolve(path).config.pretrained == digits_file
    shutil.copy(digits_file, tmp_path / 'other.safetensors')
    other = f'{tmp_path}/other.safetensors'
    difference = f'pretrained: {name!r} in the workdir, {other!r} now'
    with refused('conflict', file=workdir, value=[difference]):
        resolve(other)
    record.write(str(workdir), run.config, run.train_data.class_names)
    shutil.copy(digits_file, tmp_path / name)  # could be other weights with the same name
    monkeypatch.chdir(tmp_path)
    assert resolve(name).config.pretrained == digits_file
    paths = pretrained.absolute_paths(name, '', recorded_path=f'{tmp_path}/gone/{name}')
    assert paths == {'pretrained': str(tmp_path / name)}


@pytest.mark.parametrize('address', ['hf:a/b', 'timm:a', 'gs://a/b.npz', 'https://a/b', '', 'c'])
def test_addresses_that_are_no_local_paths_do_not_change(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if ':' in address:
        pathlib.Path(address).mkdir(parents=True)
    assert pretrained.absolute_paths(address, address) == {}


def test_a_plan_started_inside_a_run_takes_the_fields_of_the_weights(
    digits_file, tmp_path, monkeypatch
):
    """The fields of the run in the current directory do not matter."""
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    (tmp_path / 'config.json').write_text('{"model": {"gelu": "tanh"}, "preprocess": {}}')
    (tmp_path / 'classes.json').write_text('[]')
    monkeypatch.chdir(tmp_path)
    config = cli.read_config(
        [
            f'--config={ROOT}/configs/quickstart.py',
            f'--config.pretrained={digits_file}',
            '--config.transfer.take=model.gelu',
            '--config.dataset.num_examples=9',
            '--config.dataset.num_classes=3',
        ]
    )
    target = Target('cpu', jax.devices()[:1], simulated=True, limit=1e9)
    assert plan.complete(config, target).model.gelu == 'erf'


def initial_params(loaded, model, image_size):
    config = config_lib.base()
    config.image_size = image_size
    config.model = ConfigDict(model)
    shapes = jax.eval_shape(
        models.build(model, 7).init, jax.random.key(0), np.zeros((1, *image_size, 3))
    )['params']
    return pretrained.initial_params(loaded, config, shapes, loaded.classes or ())


@pytest.mark.parametrize(
    ('stated', 'action', 'guessed'),
    [((8, 32), 'loaded', False), ((16, 16), 'resized', False), (None, 'resized', True)],
    ids=str,
)
def test_another_grid_with_as_many_patches(stated, action, guessed, caplog):
    """Weights that state no image size are assumed to have a square grid."""
    caplog.set_level('INFO', logger='vit_jax')
    given = small.make('vit')
    given = dataclasses.replace(given, preprocess=stated and {'image_size': stated})
    found = initial_params(given, given.model, (8, 32))['position']['embedding']
    same = np.array_equal(found, given.params['position']['embedding'])
    assert same == (action == 'loaded')
    assert guessed == ('have 2x2 patches, and are resized to 1x4. If they' in caplog.text)


def npz_of_a_wide_grid(path):
    """Writes weights with 2x8 patches to a file that does not state the grid; returns them."""
    made = small.make('vit')
    model = models.build(made.model, 7)
    params = model.init(jax.random.key(1), np.zeros((1, 16, 64, 3)))['params']
    wide = dataclasses.replace(made, params=jax.device_get(params), preprocess=None)
    weights.save(wide, str(path), 'google')
    return wide


@pytest.mark.slow
def test_a_config_field_states_the_grid_of_a_file_without_one(tmp_path, caplog):
    wide = npz_of_a_wide_grid(tmp_path / 'x.npz')
    config = config_lib.base()
    config.pretrained = str(tmp_path / 'x.npz')
    positions = {}
    for size in ((), (16, 64)):
        config.transfer.image_size = size
        loaded = pretrained.take_fields(config, None)[1]
        params = initial_params(loaded, wide.model, (32, 128))
        positions[size] = params['position']['embedding']
    expected, _ = adapt.adapt(
        wide.params,
        jax.eval_shape(
            models.build(wide.model, 7).init, jax.random.key(0), np.zeros((1, 32, 128, 3))
        )['params'],
        grid=(4, 16),
        source_grid=(2, 8),
    )
    assert wide.params['position']['embedding'].shape == (1, 17, 128)
    np.testing.assert_array_equal(positions[16, 64], expected['position']['embedding'])
    assert not np.array_equal(positions[()], positions[16, 64])
    assert caplog.text.count('have 4x4 patches, and are resized to 4x16') == 1
    assert 'transfer.image_size=' in caplog.text


@pytest.mark.parametrize(
    ('kind', 'size'), [('npz', (16, 32)), ('npz', (16, 63)), ('safetensors', (8, 32))]
)
def test_an_impossible_grid_is_refused(kind, size, tmp_path):
    path = tmp_path / f'x.{kind}'
    if kind == 'npz':
        npz_of_a_wide_grid(path)
    else:
        weights.save(small.make('vit'), str(path), 'vit_jax')
    config = config_lib.base()
    config.pretrained = str(path)
    config.transfer.image_size = size
    with refused('value', field='pretrained', value=str(path)) as error:
        pretrained.take_fields(config, None)
    assert f'transfer.image_size is {size[0]},{size[1]}' in str(error.value)


def test_weights_of_another_size_are_named():
    shapes = jax.eval_shape(
        models.build('ti16', 7).init, jax.random.key(0), np.zeros((1, 32, 32, 3))
    )['params']
    given = dataclasses.replace(
        small.make('vit'),
        model=models.fields('ti16'),
        preprocess=None,
        params=jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), shapes),
    )
    with refused('content', field='pretrained') as error:
        initial_params(given, models.fields('s16'), (32, 32))
    assert 'The weights look like ti16' in str(error.value)


@pytest.mark.parametrize('names', [('vit', 'bit'), ('bit', 'vit')])
def test_weights_of_another_family(names):
    there, here = map(small.make, names)
    with pytest.raises(UserError) as error:
        initial_params(there, here.model, (32, 32))
    assert '--config.model.' not in str(error.value)
    assert 'another architecture' in str(error.value)


@pytest.mark.parametrize(
    ('name', 'field', 'value'),
    [
        ('registers', 'num_registers', 2),
        ('clip', 'stem_norm', True),
        ('registers-gap', 'norm_after_pool', True),
    ],
)
def test_weights_with_another_module_name_its_field(name, field, value):
    with refused('value') as error:
        initial_params(small.make(name), small.make('vit').model, (16, 16))
    assert error.value.field.startswith('model.')
    assert f'--config.model.{field}={value}' in str(error.value)


@pytest.mark.slow
@pytest.mark.nightly
def test_average_starts_at_the_weights(digits_run, image_directory, run_main, tmp_path):
    result = finetune(
        run_main,
        tmp_path / 'run',
        digits_run,
        image_directory,
        num_steps=5,
        ema_decay=1.0,
        **{'image_size': 16},
    )
    assert result.returncode == 0, result.stderr
    before, after = (weights.load(str(w)) for w in (digits_run, tmp_path / 'run'))
    jax.tree.map(np.testing.assert_array_equal, before.params['blocks'], after.params['blocks'])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'model.hidden_size': 32}, 'in the pre-trained weights and'),
        (
            {'model.pool': 'map', 'model.position': 'none'},
            "model.pool is 'cls' there and 'map' in the config, model.position is "
            "'learned_1d' there and "
            "'none' in the config. Add --config.model.pool=cls --config.model.position=learned_1d.",
        ),
        (
            {'model.pool': 'gap', 'masked.target': 'mean_color'},
            "'gap' in the config. Masked patch prediction needs a model that averages tokens: "
            'start from weights of such a model, or from none.',
        ),
        pytest.param(
            {'pretrained': '/nowhere/b16.npz'}, '/nowhere/b16.npz', marks=pytest.mark.slow
        ),
        pytest.param(
            {'pretrained': ''},
            'this recipe starts from pre-trained weights: add --config.pretrained',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {'transfer.take': ('model.gleu',)},
            "'model.gleu', which the config does not have. Did you mean model.gelu",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_bad_input(fields, message, digits_file, image_directory, run_main, tmp_path, monkeypatch):
    """The run ends before it compiles steps to choose accum_steps: a minute for B/16."""
    monkeypatch.setattr(accumulation, 'choose', None)
    result = finetune(
        run_main, tmp_path / 'run', digits_file, image_directory, **{'accum_steps': 0} | fields
    )
    assert result.returncode == 1
    assert message in result.stderr
    assert 'Traceback' not in result.stderr


SMALL = {
    'vit': (
        'ti16',
        {'patch_size': (4, 4), 'hidden_size': 32, 'num_layers': 2, 'mlp_dim': 64, 'num_heads': 2},
    ),
    'hybrid': (
        'r_ti16',
        {
            'patch_size': (1, 1),
            'hidden_size': 32,
            'num_layers': 2,
            'mlp_dim': 64,
            'num_heads': 2,
            'resnet.units': (1,),
            'resnet.width': 8,
            'resnet.num_groups': 4,
        },
    ),
    'resnet': ('r50x1', {'resnet.units': (1, 1), 'resnet.width': 8, 'resnet.num_groups': 4}),
}


def as_files(image, folder):
    """The same photo as PNG, PNG with alpha, CMYK JPEG, and rotated JPEG."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees to the right
    image.save(folder / 'plain.png')
    image.convert('RGBA').save(folder / 'alpha.png')
    image.convert('L').save(folder / 'grey.png')
    image.convert('CMYK').save(folder / 'cmyk.jpg', quality=95)
    image.rotate(90, expand=True).save(folder / 'turned.jpg', quality=95, exif=exif)
    return sorted(map(str, folder.iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize(
    'family',
    ['vit', *(pytest.param(family, marks=pytest.mark.nightly) for family in ('resnet', 'hybrid'))],
)
def test_pretrain_finetune_evaluate_and_predict_photos(
    family, image_directory, run_main, tmp_path, capsys
):
    name, model = SMALL[family]
    model = {f'model.{field}': value for field, value in {**model, 'unroll': 1}.items()}
    result = run_main(
        tmp_path / 'digits',
        config=f'configs/quickstart.py:{family}',
        fields={**model, 'num_steps': 6, 'optimizer.warmup_steps': 2, 'batch_size': 32},
    )
    assert result.returncode == 0, result.stderr
    workdir = tmp_path / 'run'
    result = run_main(
        workdir,
        config=f'configs/finetune.py:{name},directory',
        fields=model
        | {
            'pretrained': tmp_path / 'digits',
            'dataset.name': image_directory,
            'image_size': 24,
            'dataset.train_split': 'train',
            'dataset.eval_split': 'test',
            'batch_size': 30,
            'num_steps': 80,
            'eval_every': 0,
            'checkpoint_every': 0,
            'optimizer.warmup_steps': 8,
            'optimizer.learning_rate': 0.1,
        },
    )
    assert result.returncode == 0, result.stderr

    assert evaluate.main([f'--workdir={workdir}', '--split=test', '--json']) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['eval/accuracy'] == 1.0
    for kind in ('ant', 'cat'):
        folder = tmp_path / kind
        folder.mkdir()
        photo = Image.open(image_directory / 'test' / kind / '001.png').resize((40, 24))
        assert predict.main([f'--workdir={workdir}', '--json', *as_files(photo, folder)]) == 0
        for row in json.loads(capsys.readouterr().out.splitlines()[-1]):
            assert row['classes'][0]['class'] == kind, row
