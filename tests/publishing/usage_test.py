"""The code of a card runs: it loads the folder in each program and gives the model's logits."""

import contextlib
import io

import jax
import numpy as np
import pytest

from tests.support import documentation, interop, small
from tests.support.datasets import write_images
from vit_jax import convert, weights
from vit_jax.publishing import card

NAME = 'my-lab/flowers'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes a folder for the Hub and a photo, and goes there: (model, layout, options) -> card."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / 'photos', ['x'], 1, size=(20, 30))
    (tmp_path / 'photos/x/000.png').rename(tmp_path / 'photo.jpg')

    def write(model, layout, *options, **change):
        weights.save(small.make(model, **change), 'source.safetensors', 'vit_jax')
        arguments = ['source.safetensors', 'model', f'--push={NAME}', '--dry_run', *options]
        with contextlib.redirect_stdout(io.StringIO()):
            assert convert.main([*arguments, f'--to={layout}']) == 0
        return (tmp_path / 'model' / card.FILE).read_text()

    return write


def run(text, program):
    """Runs the Python code of a program's section on the folder `model`; returns its names."""
    section = text.partition(f'### {program}\n')[2].partition('\n### ')[0]
    (code,) = documentation.blocks(section, 'python')
    code = code.replace(f'hf-hub:{NAME}', 'local-dir:model').replace(f'hf:{NAME}', 'model')
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code.replace(NAME, 'model'), names)
    return names, output.getvalue()


def expected_logits():
    """The logits of our model for the photo, which vit_jax prepares."""
    w = weights.load('model')
    return small.logits(w, weights.prepare(w, ['photo.jpg']))[0]


@pytest.mark.parametrize(('layout', 'program'), [('huggingface', 'transformers'), ('timm', 'timm')])
@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_the_code_gives_the_logits_and_probabilities_of_vit_jax(layout, program, loss, folder):
    interop.import_timm()
    interop.require('transformers')
    text = folder('vit', layout, f'--loss={loss}')
    names, output = run(text, program)
    ours, _ = run(text, 'vit_jax')
    np.testing.assert_allclose(names['logits'].numpy(), expected_logits(), rtol=0.01, atol=0.03)
    function = jax.nn.sigmoid if loss == 'sigmoid' else jax.nn.softmax
    np.testing.assert_allclose(
        names['probabilities'].numpy(), function(names['logits'].numpy()), rtol=1e-5
    )
    np.testing.assert_allclose(names['probabilities'].numpy(), ours['probabilities'][0], atol=0.01)
    best = np.argsort(-names['probabilities'].numpy())[:5]
    assert [line.split()[1] for line in output.splitlines()] == [small.CLASSES[k] for k in best]


@pytest.mark.parametrize('layout', ['huggingface', 'timm'])
def test_the_folder_gives_equal_logits_in_its_own_program(layout, folder):
    """On the same prepared images."""
    interop.import_timm()
    interop.require('transformers')
    text = folder('vit', layout)
    names, _ = run(text, {'huggingface': 'transformers', 'timm': 'timm'}[layout])
    w = small.make('vit')
    batch = small.images(w)
    small.assert_close(interop.logits(names['model'], batch), small.logits(w, batch))


@pytest.mark.parametrize(('layout', 'program'), [('huggingface', 'transformers'), ('timm', 'timm')])
def test_a_model_without_classes_gives_features(layout, program, folder):
    interop.import_timm()
    interop.require('transformers')
    text = folder('headless', layout)
    names, _ = run(text, program)
    ours, _ = run(text, 'vit_jax')
    np.testing.assert_allclose(names['features'].numpy(), ours['features'][0], rtol=0.01, atol=0.03)


def test_code_without_a_processor_for_the_photos_only_loads_the_model(folder, monkeypatch):
    interop.require('transformers')
    monkeypatch.setitem(small.IMAGES, 'rectangle', (16, 12, 3))
    text = folder(
        'rectangle', 'huggingface', '--preprocess=fit=torchvision', layer_norm_epsilon=1e-5
    )
    assert 'transformers has no processor for these photos' in text
    names, _ = run(text, 'transformers')
    assert names['model'].config.num_labels == 7
    assert 'processor' not in names


def test_the_card_of_a_folder_for_transformers_says_how_timm_reads_it(folder):
    interop.import_timm()
    text = folder('vit', 'huggingface')
    section = text.partition('### timm\n')[2]
    ((module, arguments), *_) = documentation.commands(section)
    assert module == 'vit_jax.convert'
    arguments = [argument.replace(f'hf:{NAME}', 'model') for argument in arguments]
    assert convert.main(arguments) == 0
    names, _ = run(text, 'timm')
    w = small.make('vit')
    batch = small.images(w)
    small.assert_close(interop.logits(names['model'].eval(), batch), small.logits(w, batch))
