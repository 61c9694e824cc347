import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.parameters import apply, randomised
from tests.support.steps import SMALL
from vit_jax import models
from vit_jax.models import masked, variants

PREPROCESS = {'mean': (0.4, 0.5, 0.6), 'std': (0.3, 0.2, 0.1)}


def setup(target='mean_color', rate=0.5, **fields):
    model = masked.build(
        models.build(SMALL | {'patch_size': (8, 8), 'pool': 'gap'} | fields, 5),
        {'target': target, 'rate': rate},
        PREPROCESS,
    )
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 24, 3)).astype(np.float32) / 255
    images = (pixels - np.float32(PREPROCESS['mean'])) / np.float32(PREPROCESS['std'])
    params = randomised(model, images)
    return model, params, images, pixels


def patches(pixels):
    """[batch, patches, 8, 8, 3], patch by patch."""
    return np.stack([blocks(image, 8) for image in pixels])


def blocks(image, side):
    """The square blocks of an image, in row-major order."""
    height, width = image.shape[:2]
    return [
        image[row : row + side, column : column + side]
        for row, column in itertools.product(range(0, height, side), range(0, width, side))
    ]


def color(part):
    """Three bits of each channel's mean."""
    means = part.astype(np.float64).mean((0, 1))
    red, green, blue = (min(int(mean * 8), 7) for mean in means)
    return 64 * red + 8 * green + blue


def test_parameters_are_float32_where_jax_has_64_bits():
    model, *_ = setup()
    with jax.enable_x64(True):
        params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 24, 3), np.float32))
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_targets_equal_a_reference():
    patches_of_images = patches(setup()[-1])
    references = {
        'mean_color': lambda patch: [color(patch)],
        'small_patch': lambda patch: [color(part) for part in blocks(patch, 2)],
        'pixels': lambda patch: 2 * patch.reshape(-1) - 1,
    }
    for target, reference in references.items():
        model, params, images, _ = setup(target)
        outputs = apply(model, {'params': params}, images)
        expected = np.array([[reference(patch) for patch in image] for image in patches_of_images])
        np.testing.assert_allclose(outputs['targets'], expected, atol=1e-5)
        tail = () if target == 'pixels' else (512,)
        assert outputs['predictions'].shape == (*expected.shape, *tail)


def test_partial_patches_are_dropped_like_in_the_model():
    model, params, images, pixels = setup(partial_patches='drop')
    larger = np.pad(images, [(0, 0), (0, 7), (0, 6), (0, 0)], constant_values=9)
    expected = apply(model, {'params': params}, images)
    outputs = apply(model, {'params': params}, larger)
    np.testing.assert_array_equal(outputs['targets'], expected['targets'])
    np.testing.assert_allclose(
        outputs['predictions'], expected['predictions'], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize('value', [0, 31, 32, 127, 128, 255])
def test_whole_grey_levels_have_their_own_upper_bits(value):
    images = jnp.full((1, 16, 16, 3), value / 255)
    assert np.unique(masked.targets(images, (16, 16), 'mean_color')) == [73 * (value >> 5)]


@pytest.mark.parametrize('rate', [0.15, 0.5, 1.0])
def test_corruption_has_its_shares(rate):
    drawn = masked.draw(jax.random.key(0), 400, 64, rate)
    corrupted = np.asarray(drawn.corrupted)
    replaced = np.asarray(drawn.source) != np.arange(64)
    assert (corrupted.sum(1) == round(64 * rate)).all()
    assert not (np.asarray(drawn.masked) & ~corrupted).any()
    assert not (replaced & ~corrupted).any()
    assert not (replaced & np.asarray(drawn.masked)).any()
    count = corrupted.sum()
    assert np.asarray(drawn.masked).sum() / count == pytest.approx(0.8, abs=0.02)
    assert replaced.sum() / count == pytest.approx(0.1, abs=0.015)
    places = corrupted.mean(0)
    assert np.abs(places - rate).max() < 0.12  # all places are corrupted equally often
    sources = np.bincount(np.asarray(drawn.source)[replaced], minlength=64)
    assert sources.min() > 0


@pytest.mark.parametrize('fields', [dict(), dict(num_registers=2, stem_norm=True)], ids=str)
def test_predictions_do_not_depend_on_masked_patches(fields):
    """They depend on the other patches."""
    model, params, images, pixels = setup(**fields)
    drawn = masked.draw(jax.random.key(0), 3, 12, 0.5)
    hidden = np.asarray(drawn.masked) & ~np.stack(
        [np.isin(np.arange(12), row[row != np.arange(12)]) for row in np.asarray(drawn.source)]
    )
    assert hidden.any()

    def changed(where):
        grid = where.reshape(3, 4, 3).repeat(8, 1).repeat(8, 2)[..., None]
        return np.asarray(
            apply(model, {'params': params}, np.where(grid, 0.3, images))['predictions']
        )

    before = apply(model, {'params': params}, images)['predictions']
    np.testing.assert_array_equal(changed(hidden), before)
    assert not np.array_equal(changed(~np.asarray(drawn.corrupted)), before)


def test_corruption_follows_its_key():
    model, params, images, _ = setup()

    @jax.jit
    def corrupted(rngs):
        return model.apply({'params': params}, images, train=True, rngs=rngs)['corrupted']

    first, again, other = (corrupted({'corruption': jax.random.key(k)}) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(corrupted({}), corrupted({}))


@pytest.mark.parametrize(
    ('model', 'target', 'field', 'value'),
    [
        ('r50x1', 'pixels', 'masked.target', 'pixels'),
        ('r50_b16', 'pixels', 'masked.target', 'pixels'),
        ('b16', 'pixels', 'model.pool', 'cls'),
        (
            variants.get('b16') | {'pool': 'gap', 'representation_size': 8},
            'mean_color',
            'model.representation_size',
            8,
        ),
        (variants.get('h14') | {'pool': 'gap'}, 'small_patch', 'masked.target', 'small_patch'),
    ],
)
def test_models_that_cannot_predict_patches_are_refused(model, target, field, value):
    with refused(kind='value', field=field, value=value):
        masked.check(models.build(model, 5), target)
