import numpy as np
import pytest
from PIL import Image

from vit_jax.workdir import curves

pytestmark = pytest.mark.pictures


def ink(path):
    """Dark or coloured pixels of a picture."""
    pixels = np.asarray(Image.open(path).convert('RGB')).astype(int)
    return int((pixels.min(axis=-1) < 200).sum()), pixels.shape


def test_draws_every_series_it_has(tmp_path):
    rows = [{'step': k, 'train/loss': 1 / k, 'train/learning_rate': 1e-3} for k in range(1, 30)]
    few, more = tmp_path / 'few', tmp_path / 'more'
    few.mkdir()
    more.mkdir()
    curves.draw(rows, few)
    curves.draw(rows + [{'step': k, 'eval/accuracy': k / 30, 'eval/loss': 2 / k}
                        for k in range(10, 30, 5)], more)
    (less_ink, shape), (more_ink, _) = ink(few / 'curves.png'), ink(more / 'curves.png')
    assert shape[0] > 300
    assert shape[1] > 1000
    assert more_ink > less_ink + 100
    assert [p.name for p in more.iterdir()] == ['curves.png']


def test_a_picture_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / 'curves.png').mkdir()
    curves.draw([{'step': 1, 'train/loss': 1.0}], tmp_path)
    assert 'curves.png cannot be written (Is a directory): the run goes on' in caplog.text
