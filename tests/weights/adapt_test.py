"""Pre-trained parameters in another model: a new head, resized positions and patches."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.parameters import randomised
from vit_jax import models
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


def test_the_head_is_new_and_all_other_parameters_are_kept():
    params, result, changes = adapted(dict(representation_size=12), dict(representation_size=0))
    assert {n for n in changes if changes[n] != 'loaded'} == {
        'head/kernel',
        'head/bias',
        'pre_logits/kernel',
        'pre_logits/bias',
    }
    del params['head'], params['pre_logits']
    jax.tree.map(np.testing.assert_array_equal, params, result)


def test_bfloat16_weights_become_float32():
    model = models.build(SMALL, 5)
    params = jax.tree.map(
        lambda x: np.asarray(x, jnp.bfloat16), randomised(model, jnp.zeros((1, 16, 16, 3)))
    )
    result, _ = adapt.adapt(params, shapes(model, (16, 16)), grid=(4, 4))
    assert {x.dtype for x in jax.tree.leaves(result)} == {np.dtype('float32')}
    np.testing.assert_array_equal(result['cls'], params['cls'])


def bilinear(embedding, rows, columns):
    """Bilinear interpolation with aligned corners, point by point."""
    result = np.zeros((rows, columns, embedding.shape[-1]))
    for i, j in np.ndindex(rows, columns):
        y, x = (
            k * (n - 1) / (m - 1)
            for k, n, m in zip((i, j), embedding.shape, (rows, columns), strict=False)
        )
        top, left = min(int(y), len(embedding) - 2), min(int(x), embedding.shape[1] - 2)
        for r, c in np.ndindex(2, 2):
            weight = (1 - abs(y - top - r)) * (1 - abs(x - left - c))
            result[i, j] += weight * embedding[top + r, left + c]
    return result


@pytest.mark.parametrize('registers', [0, 3])
@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_positions_of_patches_are_resized_and_positions_of_other_tokens_are_kept(pool, registers):
    params, result, changes = adapted(dict(pool=pool, num_registers=registers), new_size=(24, 40))
    old, new = (p['position']['embedding'][0] for p in (params, result))
    assert changes['position/embedding'] == 'resized'
    token = (pool == 'cls') + registers
    np.testing.assert_array_equal(new[:token], old[:token])
    expected = bilinear(old[token:].reshape(4, 4, -1), 6, 10).reshape(60, -1)
    np.testing.assert_allclose(new[token:], expected, atol=1e-5)


def test_bicubic_equals_pytorch():
    torch = pytest.importorskip('torch')
    embedding = np.random.default_rng(0).normal(size=(14, 14, 8)).astype(np.float32)
    for grid in [(24, 24), (7, 20)]:
        expected = (
            torch.nn.functional.interpolate(
                torch.from_numpy(embedding).permute(2, 0, 1)[None],
                size=grid,
                mode='bicubic',
                antialias=True,
            )[0]
            .permute(1, 2, 0)
            .numpy()
        )
        np.testing.assert_allclose(
            adapt.resize_grid(embedding, grid, 'bicubic'), expected, atol=1e-5
        )


@pytest.mark.parametrize('place', ['stem', 'every_layer'])
def test_learned_2d_positions_are_resized_by_axis(place):
    params, result, _ = adapted(dict(position='learned_2d', position_at=place), new_size=(28, 16))
    position = lambda p: (p if place == 'stem' else p['blocks'])['position']  # noqa: E731
    old, new = position(params), position(result)
    np.testing.assert_array_equal(new['column'], old['column'])
    assert new['row'].shape[-3] == 7
    np.testing.assert_allclose(new['row'][..., ::2, :, :], old['row'], atol=1e-6)


def test_positions_of_an_unknown_grid_fit_as_many_patches_only():
    with refused('content', field='position/embedding'):
        adapted(size=(8, 16), new_size=(16, 16), source_grid=None)
    _, _, changes = adapted(size=(8, 16), new_size=(8, 16), source_grid=None)
    assert changes['position/embedding'] == 'loaded'


@pytest.mark.parametrize('place', ['stem', 'every_layer'])
def test_positions_of_another_grid_with_as_many_patches_are_resized(place):
    params, result, changes = adapted(dict(position_at=place), size=(8, 32), new_size=(16, 16))
    position = lambda p: (p if place == 'stem' else p['blocks'])['position']['embedding']  # noqa: E731
    assert list(changes.values()).count('resized') == 1
    old, new = (position(p).reshape(-1, 17, 16)[-1, 1:] for p in (params, result))
    expected = bilinear(old.reshape(2, 8, -1), 4, 4).reshape(16, -1)
    np.testing.assert_allclose(new, expected, atol=1e-5)


def test_a_resized_kernel_embeds_enlarged_patches_as_the_old_tokens():
    """The property that defines FlexiViT's resize of the kernel."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(4, 4, 3, 16)).astype(np.float32)
    patch = rng.normal(size=(4, 4, 3)).astype(np.float32)
    large = np.asarray(jax.image.resize(patch, (6, 8, 3), 'bilinear', antialias=False))
    np.testing.assert_allclose(
        np.tensordot(large, adapt.resize_kernel(kernel, (6, 8)), 3),
        np.tensordot(patch, kernel, 3),
        atol=1e-4,
    )
    _, result, _ = adapted(
        new_fields=dict(patch_size=(8, 8)), new_size=(32, 32), resize_patches=True
    )
    assert result['embedding']['kernel'].shape == (8, 8, 3, 16)


@pytest.mark.parametrize(
    ('new_fields', 'expected'),
    [
        (dict(hidden_size=24), dict(field='blocks/attention/key/bias', value=(2, 2, 8))),
        (dict(num_layers=3), dict(field='blocks/attention/key/bias', value=(2, 2, 8))),
        (dict(patch_size=(8, 8)), dict(field='embedding/kernel', value=(4, 4, 3, 16))),
        (dict(pool='gap'), dict(value=['cls'])),
        (dict(layer_scale_init=0.1), dict(value=['blocks/scale1', 'blocks/scale2'])),
    ],
    ids=str,
)
def test_weights_of_another_model_are_refused(new_fields, expected):
    with refused('content', **expected):
        adapted(new_fields=new_fields)


def test_messages_about_another_model():
    with refused('content') as error:
        adapted(new_fields=dict(patch_size=(8, 8)))
    assert str(error.value) == (
        'embedding/kernel has shape (4, 4, 3, 16) in the pre-trained weights and (8, 8, 3, 16) in '
        'the model. Choose the model that the weights are of or set transfer.resize_patches=True.'
    )
    with refused('content') as error:
        adapted(new_fields=dict(pool='gap'))
    assert str(error.value) == (
        'the pre-trained weights have another architecture than the model:\n'
        '  cls: only in the weights, (1, 1, 16)'
    )


def test_patches_of_other_channels_are_not_resized():
    params = {'embedding': {'kernel': np.zeros((4, 4, 3, 16), np.float32)}}
    target = {'embedding': {'kernel': jax.ShapeDtypeStruct((8, 8, 1, 16), np.float32)}}
    with refused('content', field='embedding/kernel', value=(4, 4, 3, 16)):
        adapt.adapt(params, target, grid=(4, 4), source_grid=None, resize_patches=True)


def of_pairs(table, old, new, prefix):
    """Relative positions resized pair by pair of tokens: the mean over pairs of equal offset."""
    middle, tokens = len(table) // 2, math.prod(new) + prefix
    offsets = np.stack(
        [
            [table[middle + r * old[1] + c] for c in range(1 - old[1], old[1])]
            for r in range(1 - old[0], old[0])
        ]
    )
    offsets = bilinear(offsets, *(2 * n - 1 for n in new))
    patches = {
        (sign, token): table[middle + sign * (prefix - token + np.arange(math.prod(old)))]
        for sign in (-1, 1)
        for token in range(prefix)
    }
    patches = {key: bilinear(x.reshape(*old, -1), *new) for key, x in patches.items()}
    places = [None] * prefix + list(np.ndindex(*new))
    wanted = [[] for _ in range(2 * tokens - 1)]
    for (q, query), (k, key) in itertools.product(enumerate(places), repeat=2):
        row = wanted[k - q + tokens - 1]
        if query and key:
            row.append(offsets[tuple(np.subtract(key, query) + np.array(new) - 1)])
        elif query or key:
            row.append(patches[1 if key else -1, min(q, k)][key or query])
    return np.stack([np.mean(x, axis=0) for x in wanted])


@pytest.mark.parametrize(('pool', 'registers'), [('cls', 0), ('gap', 0), ('cls', 2), ('gap', 3)])
@pytest.mark.parametrize('place', ['shared', 'every_layer'])
def test_relative_positions_are_resized_by_their_offsets_on_the_grid(place, pool, registers):
    params, result, changes = adapted(
        dict(position='relative', position_at=place, pool=pool, num_registers=registers),
        size=(12, 16),
        new_size=(20, 12),
    )
    old, new = (
        (p if place == 'shared' else p['blocks'])['position']['relative'] for p in (params, result)
    )
    assert list(changes.values()).count('resized') == 1
    token = (pool == 'cls') + registers
    for old_table, new_table in zip(
        *(x.reshape(-1, x.shape[-3], 16) for x in (old, new)), strict=True
    ):
        np.testing.assert_allclose(new_table, of_pairs(old_table, (3, 4), (5, 3), token), atol=1e-5)


@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
@pytest.mark.parametrize('grid', [(7, 5), (2, 8), (1, 6)])
def test_equal_relative_positions_stay_equal(grid, method):
    found = adapt.resize_offsets(np.full((33, 2, 3), 0.7, np.float32), (4, 4), grid, method, 1)
    assert found.shape == (2 * math.prod(grid) + 1, 2, 3)
    np.testing.assert_allclose(found, 0.7, rtol=1e-6)


@pytest.mark.parametrize('grid', [(7, 5), (2, 8), (3, 2)])
def test_linear_relative_positions_stay_linear_on_another_grid(grid):
    """Offsets of whole rows are exact; other offsets have two places on the grid."""
    slope = np.broadcast_to(np.arange(-15, 16.0)[:, None, None], (31, 2, 3))
    found = adapt.resize_offsets(slope, (4, 4), grid, 'bilinear', 0)[:, 0, 0]
    rows = np.arange(1 - grid[0], grid[0])
    np.testing.assert_allclose(
        found[len(found) // 2 + rows * grid[1]], rows * 4 * 3 / (grid[0] - 1), rtol=1e-5
    )
    np.testing.assert_allclose(found, -found[::-1], atol=1e-5)


def test_relative_positions_of_the_same_grid_are_unchanged():
    params, result, changes = adapted(dict(position='relative', position_at='shared'))
    assert changes['position/relative'] == 'loaded'
    np.testing.assert_array_equal(result['position']['relative'], params['position']['relative'])
    again = adapt.resize_offsets(params['position']['relative'], (4, 4), (4, 4), 'bilinear', True)
    np.testing.assert_allclose(again, params['position']['relative'], rtol=1e-6)


def test_relative_positions_of_axial_attention_are_resized_along_each_line():
    params, result, changes = adapted(
        dict(position='relative', position_at='every_layer', attention='axial', pool='gap'),
        new_size=(16, 28),
    )
    assert changes['blocks/column/position/relative'] == 'loaded'
    old, new = (p['blocks']['row']['position']['relative'] for p in (params, result))
    assert (old.shape, new.shape) == ((2, 7, 2, 8), (2, 13, 2, 8))
    np.testing.assert_allclose(new[:, ::2], old, atol=1e-6)
    np.testing.assert_allclose(new[:, 1::2], (old[:, 1:] + old[:, :-1]) / 2, atol=1e-6)


def test_relative_positions_of_an_unknown_grid_are_refused():
    with refused('content', field='position/relative'):
        adapted(dict(position='relative', position_at='shared'), size=(8, 16), source_grid=None)


def test_the_table_of_changes_lists_all_but_loaded_parameters():
    old, new = models.build(SMALL, 5), models.build(SMALL, 7)
    _, changes = adapt.adapt(
        randomised(old, jnp.zeros((1, 16, 16, 3))),
        shapes(new, (24, 24)),
        grid=(6, 6),
        source_grid=(4, 4),
    )
    text = adapt.table(changes)
    assert 'resized      position/embedding' in text
    assert '(1, 37, 16), was (1, 17, 16)' in text
    assert 'dropped      head/kernel' in text
    assert 'initialised  head/kernel' in text
