"""Released weights and every layout in their own programs."""

import dataclasses
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.support import described, interop, small
from tests.support.errors import refused
from tests.support.interop import timm_model
from tests.support.runs import ROOT
from vit_jax import weights
from vit_jax.weights import export, verify

DATA = ROOT.parent / 'shared/data'
real_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f'needs the released weights and photos in {DATA}'
)


def photos(number):
    """Photos prepared for the released weights, float32 [number, 224, 224, 3]."""
    with tarfile.open(DATA / 'flowers17.tar') as file:
        members = [m for m in file.getmembers() if m.name.endswith('.jpg')]
        images = [
            Image.open(file.extractfile(m)).convert('RGB').resize((224, 224))
            for m in members[:: len(members) // number][:number]
        ]
    return np.stack([np.asarray(x, np.float32) for x in images]) / 127.5 - 1


@pytest.mark.slow
@real_data
def test_released_weights_give_the_logits_of_timm_and_transformers(tmp_path):
    given = weights.load(str(DATA / 'vit_tiny_patch16_224.safetensors'))
    batch = photos(3)
    found = small.logits(given, batch)
    theirs = timm_model(given)
    theirs.load_state_dict(
        interop.require('safetensors.torch').load_file(DATA / 'vit_tiny_patch16_224.safetensors'),
        strict=True,
    )
    assert np.abs(found).max() > 5
    assert np.abs(found - interop.logits(theirs.eval(), batch)).max() < 1e-4
    weights.save(given, str(tmp_path / 'hf'), 'huggingface')
    interop.require('transformers')
    theirs, _ = verify.other_logits(given, str(tmp_path / 'hf'), 'huggingface', batch)
    assert np.abs(found - theirs).max() < 1e-4


@real_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ('layout', 'name'),
    [
        ('timm', 'x'),
        ('huggingface', 'x'),
        ('stablehlo', 'x'),
        ('onnx', 'x.onnx'),
        *(
            pytest.param(layout, name, marks=pytest.mark.nightly)
            for layout, name in (
                ('timm', 'x.pth'),
                ('timm', 'x.safetensors'),
                ('torchvision', 'x.pth'),
                ('google', 'x.npz'),
                ('big_vision', 'x.npz'),
                ('vit_jax', 'x.safetensors'),
            )
        ),
    ],
)
def test_every_layout_gives_equal_logits_in_its_own_program(layout, name, tmp_path):
    """Prints the rows of docs/reference/layouts.md: logits of released weights on 16 photos."""
    interop.import_timm()
    path, batch = str(tmp_path / name), photos(16)
    given = weights.load(str(DATA / 'vit_tiny_patch16_224.safetensors'))
    if layout in export.FORMATS:
        export.save(given, path, layout)
        found, how = export.run(path, layout, batch)
    else:
        given, _ = weights.approximate(given, path, layout)
        weights.save(given, path, layout)
        try:
            found, how = verify.other_logits(given, path, layout, batch)
        except verify.CannotRunError as reason:
            if layout in described.LOGITS:
                found = described.LOGITS[layout](given, path, batch)
                how = f'its description: {reason}'
            else:
                found = small.logits(weights.load(path), batch)
                how = f'reading it again: {reason}'
    difference = np.abs(found - small.logits(given, batch)).max()
    print(f'| {layout} | {name} | {how} | {difference:.1e} |')
    assert difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    'change',
    [dict(fit='squash', crop_ratio=1.0), dict(fit='transformers', crop_ratio=0.9)],
    ids=str,
)
def test_transformers_prepares_a_photo_equally(change, tmp_path, caplog):
    """The comparison detects an edge that is one pixel longer."""
    interop.require('transformers')
    given = small.make('vit', gelu='erf')
    given = dataclasses.replace(given, preprocess=given.preprocess | change)
    path = str(tmp_path / 'x')
    weights.save(given, path, 'huggingface')
    verify.verify(given, given, path, 'huggingface')
    assert 'On a photo prepared by transformers 0 % of the pixels differ' in caplog.text
    assert 'The source prepares that photo differently' not in caplog.text
    file = tmp_path / 'x/preprocessor_config.json'
    processor = json.loads(file.read_text())
    processor['size'] = {name: side + 1 for name, side in processor['size'].items()}
    file.write_text(json.dumps(processor))
    with refused('content', file=path):
        verify.verify(given, given, path, 'huggingface')


@pytest.mark.slow
@pytest.mark.parametrize(
    'change',
    [
        dict(fit='torchvision', crop_ratio=0.75),
        dict(fit='squash', crop_ratio=1.0, antialias=False, uint8_resize=False),
    ],
    ids=str,
)
def test_preprocessing_that_transformers_lacks_is_logged(change, tmp_path, caplog):
    """The crop of timm, for example, is half a pixel aside; everything else is exact."""
    interop.require('transformers')
    caplog.set_level('INFO', logger='vit_jax')
    given = small.make('vit', gelu='erf')
    given = dataclasses.replace(given, preprocess=given.preprocess | change)
    path = str(tmp_path / 'x')
    weights.save(given, path, 'huggingface')
    verify.verify(given, given, path, 'huggingface')
    assert 'On a photo prepared by transformers 0 % of the pixels differ' in caplog.text
    assert 'The source prepares that photo differently' in caplog.text
