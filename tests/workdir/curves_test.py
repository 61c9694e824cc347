import time

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from vit_jax.workdir import curves

pytestmark = pytest.mark.pictures


def ink(path):
    """(number of dark or coloured pixels, shape) of a picture."""
    pixels = np.asarray(Image.open(path).convert('RGB')).astype(int)
    return int((pixels.min(axis=-1) < 200).sum()), pixels.shape


def test_evaluations_are_drawn_in_addition_to_training(tmp_path):
    training = [{'step': k, 'train/loss': 1 / k, 'train/learning_rate': 1e-3} for k in range(1, 30)]
    evaluations = [
        {'step': k, 'eval/accuracy': k / 30, 'eval/loss': 2 / k} for k in range(10, 30, 5)
    ]
    without = tmp_path / 'without'
    complete = tmp_path / 'complete'
    without.mkdir()
    complete.mkdir()
    curves.draw(training, without, 10, 1.0)
    curves.draw(training + evaluations, complete, 10, 1.0)
    ink_without, shape = ink(without / 'curves.png')
    ink_complete, _ = ink(complete / 'curves.png')
    assert shape[0] > 300
    assert shape[1] > 1000
    assert ink_complete > ink_without + 100
    assert [p.name for p in complete.iterdir()] == ['curves.png']


def test_title_shows_a_name_with_dollar_signs(tmp_path):
    workdir = tmp_path / r'a$\frac{x$b'
    workdir.mkdir()
    curves.draw([{'step': 1, 'train/loss': 1.0}], workdir, 10, 1.0)
    assert ink(workdir / 'curves.png')[0] > 1000


def test_picture_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / 'curves.png').mkdir()
    curves.draw([{'step': 1, 'train/loss': 1.0}], tmp_path, 10, 1.0)
    assert 'curves.png cannot be written (Is a directory): the run continues' in caplog.text


def rows_of_a_run():
    """A training row every 20 steps, and an evaluation every 200; step 1,400 is the best."""
    rows = []
    for k in range(1, 101):
        step = 20 * k
        rows.append(
            {
                'step': step,
                'train/loss': 3 / k,
                'train/learning_rate': 1e-3,
                'train/grad_norm': 1 / k,
                'train/images_per_sec': 80.0,
            }
        )
        if k % 10 == 0:
            rows.append(
                {
                    'step': step,
                    'eval/accuracy': 0.9 if k == 70 else 0.5,
                    'eval/accuracy_top5': 0.9,
                    'eval/loss': 2 + abs(k - 40) / 99,
                }
            )
    return rows


ROWS = rows_of_a_run()


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws curves: (rows, num_classes) -> (title, axes by the title of their panel)."""

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


def test_titles_legends_and_values_of_the_picture(drawn):
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


def test_fewer_than_ten_classes_have_no_top_5_curve(drawn):
    assert len(legend(drawn(ROWS, 9)[1]['accuracy'])) == 1
    assert not drawn(ROWS[:1], 9)[1]['accuracy'].lines  # before the first evaluation


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
    """Legends are outside of their axes, below the title and inside the picture."""
    panels = drawn(rows, num_classes)[1]
    names = [title for title in ('loss', 'accuracy') if panels[title].lines]
    assert [title for title, axes in panels.items() if axes.get_legend()] == names
    for name in names:
        axes = panels[name]
        picture = axes.figure.bbox
        box = axes.get_legend().get_window_extent()
        (title_text,) = (
            child
            for child in axes.get_children()
            if isinstance(child, Text) and child.get_text() == name
        )
        title = title_text.get_window_extent()
        assert axes.get_window_extent().y1 <= box.y0 < box.y1 <= title.y0 < title.y1 <= picture.y1
        assert 0 <= box.x0 < box.x1 <= picture.x1


@pytest.mark.parametrize('count', [1, 39, 40, 97, 400])
def test_smoothed_is_the_mean_of_neighbours(count):
    values = np.random.default_rng(0).normal(size=count)
    reach = count // 40
    expected = [values[max(k - reach, 0) : k + reach + 1].mean() for k in range(count)]
    np.testing.assert_allclose(curves.smoothed(values), expected, rtol=1e-10, atol=1e-12)
