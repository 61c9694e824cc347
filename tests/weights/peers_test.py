"""Files written here are loaded by timm and transformers themselves, and theirs are loaded here.

Logits then agree within 1e-5 of the largest. described_test.py has the programs that cannot be run.
"""

import json
import tarfile

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from tests.support import interop, small
from tests.support.runs import ROOT
from tests.support.small import assert_close, assert_same_arrays
from tests.weights import described_test
from vit_jax import models, weights
from vit_jax.data.images import resize_and_central_crop
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights import export, peers

DATA = ROOT.parent / 'shared/data'
real_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f'needs the released weights and photos in {DATA}')


def approximated(name, path, layout, **change):
    return weights.approximate(small.make(name, **change), str(path), layout)[0]


def timm_model(given):
    shape = (*given.image_size(), given.channels())
    make = interop.timm_vit if 'hidden_size' in given.model else interop.timm_bit
    return make(given.model, shape, given.num_classes)


@pytest.mark.parametrize('name', ['model.pth', 'model.safetensors'])
@pytest.mark.parametrize('model', [
    'vit', 'gap', 'map', 'layer-scale', 'no-position', 'rectangle', 'root', 'hybrid', 'bit'])
def test_timm_loads_files(model, name, tmp_path):
    """With the arrays that an independent conversion gives."""
    torch = interop.require('torch')
    given = approximated(model, tmp_path / name, 'timm')
    weights.save(given, str(tmp_path / name), 'timm')
    if name == 'model.pth':
        state = torch.load(tmp_path / name, weights_only=True)
    else:
        state = interop.require('safetensors.torch').load_file(tmp_path / name)
    expected = interop.to_timm(given.params)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[n], expected[n]) for n in expected)
    timm_model(given).load_state_dict(state, strict=True)  # parity_test.py has the logits


def timm_directory(given, path):
    timm = interop.import_timm()
    weights.save(given, str(path), 'timm')
    return timm.create_model(f'local-dir:{path}', pretrained=True).eval()


@pytest.mark.parametrize('model', ['vit', 'gap', 'map', 'layer-scale', 'rectangle'])
def test_timm_builds_what_a_directory_describes(model, tmp_path):
    given = small.make(model, num_heads=4)
    theirs = timm_directory(given, tmp_path / 'x')
    batch = small.images(given)
    assert_close(small.logits(given, batch), interop.logits(theirs, batch))
    assert theirs.pretrained_cfg['label_names'] == small.CLASSES
    assert {k: theirs.pretrained_cfg[k] for k in ('input_size', 'crop_pct', 'interpolation')} == {
        'input_size': (given.channels(), *given.image_size()), 'crop_pct': 0.8,
        'interpolation': 'bicubic'}


@pytest.mark.parametrize(('name', 'architecture'), [
    ('r_ti16', 'vit_tiny_r_s16_p8_224'),
    pytest.param('r50x1', 'resnetv2_50x1_bit', marks=pytest.mark.slow)])
def test_timm_builds_hybrids_and_bit_that_it_has_names_for(name, architecture, tmp_path):
    """And what it saves has the fields of our model of that name, but for timm's formulas."""
    theirs = interop.import_timm().create_model(architecture, num_classes=5)
    state = theirs.state_dict()
    files = tmp_path / 'x.safetensors'
    safetensors.numpy.save_file({k: x.numpy() for k, x in state.items()}, files)
    found, expected = weights.load(str(files)), models.fields(name)
    expected['resnet'] |= dict(group_norm_epsilon=1e-5, weight_epsilon=1e-8,
                               weight_epsilon_on='variance')
    assert found.model == expected | ({'gelu': 'erf'} if 'gelu' in expected else {})
    again = timm_directory(found, tmp_path / 'x').state_dict()
    assert again.keys() == state.keys()
    assert all((x == state[k]).all() for k, x in again.items())


def timm_heads(name, monkeypatch):
    """(heads of what is loaded, those of the model that timm calls so): of shapes, no values."""
    timm, torch = interop.import_timm(), interop.require('torch')
    with torch.device('meta'):
        theirs = timm.create_model(name)
    arrays = {k: np.broadcast_to(np.float32(0), x.shape) for k, x in theirs.state_dict().items()}
    config = {'architecture': name, 'pretrained_cfg': dict(theirs.pretrained_cfg)}
    monkeypatch.setattr(weights.files, 'read_path', lambda _: (arrays, {}, {'config.json': config}))
    monkeypatch.setattr(weights.table_lib, 'stack', lambda flat: flat)
    return weights.load(name).model['num_heads'], theirs.blocks[0].attn.num_heads


def test_names_of_models_are_those_of_timm():
    names = set(interop.import_timm().list_models())
    for name in ('ti16', 's32', 'b16', 'b8', 'l14', 'h14'):
        fields = models.fields('b16') | variants.get(name)
        written = weights.timm._architecture(fields)
        assert written in names
        assert written.endswith(f'_patch{name.lstrip("tisblh")}_224')
    assert weights.timm._architecture(fields | {'hidden_size': 1408}) == 'vit_base_patch16_224'


def test_heads_that_sizes_do_not_tell(monkeypatch):
    assert timm_heads('test_vit', monkeypatch) == (2, 2)
    assert timm_heads('vit_base_patch16_gap_224', monkeypatch) == (16, 16)
    with pytest.raises(UserError, match='embedding/kernel, which tells the size of the model, is'):
        timm_heads('vit_base_mci_224', monkeypatch)


@pytest.mark.nightly
def test_heads_of_every_model_of_timm(monkeypatch):
    loaded = 0
    for name in interop.import_timm().list_models(module=[
            'vision_transformer', 'vision_transformer_hybrid', 'deit']):
        try:
            ours, theirs = timm_heads(name, monkeypatch)
        except UserError:
            continue
        assert ours == theirs, name
        loaded += 1
    assert loaded > 80


@pytest.mark.parametrize(('model', 'layout'), [
    ('vit', 'google'), ('gap', 'google'), ('root', 'google'), ('hybrid', 'google'),
    ('bit', 'google'), ('gap', 'big_vision'), ('map', 'big_vision')])
def test_timm_reads_npz(model, layout, tmp_path):
    """timm's own reader of Google's files gives the arrays of the independent conversion."""
    given = small.make(model)
    weights.save(given, str(tmp_path / 'x.npz'), layout)
    theirs = timm_model(given)
    theirs.load_pretrained(str(tmp_path / 'x.npz'))
    found, expected = theirs.state_dict(), interop.to_timm(given.params)
    assert found.keys() == expected.keys()
    assert all((found[n] == x).all() for n, x in expected.items())


@pytest.mark.parametrize('change', [dict(), dict(gelu='erf', layer_norm_epsilon=1e-2, num_heads=4)],
                         ids=['tanh', 'erf'])
@pytest.mark.parametrize('model', ['vit', 'rectangle'])
def test_transformers_loads_directories(model, change, tmp_path):
    transformers = interop.require('transformers')
    given = small.make(model, **change)
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    theirs, info = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / 'x', output_loading_info=True)
    assert not any(info.values()), info
    batch = small.images(given)
    assert_close(small.logits(given, batch), interop.logits(theirs.eval(), batch))
    assert theirs.config.id2label == dict(enumerate(small.CLASSES))
    theirs.save_pretrained(tmp_path / 'theirs')
    found = weights.load(str(tmp_path / 'theirs'))
    assert (found.model, found.classes) == (given.model, given.classes)
    assert_same_arrays(found.params, given.params)


def test_newer_names_of_transformers(tmp_path):
    given = small.make('vit')
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    state = {k: x.numpy() for k, x in interop.to_huggingface(given.params).items()}
    assert 'vit.layers.1.attention.o_proj.weight' in state
    safetensors.numpy.save_file(
        {k: np.ascontiguousarray(x) for k, x in state.items()}, tmp_path / 'x/model.safetensors')
    assert_same_arrays(weights.load(str(tmp_path / 'x')).params, given.params)


@pytest.mark.parametrize('change', [dict(), dict(representation_size=20)],
                         ids=['no-pooler', 'pooler'])
def test_transformers_loads_a_model_without_head(change, tmp_path):
    transformers = interop.require('transformers')
    given = small.make('headless', **change)
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    theirs, info = transformers.AutoModel.from_pretrained(
        tmp_path / 'x', output_loading_info=True, add_pooling_layer=bool(change))
    assert not any(info.values()), info
    torch, batch = interop.require('torch'), small.images(given)
    with torch.inference_mode():
        out = theirs.eval()(torch.from_numpy(batch).permute(0, 3, 1, 2))
    expected = out.pooler_output if change else out.last_hidden_state[:, 0]
    assert_close(small.logits(given, batch), expected.numpy())
    assert weights.load(str(tmp_path / 'x')).model == given.model


def test_image_processor_of_transformers(tmp_path):
    """Its pixels are those of evaluation, but for its rounding to 256 levels in between."""
    transformers = interop.require('transformers')
    given = small.make('vit')
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'x')
    pixels = np.random.default_rng(0).integers(60, 190, (36, 24, 3)).astype(np.uint8)
    theirs = processor(Image.fromarray(pixels), return_tensors='np')['pixel_values'][0]
    # 36x24 covers 20x20 (16 / crop_ratio) as 30x20; the middle 16x16 of that, by bicubic resizing.
    ours = np.stack([np.asarray(Image.fromarray(x.astype(np.float32)).resize((20, 30), 3))
                     for x in pixels.transpose(2, 0, 1)])[:, 7:23, 2:18]
    mean, std = (np.array(given.preprocess[name])[:, None, None] for name in ('mean', 'std'))
    np.testing.assert_allclose(theirs * std, ours / 255 - mean, atol=1.1 / 255)


@pytest.mark.parametrize('size', [20, {'height': 20, 'width': 20}, {'shortest_edge': 20}], ids=str)
@pytest.mark.parametrize('crop', [16, {'height': 16, 'width': 16}], ids=str)
def test_crops_of_processors_of_transformers(size, crop, tmp_path):
    """Pixels of a square image are theirs however sizes are written, as 256 -> 224 of DeiT's."""
    transformers = interop.require('transformers')
    weights.save(small.make('vit'), str(tmp_path / 'x'), 'huggingface')
    processor = transformers.DeiTImageProcessor(size=size, crop_size=crop)
    file = tmp_path / 'x/preprocessor_config.json'
    file.write_text(json.dumps(processor.to_dict() | {'size': size, 'crop_size': crop}))
    found = weights.load(str(tmp_path / 'x')).preprocess
    assert found['crop_ratio'] == 16 / 20
    pixels = np.random.default_rng(0).integers(60, 190, (30, 30, 3)).astype(np.uint8)
    theirs = processor(Image.fromarray(pixels), return_tensors='np')['pixel_values'][0]
    ours = resize_and_central_crop(pixels, found['image_size'], found) / 255
    ours = ((ours - found['mean']) / found['std']).transpose(2, 0, 1)
    np.testing.assert_allclose(ours, theirs, atol=1.1 / 255 / min(found['std']))


# Released weights, photos.


def photos(number):
    """Photos as the released weights want them, float32 [number, 224, 224, 3]."""
    with tarfile.open(DATA / 'flowers17.tar') as file:
        members = [m for m in file.getmembers() if m.name.endswith('.jpg')]
        images = [Image.open(file.extractfile(m)).convert('RGB').resize((224, 224))
                  for m in members[::len(members) // number][:number]]
    return np.stack([np.asarray(x, np.float32) for x in images]) / 127.5 - 1


@real_data
def test_released_weights_on_photos(tmp_path):
    given = weights.load(str(DATA / 'vit_tiny_patch16_224.safetensors'))
    batch = photos(3)
    found = small.logits(given, batch)
    theirs = timm_model(given)
    theirs.load_state_dict(interop.require('safetensors.torch').load_file(
        DATA / 'vit_tiny_patch16_224.safetensors'), strict=True)
    assert np.abs(found).max() > 5
    assert np.abs(found - interop.logits(theirs.eval(), batch)).max() < 1e-4
    weights.save(given, str(tmp_path / 'hf'), 'huggingface')
    interop.require('transformers')
    theirs, _ = peers.logits(given, str(tmp_path / 'hf'), 'huggingface', batch)
    assert np.abs(found - theirs).max() < 1e-4


@real_data
@pytest.mark.slow
@pytest.mark.parametrize(('layout', 'name'), [
    ('timm', 'x'), ('timm', 'x.pth'), ('timm', 'x.safetensors'), ('huggingface', 'x'),
    ('torchvision', 'x.pth'), ('google', 'x.npz'), ('big_vision', 'x.npz'),
    ('vit_jax', 'x.safetensors'), ('stablehlo', 'x'), ('onnx', 'x.onnx')])
def test_table_of_the_docs(layout, name, tmp_path):
    """Prints the rows of docs/conversion.md: logits of released weights on 16 photos."""
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
            found, how = peers.logits(given, path, layout, batch)
        except peers.CannotRunError as reason:
            if layout in described_test.LOGITS:
                found = described_test.LOGITS[layout](given, path, batch)
                how = f'its description: {reason}'
            else:
                found, how = small.logits(weights.load(path), batch), f'reading back: {reason}'
    difference = np.abs(found - small.logits(given, batch)).max()
    print(f'| {layout} | {name} | {how} | {difference:.1e} |')
    assert difference < 1e-4
