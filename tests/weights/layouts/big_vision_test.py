"""big_vision's files: positions of patches alone, stacked blocks, models of images and texts."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support import described, small
from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.parameters import randomised
from tests.support.small import assert_close, assert_same_arrays, through
from vit_jax import models, weights
from vit_jax.models import variants


def test_moving_the_position_of_the_class_token_changes_no_logit(tmp_path):
    given = small.make('vit')
    _, found = through(given, 'big_vision', tmp_path / 'x.npz')
    assert not found.params['position']['embedding'][:, 0].any()
    batch = small.images(given)
    np.testing.assert_allclose(
        small.logits(found, batch), small.logits(given, batch), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize('model', ['vit', 'map'])
def test_the_image_tower_of_big_vision_is_read(model, tmp_path):
    """The file also has a tower of texts, with equal names, and the temperature."""
    _, found = through(small.make(model), 'big_vision', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = {
            f'params/{tower}/{name}': sign * x
            for name, x in file.items()
            for tower, sign in (('txt', -1), ('img', 1))
        }
    np.savez(tmp_path / 'x.npz', **arrays, **{'params/t': np.ones(1), 'params/b': np.ones(1)})
    again = weights.load(str(tmp_path / 'x.npz'))
    assert (again.layout, again.model) == ('big_vision', found.model)
    assert_same_arrays(again.params, found.params)


@pytest.mark.parametrize('model', ['vit', 'gap', 'map', 'sincos'])
def test_stacked_blocks_of_big_vision_are_read(model, tmp_path):
    _, found = through(small.make(model), 'big_vision', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = dict(file)
    blocks = {name for name in arrays if 'encoderblock_0/' in name}
    assert len(blocks) == 16
    for name in blocks:
        pair = [arrays.pop(name), arrays.pop(name.replace('encoderblock_0', 'encoderblock_1'))]
        arrays[name.replace('encoderblock_0', 'encoderblock')] = np.stack(pair)
    np.savez(tmp_path / 'x.npz', **{f'params/{name}': x for name, x in arrays.items()})
    again = weights.load(str(tmp_path / 'x.npz'))
    assert again.layout == 'big_vision'
    assert again.model == found.model
    assert_same_arrays(again.params, found.params)


@pytest.mark.parametrize('model', nightly_but(['vit', 'map'], ['vit', 'map', 'gap']))
def test_logits_equal_a_plain_flax_model(model, tmp_path):
    """They are equal although the class token includes its position."""
    given = small.make(model)
    weights.save(given, str(tmp_path / 'x.npz'), 'big_vision')
    batch = small.images(given)
    assert_close(
        described.big_vision_logits(given, tmp_path / 'x.npz', batch), small.logits(given, batch)
    )


def rewritten(given, tmp_path, change):
    """The weights from a file of `given` after a change of its arrays."""
    weights.save(given, str(tmp_path / 'x.npz'), 'big_vision')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = change(dict(file))
    np.savez(tmp_path / 'x.npz', **{f'params/{name}': x for name, x in arrays.items()})
    found = weights.load(str(tmp_path / 'x.npz'))
    assert (found.layout, found.model) == ('big_vision', given.model)
    return found


@pytest.mark.parametrize('numbers', ['newer', 'older'])
@pytest.mark.parametrize('place', ['Transformer/pos_embedding', 'pos_embedding'])
@pytest.mark.parametrize('model', ['vit', 'gap', 'map'])
def test_positions_of_files_before_2022_include_the_class_token(model, place, numbers, tmp_path):
    given = small.make(model)

    def change(arrays):
        arrays[place] = arrays.pop('pos_embedding')
        if model == 'vit':
            arrays |= {place: given.params['position']['embedding'], 'cls': given.params['cls']}
        if numbers == 'newer':
            return arrays
        return {
            name
            if name.startswith('MAPHead')
            else name.replace('Attention_0', 'Attention_1')
            .replace('LayerNorm_1', 'LayerNorm_2')
            .replace('MlpBlock_0', 'MlpBlock_3'): x
            for name, x in arrays.items()
        }

    assert_same_arrays(rewritten(given, tmp_path, change).params, given.params)


def test_the_old_name_decides_whether_a_rectangle_includes_the_class_token(tmp_path):
    """2x3 patches are no square, with or without a class token."""
    given = small.make('rectangle')
    positions = given.params['position']['embedding']
    assert positions.shape[1] == 7

    def change(arrays):
        return arrays | {'pos_embedding': positions[:, 1:]}

    assert not rewritten(given, tmp_path, change).params['position']['embedding'][:, 0].any()

    def old(arrays):
        arrays.pop('pos_embedding')
        return arrays | {'Transformer/pos_embedding': positions, 'cls': given.params['cls']}

    assert_same_arrays(rewritten(given, tmp_path, old).params, given.params)


def test_an_unnamed_pooling_head_is_read(tmp_path):
    given = small.make('map')
    found = rewritten(
        given,
        tmp_path,
        lambda arrays: {name.removeprefix('MAPHead_0/'): x for name, x in arrays.items()},
    )
    assert_same_arrays(found.params, given.params)


def make_resnet(**fields):
    """A ResNet of BiT, or with other formulas, such as the hybrids have."""
    given = small.make('bit')
    model = given.model | {'resnet': given.model['resnet'] | fields}
    params = randomised(models.build(model, given.num_classes), small.images(given))
    return dataclasses.replace(given, model=model, params=jax.tree.map(np.asarray, params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kind', 'name', 'shape'),
    [
        (variants.bit_resnet, 'norm-pre-head/scale', (1, 1, 1, 512)),
        (variants.hybrid_resnet, 'gn_root/scale', (32,)),
    ],
    ids=['bit_paper', 'bit'],
)
def test_resnets_of_big_vision_give_the_logits_of_its_models(kind, name, shape, tmp_path, caplog):
    """Its two models are written again as plain functions; GroupNorms once had four axes."""
    given = make_resnet(**kind((2, 1, 3), width=32))
    weights.save(given, str(tmp_path / 'x.npz'), 'big_vision')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = dict(file)
    assert arrays[name].shape == shape
    unit = 'block3/unit03/' if kind is variants.bit_resnet else 'block3/unit3/'
    assert f'{unit}conv3/kernel' in arrays
    batch = small.images(given)
    assert_close(
        described.big_vision_resnet_logits(tmp_path / 'x.npz', batch), small.logits(given, batch)
    )
    other = {1: (1, 1, 1, -1), 4: (-1,)}[len(shape)]
    found = rewritten(
        given,
        tmp_path,
        lambda arrays: {
            name: x.reshape(other) if '/gn' in f'/{name}' or 'norm-' in name else x
            for name, x in arrays.items()
        },
    )
    assert_same_arrays(found.params, given.params)
    assert ('bit_paper.py pools the border of the root' in caplog.text) == (len(shape) == 4)


def test_a_resnet_of_other_formulas_is_not_written(tmp_path):
    given = make_resnet(weight_epsilon=1e-8)
    assert 'model.resnet.weight_epsilon is 1e-08: the layout requires 1e-10' in small.message(
        weights.save, given, str(tmp_path / 'x.npz'), 'big_vision'
    )


def test_a_grid_that_looks_like_a_square_and_a_class_token_is_refused(tmp_path):
    """5x2 patches have ten positions, as many as 3x3 patches and a class token."""
    vit = small.make('vit')
    model = models.build(vit.model, vit.num_classes)
    params = randomised(model, np.zeros((1, 40, 16, 3)))
    given = dataclasses.replace(
        vit, params=params, preprocess=vit.preprocess | {'image_size': (40, 16)}
    )
    with refused('inapplicable', field='layout', value='big_vision'):
        weights.save(given, str(tmp_path / 'x.npz'), 'big_vision')
    assert not any(tmp_path.iterdir())


def test_an_empty_position_embedding_is_refused(tmp_path):
    def change(arrays):
        return arrays | {'pos_embedding': arrays['pos_embedding'][:, :0]}

    with refused('content', file=tmp_path / 'x.npz'):
        rewritten(small.make('vit'), tmp_path, change)
