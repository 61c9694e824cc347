import time

import numpy as np
import pytest
from matplotlib.text import Text
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
    curves.draw(rows, few, 10, 1.0)
    curves.draw(
        rows + [{'step': k, 'eval/accuracy': k / 30, 'eval/loss': 2 / k} for k in range(10, 30, 5)],
        more,
        10,
        1.0,
    )
    (less_ink, shape), (more_ink, _) = ink(few / 'curves.png'), ink(more / 'curves.png')
    assert shape[0] > 300
    assert shape[1] > 1000
    assert more_ink > less_ink + 100
    assert [p.name for p in more.iterdir()] == ['curves.png']


def test_a_name_is_no_mathematics(tmp_path):
    workdir = tmp_path / r'a$\frac{x$b'
    workdir.mkdir()
    curves.draw([{'step': 1, 'train/loss': 1.0}], workdir, 10, 1.0)
    assert ink(workdir / 'curves.png')[0] > 1000


def test_a_picture_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / 'curves.png').mkdir()
    curves.draw([{'step': 1, 'train/loss': 1.0}], tmp_path, 10, 1.0)
    assert 'curves.png cannot be written (Is a directory): the run goes on' in caplog.text


ROWS = [
    row
    for k in range(1, 101)
    for row in (
        {
            'step': 20 * k,
            'train/loss': 3 / k,
            'train/learning_rate': 1e-3,
            'train/grad_norm': 1 / k,
            'train/images_per_sec': 80.0,
        },
        {
            'step': 20 * k,
            'eval/accuracy': 0.5 + 0.4 * (k == 70),
            'eval/accuracy_top5': 0.9,
            'eval/loss': 2 + abs(k - 40) / 99,
        },
    )[: 2 if k % 10 == 0 else 1]
]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """(rows, classes) -> the title, and by the title of a panel its axes, as they are drawn."""

    def draw(rows, num_classes):
        kept = []
        monkeypatch.setattr(curves, 'save', lambda figure, path, dpi: kept.append((figure, path)))
        curves.draw(rows, str(tmp_path / 'runs' / 'a'), num_classes, 3661)
        ((figure, path),) = kept
        assert path == str(tmp_path / 'runs' / 'a' / 'curves.png')
        figure.draw_without_rendering()  # makes the ticks
        return figure.get_suptitle(), {axes.get_title('left'): axes for axes in figure.axes}

    return draw


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_what_stands_on_the_picture(drawn):
    title, axes = drawn(ROWS, 10)
    assert title.startswith('runs/a: 2,000 steps in 01:01:01')
    assert time.strftime('%Y-') in title
    assert list(axes) == ['loss', 'accuracy', 'learning rate', 'gradient norm', 'training images/s']
    assert legend(axes['loss']) == [
        'train/loss 0.03031 (smoothed)',
        'eval/loss 2.606, best 2 at 800',
    ]
    assert legend(axes['accuracy']) == [
        'eval/accuracy 50.00 %, best 90.00 % at 1,400',
        'eval/accuracy_top5 90.00 %, best 90.00 % at 2,000',
    ]
    line, star = axes['accuracy'].lines[:2]
    assert (line.get_marker(), list(line.get_xdata())) == ('.', list(range(200, 2001, 200)))
    assert (star.get_marker(), *star.get_data()) == ('*', [1400], [0.9])
    assert all('%' in label.get_text() for label in axes['accuracy'].get_yticklabels())
    raw, mean = axes['loss'].lines[:2]
    np.testing.assert_array_equal(raw.get_ydata(), [3 / k for k in range(1, 101)])
    np.testing.assert_allclose(mean.get_ydata(), curves.smoothed(raw.get_ydata()))
    assert axes['training images/s'].get_ylim()[0] == 0


def test_of_fewer_than_ten_classes_the_top_5_is_left_out(drawn):
    assert len(legend(drawn(ROWS, 9)[1]['accuracy'])) == 1
    assert not drawn(ROWS[:1], 9)[1]['accuracy'].lines  # nor any, before an evaluation


@pytest.mark.parametrize(
    'rows',
    [
        ROWS[:1],
        ROWS,
        [row | {'eval/mean_average_precision': 0.7} if 'eval/loss' in row else row for row in ROWS],
    ],
)
@pytest.mark.parametrize('num_classes', [9, 10])
def test_legends_cover_neither_values_nor_titles(rows, num_classes, drawn):
    """They are outside of their axes, below the title, inside of the picture."""
    panels = drawn(rows, num_classes)[1]
    explained = [title for title in ('loss', 'accuracy') if panels[title].lines]
    assert [title for title, axes in panels.items() if axes.get_legend()] == explained
    for name in explained:
        axes, page = panels[name], panels[name].figure.bbox
        box, title = (
            axes.get_legend().get_window_extent(),
            next(
                child
                for child in axes.get_children()
                if isinstance(child, Text) and child.get_text() == name
            ).get_window_extent(),
        )
        assert axes.get_window_extent().y1 <= box.y0 < box.y1 <= title.y0 < title.y1 <= page.y1
        assert 0 <= box.x0 < box.x1 <= page.x1


@pytest.mark.parametrize('count', [1, 39, 40, 97, 400])
def test_smoothed_is_the_mean_of_neighbours(count):
    values, reach = np.random.default_rng(0).normal(size=count), count // 40
    expected = [values[max(k - reach, 0) : k + reach + 1].mean() for k in range(count)]
    np.testing.assert_allclose(curves.smoothed(values), expected, rtol=1e-10, atol=1e-12)
