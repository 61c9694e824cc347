"""timm loads our files and we load timm's: arrays, logits, names."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from tests.support import interop, small
from tests.support.errors import refused
from tests.support.interop import timm_model
from tests.support.marks import nightly_but
from tests.support.small import assert_close, message, through
from vit_jax import models, weights
from vit_jax.data.resizing import resize_and_central_crop
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights import Weights, adapt, array_files, table
from vit_jax.weights.layouts.timm import architecture, model_arguments


@pytest.mark.parametrize('name', ['model.pth', 'model.safetensors'])
@pytest.mark.parametrize(
    'model',
    [
        'vit',
        'gap',
        'map',
        'layer-scale',
        'no-position',
        'rectangle',
        'root',
        'hybrid',
        'bit',
        'registers',
        'registers-gap',
        'clip',
    ],
)
def test_timm_loads_files(model, name, tmp_path):
    """The arrays are equal to an independent conversion."""
    torch = interop.require('torch')
    given, _ = weights.approximate(small.make(model), str(tmp_path / name), 'timm')
    weights.save(given, str(tmp_path / name), 'timm')
    if name == 'model.pth':
        state = torch.load(tmp_path / name, weights_only=True)
    else:
        state = interop.require('safetensors.torch').load_file(tmp_path / name)
    last_norm = {'last_norm': 'fc_norm'} if given.model.get('norm_after_pool') else {}
    expected = interop.to_timm(given.params, **last_norm)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[n], expected[n]) for n in expected)
    timm_model(given).load_state_dict(state, strict=True)  # parity_test.py has the logits


def timm_directory(given, path):
    timm = interop.import_timm()
    weights.save(given, str(path), 'timm')
    return timm.create_model(f'local-dir:{path}', pretrained=True).eval()


@pytest.mark.parametrize(
    'model',
    nightly_but(
        ['map', 'rectangle', 'registers-gap', 'clip'],
        ['vit', 'gap', 'map', 'layer-scale', 'rectangle', 'registers', 'registers-gap', 'clip'],
    ),
)
def test_timm_builds_the_model_of_a_directory(model, tmp_path):
    given = small.make(model, num_heads=4)
    theirs = timm_directory(given, tmp_path / 'x')
    batch = small.images(given)
    assert_close(small.logits(given, batch), interop.logits(theirs, batch))
    assert theirs.pretrained_cfg['label_names'] == small.CLASSES
    assert {k: theirs.pretrained_cfg[k] for k in ('input_size', 'crop_pct', 'interpolation')} == {
        'input_size': (given.channels(), *given.image_size()),
        'crop_pct': 0.8,
        'interpolation': 'bicubic',
    }


def write_timm(directory, name, theirs, **arguments):
    """Writes a model of timm with random numbers like a repository of the Hugging Face hub."""
    rng = np.random.default_rng(0)
    state = {
        k: rng.normal('norm' in k and k.endswith('weight'), 0.1, x.shape).astype(np.float32)
        for k, x in theirs.state_dict().items()
    }
    torch = interop.require('torch')
    theirs.load_state_dict({k: torch.from_numpy(x) for k, x in state.items()})
    directory.mkdir()
    safetensors.numpy.save_file(state, directory / 'model.safetensors')
    config = dict(
        architecture=name,
        model_args=arguments,
        pretrained_cfg={'input_size': theirs.pretrained_cfg['input_size']},
    )
    (directory / 'config.json').write_text(json.dumps(config))
    return theirs.eval()


NARROW = dict(depth=1, embed_dim=128, num_heads=2, num_classes=5)


@pytest.mark.parametrize(
    ('name', 'size', 'fields'),
    [
        pytest.param(
            'vit_small_patch14_reg4_dinov2',
            28,
            dict(num_registers=4),
            marks=pytest.mark.nightly,
        ),
        (
            'vit_base_patch14_reg4_dinov2',
            42,
            dict(num_registers=4),
        ),  # 9 patches and 5 are no square
        (
            'vit_medium_patch16_reg4_gap_256',
            32,
            dict(num_registers=4, pool='gap', norm_after_pool=True),
        ),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ('vit_so150m_patch16_reg4_gap_256', 48, dict(num_registers=4, pool='gap')),
                ('vit_so150m_patch16_reg4_map_256', 32, dict(num_registers=4, pool='map')),
                ('vit_base_patch16_clip_224', 32, dict(stem_norm=True, layer_norm_epsilon=1e-5)),
            )
        ),
        (
            'vit_large_patch14_clip_quickgelu_224',
            28,
            dict(stem_norm=True, layer_norm_epsilon=1e-5, gelu='quick'),
        ),
    ],
)
def test_registers_and_clip_of_timm_are_read_and_written(name, size, fields, tmp_path):
    """Logits are equal after reading timm's own names, and in timm after writing."""
    timm = interop.import_timm()
    theirs = write_timm(
        tmp_path / 'x',
        name,
        timm.create_model(name, img_size=size, **NARROW),
        img_size=size,
        embed_dim=128,
        depth=1,
        num_heads=2,
    )
    given = weights.load(str(tmp_path / 'x'))
    assert {field: given.model[field] for field in fields} == fields
    assert (given.num_classes, given.image_size()) == (5, (size, size))
    batch = small.images(given)
    expected = interop.logits(theirs, batch)
    assert_close(small.logits(given, batch), expected)
    assert_close(interop.logits(timm_directory(given, tmp_path / 'y'), batch), expected)
    small.assert_same_arrays(weights.load(str(tmp_path / 'y')).params, given.params)


@pytest.mark.parametrize('path', nightly_but(['x'], ['x', 'x/model.safetensors']))
@pytest.mark.parametrize('patches_alone', [True, False])
@pytest.mark.parametrize('class_token', [True, False])
def test_positions_may_exclude_registers_and_the_class_token(
    class_token, patches_alone, path, tmp_path
):
    timm = interop.import_timm()
    theirs = timm.create_model(
        'vit_tiny_patch16_224',
        img_size=48,
        depth=1,
        num_classes=5,
        class_token=class_token,
        global_pool='token' if class_token else 'map',
        reg_tokens=3,
        no_embed_class=patches_alone,
    )
    write_timm(tmp_path / 'x', 'vit_tiny_patch16_224', theirs, img_size=48, depth=1, num_heads=3)
    given = weights.load(str(tmp_path / path), {'num_heads': 3})
    assert given.params['position']['embedding'].shape == (1, 12 + class_token, 192)
    batch = small.images(given)
    assert_close(small.logits(given, batch), interop.logits(theirs, batch))


@pytest.mark.parametrize(
    ('model', 'size'),
    nightly_but(
        [('registers-gap', (32, 8))],
        [('registers', (24, 32)), ('registers-gap', (32, 8)), ('clip', (24, 24))],
    ),
)
def test_resized_positions_give_the_logits_of_timm(model, size):
    given = small.make(model)
    theirs = timm_model(given)
    last_norm = {'last_norm': 'fc_norm'} if given.model['norm_after_pool'] else {}
    interop.load(theirs, interop.to_timm(given.params, **last_norm)).set_input_size(size)
    ours = models.build(given.model, 7)
    batch = np.random.default_rng(1).normal(size=(2, *size, 3)).astype(np.float32)
    shapes = jax.eval_shape(ours.init, jax.random.key(0), batch)['params']
    params, _ = adapt.adapt(
        given.params, shapes, grid=ours.grid(size), source_grid=(2, 2), resize='bicubic'
    )
    found = jax.jit(ours.apply)({'params': params | {'head': given.params['head']}}, batch)
    assert_close(np.asarray(found), interop.logits(theirs, batch))


@pytest.mark.parametrize(
    ('name', 'architecture'),
    [
        pytest.param('r_ti16', 'vit_tiny_r_s16_p8_224', marks=pytest.mark.slow),
        pytest.param('r50x1', 'resnetv2_50x1_bit', marks=pytest.mark.slow),
    ],
)
def test_timm_builds_hybrids_and_bit_by_name(name, architecture, tmp_path):
    """timm's files have the fields of our model of that name, except timm's formulas."""
    theirs = interop.import_timm().create_model(architecture, num_classes=5)
    state = theirs.state_dict()
    file = tmp_path / 'x.safetensors'
    safetensors.numpy.save_file({k: x.numpy() for k, x in state.items()}, file)
    found, expected = weights.load(str(file)), models.fields(name)
    expected['resnet'] |= dict(
        group_norm_epsilon=1e-5, weight_epsilon=1e-8, weight_epsilon_on='variance'
    )
    assert found.model == expected | ({'gelu': 'erf'} if 'gelu' in expected else {})
    again = timm_directory(found, tmp_path / 'x').state_dict()
    assert again.keys() == state.keys()
    assert all((x == state[k]).all() for k, x in again.items())


@pytest.mark.parametrize('name', ['b16', 'so400m14', 'g14'])
def test_mlp_ratios_are_round_numbers(name):
    """4 instead of 4.00065 where both give the same MLP; timm rounds down."""
    fields = models.fields(name)
    params = {
        'embedding': {'kernel': np.empty((16, 16, 3, 1))},
        'position': {'embedding': np.empty((1, 197, 1))},
    }
    ratio = model_arguments(Weights(params, fields, 0, None, None, '', ''))['mlp_ratio']
    assert int(fields['hidden_size'] * ratio) == fields['mlp_dim']
    assert ratio == fields['mlp_dim'] / fields['hidden_size']


def test_written_names_of_models_exist_in_timm():
    names = set(interop.import_timm().list_models())
    for name in ('ti16', 's32', 'b16', 'b8', 'l14', 'h14'):
        fields = models.fields('b16') | variants.get(name)
        written = architecture(fields)
        assert written in names
        assert written.endswith(f'_patch{name.lstrip("tisblh")}_224')
    assert architecture(fields | {'hidden_size': 1408}) == 'vit_base_patch16_224'


def timm_formulas(name, monkeypatch, bare=False):
    """(heads, GELU) of our model and of timm's model of that name, from shapes alone."""
    timm, torch = interop.import_timm(), interop.require('torch')
    with torch.device('meta'):
        theirs = timm.create_model(name)
    arrays = {k: np.broadcast_to(np.float32(0), x.shape) for k, x in theirs.state_dict().items()}
    config = {'architecture': name, 'pretrained_cfg': dict(theirs.pretrained_cfg)}
    contents = array_files.Contents(arrays, {}, {} if bare else {'config.json': config})
    monkeypatch.setattr(array_files, 'read_path', lambda _: contents)
    monkeypatch.setattr(table, 'stack', lambda single, templates: single)
    model, block = weights.load(name).model, theirs.blocks[0]
    gelu = {'GELU': 'erf', 'GELUTanh': 'tanh', 'QuickGELU': 'quick'}[type(block.mlp.act).__name__]
    return (model['num_heads'], model['gelu']), (block.attn.num_heads, gelu)


def test_heads_are_read_where_sizes_do_not_determine_them(monkeypatch):
    assert timm_formulas('test_vit', monkeypatch) == ((2, 'erf'), (2, 'erf'))
    assert timm_formulas('vit_base_patch16_gap_224', monkeypatch) == ((16, 'erf'), (16, 'erf'))
    with refused('missing', file='vit_base_mci_224'):
        timm_formulas('vit_base_mci_224', monkeypatch)


@pytest.mark.parametrize(
    'name', ['test_vit', 'vit_base_patch32_siglip_256', 'vit_base_patch32_224']
)
def test_published_sizes_determine_the_formulas_of_a_bare_file(name, monkeypatch, caplog):
    ours, theirs = timm_formulas(name, monkeypatch, bare=True)
    assert ours == theirs
    assert not [record for record in caplog.records if record.levelname == 'WARNING']


def test_a_bare_file_of_other_sizes_warns_of_assumed_formulas(tmp_path, caplog):
    given = small.make('vit', gelu='erf')
    weights.save(given, str(tmp_path / 'x.safetensors'), 'timm')
    path = str(tmp_path / 'x.safetensors')
    assert weights.load(path).model == given.model
    assert (
        'does not say num_heads and gelu of its model, which arrays do not show, and no '
        'published model has its sizes: the program assumes num_heads=2, gelu=erf. For other '
        'values add'
    ) in caplog.text
    caplog.clear()
    found = weights.load(path, {'num_heads': 4, 'gelu': 'tanh'})
    assert found.model == given.model | dict(num_heads=4, gelu='tanh')
    assert found.params['blocks']['attention']['query']['kernel'].shape == (2, 128, 4, 32)
    assert not caplog.records
    with refused('value', field='model.hidden_size', file=path, value=128):
        weights.load(path, {'num_heads': 3})


@pytest.mark.nightly
@pytest.mark.parametrize('bare', [False, True])
def test_heads_of_every_model_of_timm(bare, monkeypatch, caplog):
    loaded = 0
    for name in interop.import_timm().list_models(
        module=['vision_transformer', 'vision_transformer_hybrid', 'deit']
    ):
        caplog.clear()
        try:
            ours, theirs = timm_formulas(name, monkeypatch, bare)
        except UserError:
            continue
        if bare and ('quickgelu' in name or name == 'test_vit3'):
            continue  # other models, with GELU or other pooling, have equal arrays
        said = 'does not say num_heads' in caplog.text
        assert said == (bare and name == 'vit_base_patch16_gap_224'), name
        assert ours == theirs or said, name
        loaded += 1
    assert loaded > 120


@pytest.mark.parametrize('path', ['x', 'x.safetensors'])
def test_positions_of_patches_alone_are_padded(path, tmp_path):
    """The class token of DeiT III gets a position of zeros, with a config.json or without."""
    _, found = through(small.make('vit', gelu='erf'), 'timm', tmp_path / path)
    file = tmp_path / path / 'model.safetensors' if path == 'x' else tmp_path / path
    arrays, _ = array_files.read(str(file))
    arrays['pos_embed'] = arrays['pos_embed'][:, 1:]
    array_files.write(str(file), arrays, '.safetensors')
    again = weights.load(str(tmp_path / path))
    assert again.grid() == (2, 2)
    assert not again.params['position']['embedding'][:, 0].any()
    np.testing.assert_array_equal(
        again.params['position']['embedding'][:, 1:], found.params['position']['embedding'][:, 1:]
    )


def test_unusual_heads_need_a_directory(tmp_path):
    given = small.make('vit', num_heads=4, gelu='erf')
    assert 'model.num_heads is 4: the layout requires 2' in message(
        weights.save, given, str(tmp_path / 'x.pth'), 'timm'
    )
    assert through(given, 'timm', tmp_path / 'x')[1].model == given.model


def test_positions_that_look_like_a_square_need_a_directory(tmp_path):
    """1x3 patches and a class token are as many as 2x2 patches."""
    given = small.make('vit', gelu='erf', layer_norm_epsilon=1e-6)
    position = given.params['position']['embedding'][:, :4]
    given = dataclasses.replace(
        given,
        params=given.params | {'position': {'embedding': position}},
        preprocess=given.preprocess | {'image_size': (8, 24)},
    )
    assert 'as many positions as 1x3 and 1 more: name a directory' in message(
        weights.save, given, str(tmp_path / 'x.pth'), 'timm'
    )
    assert through(given, 'timm', tmp_path / 'x')[1].grid() == (1, 3)
    assert 'as many positions as 2x2 and 5 more: name a directory' in message(
        weights.save,
        small.make('registers', num_registers=4, gelu='erf'),
        str(tmp_path / 'x.pth'),
        'timm',
    )


def test_other_gelu_and_epsilon_than_clip_need_a_directory(tmp_path):
    text = message(
        weights.save, small.make('clip', layer_norm_epsilon=1e-6), str(tmp_path / 'x.pth'), 'timm'
    )
    assert 'model.layer_norm_epsilon is 1e-06: the layout requires 1e-05' in text
    assert "model.gelu is 'quick': the layout requires 'erf'" in text


@pytest.mark.parametrize(
    ('model', 'change', 'kind', 'field'),
    [
        ('gap', {'model_args': {'global_pool': 'max'}}, 'choice', 'global_pool'),
        (
            'gap',
            {'model_args': {}, 'pretrained_cfg': {'global_pool': 'avgmax'}},
            'choice',
            'global_pool',
        ),
        ('vit', {'model_args': {'global_pool': 'max'}}, 'choice', 'global_pool'),
        ('vit', {'model_args': {'global_pool': 'avg'}}, 'inapplicable', 'global_pool'),
        (
            'registers-gap',
            {'model_args': {'pool_include_prefix': True}},
            'inapplicable',
            'pool_include_prefix',
        ),
        (
            'vit',
            {'model_args': {'norm_layer': 'rmsnorm'}},
            'choice',
            'norm_layer in config.json',
        ),
        ('vit', {'pretrained_cfg': {'crop_mode': 'border'}}, 'choice', 'crop_mode in config.json'),
        (
            'vit',
            {'pretrained_cfg': {'interpolation': 'hamming'}},
            'choice',
            'interpolation in config.json',
        ),
    ],
)
def test_unsupported_values_in_a_config_are_refused(model, change, kind, field, tmp_path):
    weights.save(small.make(model), str(tmp_path / 'x'), 'timm')
    file = tmp_path / 'x/config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with refused(kind, field=field, file=tmp_path / 'x'):
        weights.load(str(tmp_path / 'x'))


def test_message_about_an_unsupported_pooling(tmp_path):
    weights.save(small.make('gap'), str(tmp_path / 'x'), 'timm')
    file = tmp_path / 'x/config.json'
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {'model_args': {'global_pool': 'max'}})
    )
    assert message(weights.load, str(tmp_path / 'x')) == (
        f"{tmp_path}/x (layout timm): global_pool in config.json is 'max': expected 'avg', the "
        'pooling of a model with these arrays.'
    )


@pytest.mark.parametrize('mode', ['center', 'squash'])
@pytest.mark.parametrize('size', [(36, 24), (24, 37), (16, 16), (9, 12)], ids=str)
def test_photos_have_the_pixels_of_timm(mode, size, tmp_path, caplog):
    """The pixels equal timm's evaluation transforms, written with Pillow, without torchvision."""
    weights.save(small.make('vit'), str(tmp_path / 'x'), 'timm')
    file = tmp_path / 'x/config.json'
    config = json.loads(file.read_text())
    config['pretrained_cfg'] |= dict(crop_mode=mode, crop_pct=0.9)
    file.write_text(json.dumps(config))
    caplog.clear()
    found = weights.load(str(tmp_path / 'x'))
    weights.save(found, str(tmp_path / 'y'), 'timm')
    assert weights.load(str(tmp_path / 'y')).preprocess == found.preprocess
    assert not caplog.records
    pixels = np.random.default_rng(0).integers(60, 190, (*size, 3)).astype(np.uint8)
    target, (height, width) = math.floor(16 / 0.9), size
    if mode == 'squash':
        new = (target, target)
    elif width <= height:
        new = (target, int(target * height / width))
    else:
        new = (int(target * width / height), target)
    image = Image.fromarray(pixels).resize(new, Image.BICUBIC)
    left, top = (int(round((side - 16) / 2.0)) for side in new)
    theirs = np.asarray(image.crop((left, top, left + 16, top + 16)), float)
    ours = resize_and_central_crop(pixels, (16, 16), found.preprocess)
    np.testing.assert_allclose(ours, theirs, atol=1.1)
