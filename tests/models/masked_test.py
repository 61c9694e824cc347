import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import apply, randomised
from tests.support.steps import SMALL
from vit_jax import models
from vit_jax.errors import UserError
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
    return np.stack(
        [
            [
                image[row : row + 8, column : column + 8]
                for row in range(0, 32, 8)
                for column in range(0, 24, 8)
            ]
            for image in pixels
        ]
    )


def color(part):
    """Three bits of each channel's mean."""
    red, green, blue = (min(int(part[..., c].astype(np.float64).mean() * 8), 7) for c in range(3))
    return 64 * red + 8 * green + blue


def test_parameters_are_float32_where_jax_has_64_bits():
    model, *_ = setup()
    with jax.enable_x64(True):
        params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 24, 3), np.float32))
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_targets_equal_a_reference():
    expected = patches(setup()[-1])
    for target, of_patch in {
        'mean_color': lambda x: [color(x)],
        'small_patch': lambda x: [
            color(x[i : i + 2, j : j + 2]) for i in range(0, 8, 2) for j in range(0, 8, 2)
        ],
        'pixels': lambda x: 2 * x.reshape(-1) - 1,
    }.items():
        model, params, images, _ = setup(target)
        outputs = apply(model, {'params': params}, images)
        wanted = np.array([[of_patch(x) for x in image] for image in expected])
        np.testing.assert_allclose(outputs['targets'], wanted, atol=1e-5)
        tail = () if target == 'pixels' else (512,)
        assert outputs['predictions'].shape == (*wanted.shape, *tail)


def test_partial_patches_are_dropped_as_the_model_drops_them():
    model, params, images, pixels = setup(partial_patches='drop')
    larger = np.pad(images, [(0, 0), (0, 7), (0, 6), (0, 0)], constant_values=9)
    whole, part = (apply(model, {'params': params}, x) for x in (images, larger))
    np.testing.assert_array_equal(whole['targets'], part['targets'])
    np.testing.assert_allclose(whole['predictions'], part['predictions'], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('value', [0, 31, 32, 127, 128, 255])
def test_whole_grey_levels_have_their_own_upper_bits(value):
    images = jnp.full((1, 16, 16, 3), value / 255)
    assert np.unique(masked.targets(images, (16, 16), 'mean_color')) == [73 * (value >> 5)]


@pytest.mark.parametrize('rate', [0.15, 0.5, 1.0])
def test_shares_of_what_is_done(rate):
    drawn = masked.draw(jax.random.key(0), 400, 64, rate)
    corrupted, replaced = np.asarray(drawn.corrupted), np.asarray(drawn.source) != np.arange(64)
    assert (corrupted.sum(1) == round(64 * rate)).all()
    assert not (np.asarray(drawn.masked) & ~corrupted).any()
    assert not (replaced & ~corrupted).any()
    assert not (replaced & np.asarray(drawn.masked)).any()
    count = corrupted.sum()
    assert np.asarray(drawn.masked).sum() / count == pytest.approx(0.8, abs=0.02)
    assert replaced.sum() / count == pytest.approx(0.1, abs=0.015)
    places = corrupted.mean(0)
    assert np.abs(places - rate).max() < 0.12  # every place as often
    sources = np.bincount(np.asarray(drawn.source)[replaced], minlength=64)
    assert sources.min() > 0


@pytest.mark.parametrize('fields', [dict(), dict(num_registers=2, stem_norm=True)], ids=str)
def test_predictions_do_not_see_what_is_hidden(fields):
    """Other pixels in masked patches change nothing, others in the rest do."""
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


def test_draws_are_those_of_the_key():
    model, params, images, _ = setup()

    @jax.jit
    def corrupted(rngs):
        return model.apply({'params': params}, images, train=True, rngs=rngs)['corrupted']

    one, same, other = (corrupted({'corruption': jax.random.key(k)}) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(corrupted({}), corrupted({}))


@pytest.mark.parametrize(
    ('model', 'target', 'message'),
    [
        ('r50x1', 'pixels', 'masked.target is pixels, which hides patches from a transformer'),
        ('r50_b16', 'pixels', 'this model has a ResNet in front of it'),
        (
            'b16',
            'pixels',
            'model.pool is cls and masked.target pixels: .* add --config.model.pool=gap',
        ),
        (
            variants.get('b16') | {'pool': 'gap', 'representation_size': 8},
            'mean_color',
            'representation_size is 8, which is a layer of the head',
        ),
        (
            variants.get('h14') | {'pool': 'gap'},
            'small_patch',
            r'4 x 4 parts do not divide patches of \(14, 14\) pixels',
        ),
    ],
)
def test_models_without_patches_to_predict(model, target, message):
    with pytest.raises(UserError, match=message):
        masked.check(models.build(model, 5), target)
