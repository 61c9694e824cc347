import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import randomised
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import adapt

SMALL = dict(patch_size=(4, 4), hidden_size=16, num_layers=2, mlp_dim=24, num_heads=2)


def shapes(model, size):
    images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)['params']


def adapted(fields=(), new_fields=(), size=(16, 16), new_size=(16, 16), num_classes=7, **kwargs):
    """(pre-trained parameters of 5 classes, adapted ones, changes by name)."""
    old = models.build(SMALL, 5, **dict(fields))
    new = models.build(SMALL, num_classes, **{**dict(fields), **dict(new_fields)})
    params = jax.tree.map(np.asarray, randomised(old, jnp.zeros((1, *size, 3))))
    kwargs = {'source_grid': old.grid(size), **kwargs}
    result, changes = adapt.adapt(params, shapes(new, new_size), grid=new.grid(new_size), **kwargs)
    return params, result, {c.name: c.action for c in changes}


def test_the_head_is_new_and_all_else_is_kept():
    params, result, changes = adapted(dict(representation_size=12), dict(representation_size=0))
    assert {n for n in changes if changes[n] != 'loaded'} == {
        'head/kernel', 'head/bias', 'pre_logits/kernel', 'pre_logits/bias'}
    del params['head'], params['pre_logits']
    jax.tree.map(np.testing.assert_array_equal, params, result)


def test_bfloat16_weights_become_float32():
    model = models.build(SMALL, 5)
    params = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16),
                          randomised(model, jnp.zeros((1, 16, 16, 3))))
    result, _ = adapt.adapt(params, shapes(model, (16, 16)), grid=(4, 4))
    assert {x.dtype for x in jax.tree.leaves(result)} == {np.dtype('float32')}
    np.testing.assert_array_equal(result['cls'], params['cls'])


def bilinear(embedding, rows, columns):
    """With the corners aligned, point by point."""
    result = np.zeros((rows, columns, embedding.shape[-1]))
    for i, j in np.ndindex(rows, columns):
        y, x = (k * (n - 1) / (m - 1) for k, n, m in zip((i, j), embedding.shape, (rows, columns),
                                                         strict=False))
        top, left = min(int(y), len(embedding) - 2), min(int(x), embedding.shape[1] - 2)
        for r, c in np.ndindex(2, 2):
            weight = (1 - abs(y - top - r)) * (1 - abs(x - left - c))
            result[i, j] += weight * embedding[top + r, left + c]
    return result


@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_positions_are_resized_in_two_dimensions_and_the_class_token_s_is_kept(pool):
    params, result, changes = adapted(dict(pool=pool), new_size=(24, 40))
    old, new = (p['position']['embedding'][0] for p in (params, result))
    assert changes['position/embedding'] == 'resized'
    token = pool == 'cls'
    np.testing.assert_array_equal(new[:token], old[:token])
    expected = bilinear(old[token:].reshape(4, 4, -1), 6, 10).reshape(60, -1)
    np.testing.assert_allclose(new[token:], expected, atol=1e-5)


def test_bicubic_equals_pytorch_s():
    torch = pytest.importorskip('torch')
    embedding = np.random.default_rng(0).normal(size=(14, 14, 8)).astype(np.float32)
    for grid in [(24, 24), (7, 20)]:
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(embedding).permute(2, 0, 1)[None], size=grid, mode='bicubic',
            antialias=True)[0].permute(1, 2, 0).numpy()
        np.testing.assert_allclose(adapt.resize_grid(embedding, grid, 'bicubic'), expected,
                                   atol=1e-5)


@pytest.mark.parametrize('place', ['stem', 'every_layer'])
def test_learned_2d_positions_are_resized_by_axis(place):
    params, result, _ = adapted(dict(position='learned_2d', position_at=place), new_size=(28, 16))
    position = lambda p: (p if place == 'stem' else p['blocks'])['position']  # noqa: E731
    old, new = position(params), position(result)
    np.testing.assert_array_equal(new['column'], old['column'])
    assert new['row'].shape[-3] == 7
    np.testing.assert_allclose(new['row'][..., ::2, :, :], old['row'], atol=1e-6)


def test_positions_of_an_unknown_grid_fit_as_many_patches_only():
    with pytest.raises(UserError, match='has 8 patches in the pre-trained weights, which do not '
                                        'form a square, .* the images here have 4x4'):
        adapted(size=(8, 16), new_size=(16, 16), source_grid=None)
    _, _, changes = adapted(size=(8, 16), new_size=(8, 16), source_grid=None)
    assert changes['position/embedding'] == 'loaded'


@pytest.mark.parametrize('place', ['stem', 'every_layer'])
def test_another_grid_of_as_many_patches_is_resized_too(place):
    params, result, changes = adapted(dict(position_at=place), size=(8, 32), new_size=(16, 16))
    position = lambda p: (p if place == 'stem' else p['blocks'])['position']['embedding']  # noqa: E731
    assert list(changes.values()).count('resized') == 1
    old, new = (position(p).reshape(-1, 17, 16)[-1, 1:] for p in (params, result))
    expected = bilinear(old.reshape(2, 8, -1), 4, 4).reshape(16, -1)
    np.testing.assert_allclose(new, expected, atol=1e-5)


def test_a_larger_patch_s_kernel_gives_the_old_tokens_for_enlarged_patches():
    """FlexiViT: embedding resized patches with the resized kernel changes nothing."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(4, 4, 3, 16)).astype(np.float32)
    patch = rng.normal(size=(4, 4, 3)).astype(np.float32)
    large = np.asarray(jax.image.resize(patch, (6, 8, 3), 'bilinear', antialias=False))
    np.testing.assert_allclose(np.tensordot(large, adapt.resize_kernel(kernel, (6, 8)), 3),
                               np.tensordot(patch, kernel, 3), atol=1e-4)
    _, result, _ = adapted(new_fields=dict(patch_size=(8, 8)), new_size=(32, 32),
                           resize_patches=True)
    assert result['embedding']['kernel'].shape == (8, 8, 3, 16)


@pytest.mark.parametrize(('new_fields', 'message'), [
    (dict(hidden_size=24), r'blocks/attention/key/bias has shape \(2, 2, 8\) in the pre-trained '
                           r'weights and \(2, 2, 12\) in the model'),
    (dict(num_layers=3), r'blocks/.* has shape \(2, .*\) in the pre-trained weights and \(3, '),
    (dict(patch_size=(8, 8)), 'or set transfer.resize_patches=True'),
    (dict(pool='gap'), r'cls: only in the weights, \(1, 1, 16\)'),
    (dict(layer_scale_init=0.1), r'blocks/scale1: only in the model, \(2, 16\)')], ids=str)
def test_weights_of_another_model(new_fields, message):
    with pytest.raises(UserError, match=message):
        adapted(new_fields=new_fields)


def test_relative_positions_are_not_resized():
    with pytest.raises(UserError, match='relative has shape'):
        adapted(dict(position='relative', position_at='shared'), new_size=(24, 24))


def test_table_of_changes():
    old, new = models.build(SMALL, 5), models.build(SMALL, 7)
    _, changes = adapt.adapt(randomised(old, jnp.zeros((1, 16, 16, 3))), shapes(new, (24, 24)),
                             grid=(6, 6), source_grid=(4, 4))
    text = adapt.table(changes)
    assert 'resized      position/embedding' in text
    assert '(1, 37, 16), was (1, 17, 16)' in text
    assert 'dropped      head/kernel' in text
    assert 'initialised  head/kernel' in text
