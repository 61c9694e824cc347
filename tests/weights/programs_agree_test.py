"""onnxruntime, timm and transformers name the same class as predict, from their files alone.

Each program opens the photos itself and reads the preparation and the class names from its file.
The head of the model has a temperature, as vit_jax.fit writes it, which needs no other record.
"""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support import interop, small
from tests.support.images import picture
from vit_jax import convert, weights
from vit_jax.fitting.calibrated import with_temperature
from vit_jax.weights import description

NUM_PHOTOS = 30
TEMPERATURE = 1.7
# The chains that each program can do: onnxruntime all of them.
CHAINS = {
    'squash': dict(fit='squash', crop_ratio=1.0, resize='bicubic'),
    'torchvision': dict(fit='torchvision', crop_ratio=0.9, resize='bicubic'),
    'transformers': dict(fit='transformers', crop_ratio=0.8, resize='bilinear'),
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """JPEG files of odd sizes, also smaller than the images of the model, and thin."""
    folder = tmp_path_factory.mktemp('photos')
    rng = np.random.default_rng(0)
    paths = []
    for number in range(NUM_PHOTOS):
        height, width = rng.integers(5, 200, 2)
        if number % 5 == 0:
            height, width = rng.integers(3, 16, 2)
        photo = picture(height, width, seed=number)
        strength = rng.uniform(0.2, 1, 3)
        photo = Image.fromarray((np.asarray(photo) * strength).astype(np.uint8))
        paths.append(str(folder / f'{number}.jpg'))
        photo.save(paths[-1], quality=95)
    return paths


def make(chain, photos):
    """Weights with a temperature in their head, whose mean logits of the photos are zero."""
    given = small.make('vit', gelu='erf')
    preprocess = given.preprocess | CHAINS[chain] | {'uint8_resize': True, 'antialias': True}
    given = dataclasses.replace(given, preprocess=preprocess)
    head = dict(given.params['head'])
    head['bias'] = head['bias'] - small.logits(given, weights.prepare(given, photos)).mean(0)
    centred = dataclasses.replace(given, params={**given.params, 'head': head})
    return with_temperature(centred, TEMPERATURE)


def opened(path):
    return ImageOps.exif_transpose(Image.open(path)).convert('RGB')


def by_onnxruntime(folder, photos):
    """(probabilities, class names) of an ONNX file with preprocessing, by onnxruntime alone."""
    runtime = interop.require('onnxruntime')
    session = runtime.InferenceSession(f'{folder}/x.onnx', providers=['CPUExecutionProvider'])
    rows = [session.run(None, {'photo': np.asarray(opened(path))})[0][0] for path in photos]
    names = json.loads(session.get_modelmeta().custom_metadata_map['vit_jax.classes'])
    return np.stack(rows), names


def by_timm(folder, photos):
    """(probabilities, class names) of a directory for timm, by its own transforms."""
    timm = interop.import_timm()
    torch = interop.require('torch')
    interop.require('torchvision')
    model = timm.create_model(f'local-dir:{folder}/timm', pretrained=True).eval()
    config = timm.data.resolve_data_config(model=model)
    transform = timm.data.create_transform(**config)
    with torch.inference_mode():
        batch = torch.stack([transform(opened(path)) for path in photos])
        probabilities = model(batch).softmax(-1).numpy()
    return probabilities, model.pretrained_cfg['label_names']


def by_transformers(folder, photos):
    """(probabilities, class names) of a directory for Hugging Face, by its own processor."""
    transformers = interop.require('transformers')
    torch = interop.require('torch')
    path = f'{folder}/huggingface'
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend='pil')
    model = transformers.AutoModelForImageClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        rows = [processor(opened(path), return_tensors='pt')['pixel_values'] for path in photos]
        probabilities = model(torch.cat(rows)).logits.softmax(-1).numpy()
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    return probabilities, names


@pytest.mark.parametrize(
    ('chain', 'to', 'name', 'program'),
    [
        ('squash', 'onnx', 'x.onnx', by_onnxruntime),
        ('torchvision', 'onnx', 'x.onnx', by_onnxruntime),
        ('squash', 'timm', 'timm', by_timm),
        ('torchvision', 'timm', 'timm', by_timm),
        ('squash', 'huggingface', 'huggingface', by_transformers),
        ('transformers', 'huggingface', 'huggingface', by_transformers),
    ],
)
def test_every_photo_gets_the_class_of_predict(chain, to, name, program, photos, tmp_path):
    if to == 'onnx':
        interop.require('jax2onnx')
    given = make(chain, photos)
    weights.save(given, str(tmp_path / 'source.safetensors'), 'vit_jax')
    options = ['--embed_preprocessing'] if to == 'onnx' else []
    arguments = [f'{tmp_path}/source.safetensors', f'{tmp_path}/{name}', f'--to={to}', *options]
    assert convert.main(arguments) == 0
    expected = weights.predictor(given)(weights.prepare(given, photos))[1]
    assert len(set(expected.argmax(-1))) >= 3  # the photos are of several classes
    probabilities, names = program(tmp_path, photos)
    assert names == description.class_names(given)
    np.testing.assert_array_equal(probabilities.argmax(-1), expected.argmax(-1))
    np.testing.assert_allclose(probabilities, expected, atol=2e-4)
