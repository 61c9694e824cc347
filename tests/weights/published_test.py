"""The table of published models compared with timm, and its use for files without a config."""

import dataclasses
import json

import numpy as np
import pytest

from tests.support import interop, small
from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights import LAYOUTS, Weights, array_files, description, published, table
from vit_jax.weights import model as model_lib


def bare(state, source='x.pth'):
    """Weights with the shapes of timm's arrays; None for a model that vit_jax cannot read."""
    arrays = {name: np.broadcast_to(np.float32(0), tuple(x.shape)) for name, x in state.items()}
    try:
        reading = LAYOUTS['timm'].read(array_files.Contents(arrays, {}, {}))
        found, unknown = table.translate(reading.arrays, reading.table)
        flat = table.parameters(found)
        model, num_classes = model_lib.describe(flat, reading.fields)
        templates = model_lib.templates(model, num_classes, flat, None)
        table.fit(found, unknown, table.unstack(templates), LAYOUTS['timm'].table(model))
    except UserError:
        return None
    params = (
        {'position': {'embedding': flat['position/embedding']}}
        if 'position/embedding' in flat
        else {}
    )
    return Weights(params, model, num_classes, None, None, 'timm', source)


def in_registry(timm, names):
    """(name, tag, pretrained_cfg) of timm's released models."""
    for name in names:
        for full in timm.list_pretrained(f'{name}.*'):
            yield full, timm.get_pretrained_cfg(full)


def as_preprocess(cfg, given):
    """A pretrained_cfg as fields of config.preprocess."""
    size = {} if 'hidden_size' in given.model else {'image_size': cfg.input_size[1:]}
    return (
        dict(
            fit='squash' if cfg.crop_mode == 'squash' else 'torchvision',
            crop_ratio=cfg.crop_pct,
            resize=cfg.interpolation,
            antialias=True,
            uint8_resize=True,
            mean=cfg.mean,
            std=cfg.std,
        )
        | size
    )


def not_in_the_table(given, full):
    """Whether the model is CLIP's, or has registers (except DINOv2's) or a norm after pooling."""
    fields = given.model
    other = fields.get('stem_norm') or fields.get('norm_after_pool') or fields.get('num_registers')
    return other and 'reg4_dinov2' not in full


def check(timm, torch, full, cfg):
    """The families with the model's own preprocessing; at least one if vit_jax can read it."""
    with torch.device('meta'):
        model = timm.create_model(full.split('.')[0], num_classes=cfg.num_classes)
    given = bare(model.state_dict(), f'{full}.safetensors')
    if given is None or not_in_the_table(given, full):
        return []
    expected, found = as_preprocess(cfg, given), published.candidates(given)
    assert expected in [family.preprocess() for family in found], full
    chosen = published.choose(given)
    assert chosen is None or chosen[1] == expected, (full, chosen)
    return [family for family in found if family.preprocess() == expected]


@pytest.mark.parametrize(
    'name',
    [
        'vit_tiny_patch16_224',
        'deit_tiny_patch16_224',
        'deit3_small_patch16_224',
        'vit_small_patch14_reg4_dinov2',
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ('vit_base_patch16_224', 'vit_small_r26_s32_224', 'resnetv2_50x1_bit')
        ),
    ],
)
def test_families_have_the_preprocessing_of_timm(name):
    timm, torch = interop.import_timm(), interop.require('torch')
    assert all(check(timm, torch, *model) for model in in_registry(timm, [name]))


@pytest.mark.nightly
@pytest.mark.slow
def test_all_models_of_timm_are_in_the_table():
    """The test leaves out models that vit_jax cannot read, and timm's own test models."""
    timm, torch = interop.import_timm(), interop.require('torch')
    names = [
        name
        for module in ('vision_transformer', 'deit', 'vision_transformer_hybrid', 'resnetv2')
        for name in timm.list_models(module=module)
        if not name.startswith('test_') and (module != 'resnetv2' or 'bit' in name)
    ]
    used = [family for model in in_registry(timm, names) for family in check(timm, torch, *model)]
    assert [family for family in published.FAMILIES if family not in used] == []


def test_doubt_of_gelu_has_all_clip_models_with_a_wrong_name():
    """timm has a second name with quickgelu for the same file on the hub."""
    timm = interop.import_timm()
    hub = {
        name: timm.get_pretrained_cfg(name).hf_hub_id
        for name in timm.list_models('vit_*clip*', pretrained=True)
    }
    quick = {file for name, file in hub.items() if 'quickgelu' in name}
    assert len(quick) > 10
    assert {name for name in hub if published.doubt_of_gelu(name)} == {
        name for name, file in hub.items() if file in quick and 'quickgelu' not in name
    }


@pytest.mark.parametrize(
    ('tag', 'fields', 'warned'),
    [('openai', {}, True), ('openai', {'gelu': 'quick'}, False), ('laion2b', {}, False)],
)
def test_a_wrong_gelu_of_clip_is_a_warning(tag, fields, warned, tmp_path, caplog):
    weights.save(small.make('vit'), str(tmp_path / 'x'), 'timm')
    file = tmp_path / 'x/config.json'
    config = json.loads(file.read_text()) | {'architecture': 'vit_base_patch16_clip_224'}
    del config['model_args']['act_layer']
    config['pretrained_cfg']['tag'] = tag
    file.write_text(json.dumps(config))
    assert weights.load(str(tmp_path / 'x'), fields=fields).model['gelu'] == fields.get(
        'gelu', 'erf'
    )
    assert ('was trained with QuickGELU' in caplog.text) == warned


def ti16(source, **change):
    """Ti/16 of AugReg or DeiT, or another size, without the numbers."""
    fields = model_lib.with_defaults(
        dict(patch_size=(16, 16), hidden_size=192, num_layers=12, mlp_dim=768, num_heads=3)
    )
    position = {'position': {'embedding': np.broadcast_to(np.float32(0), (1, 197, 192))}}
    return dataclasses.replace(
        Weights(position, fields, 1000, None, None, 'timm', source), **change
    )


@pytest.mark.parametrize(
    ('source', 'name', 'mean'),
    [
        ('../data/vit_tiny_patch16_224.safetensors', 'AugReg', (0.5,) * 3),
        ('timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k/model.safetensors', 'AugReg', (0.5,) * 3),
        ('C/deit_tiny_patch16_224-a1311bcf.pth', 'DeiT', (0.485, 0.456, 0.406)),
        ('vit_tiny_patch16_224/deit_tiny.pth', 'DeiT', (0.485, 0.456, 0.406)),
    ],
)
def test_the_name_of_the_file_distinguishes_models_with_equal_arrays(source, name, mean):
    reason, preprocess = published.choose(ti16(source))
    assert reason == f'its arrays and name are those of {name} in timm'
    assert preprocess['mean'] == mean


@pytest.mark.parametrize('source', ['best.pth', 'vit_tiny_patch16_224/best.pth', 'vit.pth'])
def test_uncertain_preprocessing_is_not_guessed(source, caplog):
    given = ti16(source)
    assert published.choose(given) is None
    complete = description.complete_preprocess(given)
    assert complete['mean'] == (0.5,) * 3
    options = [line.partition('--preprocess ')[2] for line in caplog.text.splitlines()[1:]]
    assert [description.parse_preprocess([text])['mean'] for text in options] == [
        (0.5,) * 3,
        (0.485, 0.456, 0.406),
    ]
    assert '\n  DeiT: --preprocess fit=torchvision,crop_ratio=0.9,resize=bicubic' in caplog.text


@pytest.mark.parametrize(
    'change',
    [dict(num_classes=17), dict(num_classes=0), dict(model=ti16('').model | dict(stem_norm=True))],
)
def test_an_unpublished_model_has_no_family(change):
    given = ti16('vit_tiny_patch16_224.pth', **change)
    assert published.choose(given) is None
    assert published.hint(given) == ''


def test_the_preprocessing_of_published_arrays_is_logged(tmp_path, caplog):
    """This holds for a file without a config; a config has priority."""
    caplog.set_level('INFO', logger='vit_jax')
    given = small.make(
        'vit', patch_size=(16, 16), hidden_size=192, num_layers=12, mlp_dim=768, num_heads=3
    )
    position = np.zeros((1, 197, 192), np.float32)
    given = dataclasses.replace(
        given,
        num_classes=21843,
        classes=None,
        params=given.params
        | {
            'position': {'embedding': position},
            'head': {
                'kernel': np.zeros((192, 21843), np.float32),
                'bias': np.zeros(21843, np.float32),
            },
        },
        preprocess={'image_size': (224, 224), **small.PREPROCESS},
        model=given.model | {'gelu': 'erf'},
    )
    weights.save(given, str(tmp_path / 'x.safetensors'), 'timm')
    found = weights.load(str(tmp_path / 'x.safetensors'))
    assert found.preprocess == dict(
        fit='torchvision',
        crop_ratio=0.9,
        resize='bicubic',
        antialias=True,
        uint8_resize=True,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    assert (
        'x.safetensors does not say how images are prepared, and its arrays are those of '
        'AugReg in timm: fit=torchvision,crop_ratio=0.9,'
    ) in caplog.text
    weights.save(given, str(tmp_path / 'x'), 'timm')
    assert weights.load(str(tmp_path / 'x')).preprocess == given.preprocess


def test_files_of_google_have_the_preprocessing_of_its_programs(tmp_path, caplog):
    caplog.set_level('INFO', logger='vit_jax')
    squashed = dict(
        fit='squash',
        crop_ratio=1.0,
        resize='bilinear',
        antialias=False,
        uint8_resize=False,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    for model, layout, expected in [
        ('vit', 'google', squashed),
        ('bit', 'google', squashed),
        ('headless', 'big_vision', squashed),
        ('vit', 'big_vision', squashed | dict(fit='cover', crop_ratio=0.875, antialias=True)),
    ]:
        _, found = small.through(small.make(model), layout, tmp_path / 'x.npz')
        assert found.preprocess == expected
        assert f'fit={expected["fit"]},crop_ratio={expected["crop_ratio"]},' in caplog.text
        assert description.complete_preprocess(found) == expected
        caplog.clear()
