"""Every snippet of docs/python.md runs in order and gives the shapes that the page states."""

import re

import numpy as np

from tests.support import small
from tests.support.datasets import write_images
from tests.support.runs import ROOT
from vit_jax import weights

TEXT = (ROOT / 'docs/python.md').read_text()
NAME = 'vit_tiny_patch16_224.safetensors'


def test_snippets_of_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = small.make('vit', gelu='erf', hidden_size=192, num_heads=3)
    weights.save(given, NAME, 'timm')  # its images are smaller than in the text
    write_images(tmp_path, ['x'], 2, size=(20, 30))
    files = [str(path) for path in sorted(tmp_path.glob('x/*'))]
    code = '\n'.join(re.findall(r'^    (.+)$', TEXT, re.MULTILINE)).replace('224, 224', '16, 16')
    names = {}
    exec(code.replace("['a.jpg', 'b.png']", repr(files)), names)
    assert names['batch'].shape == names['mine'].shape == (2, 16, 16, 3)
    assert (names['features'].shape, names['probabilities'].shape) == ((2, 192), (2, 7))
    assert names['outputs']['attention'].shape == (2, 2, 3, 5, 5)
    weights.predictor(names['w'])(names['mine'])
    assert weights.load('ti16').preprocess['resize'] == 'bicubic'
    np.testing.assert_array_equal(
        weights.load('ti16.safetensors').params['cls'], given.params['cls']
    )
