"""transformers loads our directories, and we load directories of transformers."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from tests.support import interop, small
from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.small import assert_close, assert_same_arrays, message, through
from vit_jax import weights
from vit_jax.data.resizing import resize_and_central_crop


@pytest.mark.parametrize(
    'change', [dict(), dict(gelu='erf', layer_norm_epsilon=1e-2, num_heads=4)], ids=['tanh', 'erf']
)
@pytest.mark.parametrize('model', nightly_but(['rectangle'], ['vit', 'rectangle']))
def test_transformers_loads_directories(model, change, tmp_path):
    transformers = interop.require('transformers')
    given = small.make(model, **change)
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    theirs, info = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / 'x', output_loading_info=True
    )
    assert not any(info.values()), info
    batch = small.images(given)
    assert_close(small.logits(given, batch), interop.logits(theirs.eval(), batch))
    assert theirs.config.id2label == dict(enumerate(small.CLASSES))
    theirs.save_pretrained(tmp_path / 'theirs')
    found = weights.load(str(tmp_path / 'theirs'))
    assert (found.model, found.classes) == (given.model, given.classes)
    assert_same_arrays(found.params, given.params)


def test_independent_classes_are_read_and_written(tmp_path):
    """transformers states them as a problem type."""
    given = small.make('vit')
    for loss, expected in (('sigmoid', 'multi_label_classification'), ('softmax', None)):
        weights.save(dataclasses.replace(given, loss=loss), str(tmp_path / loss), 'huggingface')
        path = tmp_path / loss / 'config.json'
        config = json.loads(path.read_text())
        assert config.get('problem_type') == expected
        assert weights.load(str(tmp_path / loss)).loss == (loss if expected else None)
    path.write_text(json.dumps(config | {'problem_type': 'single_label_classification'}))
    assert weights.load(str(tmp_path / 'softmax')).loss == 'softmax'


def test_newer_names_of_transformers_are_read(tmp_path):
    given = small.make('vit')
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    state = {k: x.numpy() for k, x in interop.to_huggingface(given.params).items()}
    assert 'vit.layers.1.attention.o_proj.weight' in state
    safetensors.numpy.save_file(
        {k: np.ascontiguousarray(x) for k, x in state.items()}, tmp_path / 'x/model.safetensors'
    )
    assert_same_arrays(weights.load(str(tmp_path / 'x')).params, given.params)


@pytest.mark.parametrize(
    'change', [dict(), dict(representation_size=20)], ids=['no-pooler', 'pooler']
)
def test_transformers_loads_a_model_without_head(change, tmp_path):
    transformers = interop.require('transformers')
    given = small.make('headless', **change)
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    theirs, info = transformers.AutoModel.from_pretrained(
        tmp_path / 'x', output_loading_info=True, add_pooling_layer=bool(change)
    )
    assert not any(info.values()), info
    torch, batch = interop.require('torch'), small.images(given)
    with torch.inference_mode():
        out = theirs.eval()(torch.from_numpy(batch).permute(0, 3, 1, 2))
    expected = out.pooler_output if change else out.last_hidden_state[:, 0]
    assert_close(small.logits(given, batch), expected.numpy())
    assert weights.load(str(tmp_path / 'x')).model == given.model


def test_image_processor_of_transformers_gives_our_pixels(tmp_path):
    """The processor rounds to 256 levels between the steps; everything else is equal."""
    transformers = interop.require('transformers')
    given = small.make('vit')
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'x')
    pixels = np.random.default_rng(0).integers(60, 190, (36, 24, 3)).astype(np.uint8)
    theirs = processor(Image.fromarray(pixels), return_tensors='np')['pixel_values'][0]
    # Squashed to 20x20 (16 / crop_ratio); the middle 16x16 of that, by bicubic resizing.
    ours = np.stack(
        [
            np.asarray(Image.fromarray(x.astype(np.float32)).resize((20, 20), 3))
            for x in pixels.transpose(2, 0, 1)
        ]
    )[:, 2:18, 2:18]
    mean, std = (np.array(given.preprocess[name])[:, None, None] for name in ('mean', 'std'))
    np.testing.assert_allclose(theirs * std, ours / 255 - mean, atol=1.1 / 255)


@pytest.mark.parametrize('size', [20, {'height': 20, 'width': 20}, {'shortest_edge': 20}], ids=str)
@pytest.mark.parametrize('crop', [16, {'height': 16, 'width': 16}], ids=str)
def test_crops_of_processors_give_equal_pixels(size, crop, tmp_path):
    """Images are square, and sizes are written in all ways. DeiT crops 256 to 224, for example."""
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


def test_rectangular_images_have_no_processor_and_a_warning(tmp_path, caplog):
    through(small.make('vit'), 'huggingface', tmp_path / 'square')
    assert (tmp_path / 'square/preprocessor_config.json').exists()
    assert not caplog.records
    given = small.make('rectangle')
    given = dataclasses.replace(given, preprocess=given.preprocess | {'fit': 'transformers'})
    through(given, 'huggingface', tmp_path / 'x')
    assert not (tmp_path / 'x/preprocessor_config.json').exists()
    assert json.loads((tmp_path / 'x/config.json').read_text())['image_size'] == [16, 12]
    assert 'Images are 16x12: processors of transformers' in caplog.text


def test_a_config_of_another_model_is_refused(tmp_path):
    through(small.make('vit'), 'huggingface', tmp_path / 'x')
    config = json.loads((tmp_path / 'x/config.json').read_text())
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'model_type': 'deit'}))
    with refused('choice', field='model_type', file=tmp_path / 'x', value='deit'):
        weights.load(str(tmp_path / 'x'))
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'hidden_act': 'relu'}))
    with refused('choice', field='hidden_act in config.json', value='relu'):
        weights.load(str(tmp_path / 'x'))
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'num_hidden_layers': 3}))
    assert 'no vit.encoder.layer.2.attention' in message(weights.load, str(tmp_path / 'x'))
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'hidden_size': 64}))
    assert 'vit.embeddings.cls_token has shape (1, 1, 128), expected (1, 1, 64)' in message(
        weights.load, str(tmp_path / 'x')
    )


@pytest.mark.parametrize(
    ('change', 'scale'),
    [(dict(rescale_factor=1 / 127.5), 2), (dict(do_rescale=False), 255)],
    ids=str,
)
def test_other_scales_of_processors_give_equal_pixels(change, scale, tmp_path):
    transformers = interop.require('transformers')
    weights.save(small.make('vit'), str(tmp_path / 'x'), 'huggingface')
    file = tmp_path / 'x/preprocessor_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = weights.load(str(tmp_path / 'x')).preprocess
    np.testing.assert_allclose(found['std'], np.array(small.PREPROCESS['std']) / scale)
    pixels = np.random.default_rng(0).integers(60, 190, (20, 20, 3)).astype(np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'x')
    theirs = processor(Image.fromarray(pixels), return_tensors='np')['pixel_values'][0]
    ours = resize_and_central_crop(pixels, found['image_size'], found) / 255
    ours = ((ours - found['mean']) / found['std']).transpose(2, 0, 1)
    np.testing.assert_allclose(ours, theirs, atol=1.1 / 255 / min(found['std']))


@pytest.mark.parametrize(
    'change',
    [
        dict(do_resize=False),
        dict(do_pad=True),
        dict(crop_pct=0.9),
        dict(crop_size=dict(height=30, width=30)),
    ],
    ids=str,
)
def test_processors_with_other_steps_are_refused(change, tmp_path):
    weights.save(small.make('vit'), str(tmp_path / 'x'), 'huggingface')
    file = tmp_path / 'x/preprocessor_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    ((field, value),) = change.items()
    with refused('inapplicable', field=field, file=tmp_path / 'x', value=value):
        weights.load(str(tmp_path / 'x'))


@pytest.mark.parametrize('size', [(36, 24), (24, 37), (16, 16), (9, 12)], ids=str)
@pytest.mark.parametrize('kind', ['ViTImageProcessor', 'CLIPImageProcessor'])
def test_photos_have_the_pixels_of_transformers(kind, size, tmp_path, caplog):
    """The processors are from ViT's own files; reading and writing keeps the file."""
    transformers = interop.require('transformers')
    edges = dict(height=16, width=16) if kind[0] == 'V' else dict(shortest_edge=18)
    values = dict(size=edges, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    if kind[0] == 'C':
        values |= dict(do_center_crop=True, crop_size=dict(height=16, width=16))
    processor = getattr(transformers, kind)(**values)
    weights.save(small.make('vit'), str(tmp_path / 'x'), 'huggingface')
    (tmp_path / 'x/preprocessor_config.json').write_text(processor.to_json_string())
    caplog.clear()
    found = weights.load(str(tmp_path / 'x'))
    weights.save(found, str(tmp_path / 'y'), 'huggingface')
    assert weights.load(str(tmp_path / 'y')).preprocess == found.preprocess
    assert not caplog.records
    pixels = np.random.default_rng(0).integers(60, 190, (*size, 3)).astype(np.uint8)
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'y')
    ours = resize_and_central_crop(pixels, (16, 16), found.preprocess)
    for theirs in (processor, again):
        values = theirs(Image.fromarray(pixels), return_tensors='np')['pixel_values'][0]
        theirs = (values.transpose(1, 2, 0) * 0.5 + 0.5) * 255
        np.testing.assert_allclose(ours, theirs, atol=1.1)  # theirs are rounded twice


def test_a_pooler_of_another_function_is_refused(tmp_path):
    given = small.make('headless', representation_size=20)
    weights.save(given, str(tmp_path / 'x'), 'huggingface')
    file = tmp_path / 'x/config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(pooler_act='relu')))
    with refused('choice', field='pooler_act in config.json', value='relu'):
        weights.load(str(tmp_path / 'x'))
