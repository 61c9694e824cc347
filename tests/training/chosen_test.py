import pytest

from vit_jax import config as config_lib
from vit_jax.training import chosen

FIELDS = ('unroll', 'remat_policy')


@pytest.mark.parametrize(('model', 'platform', 'expected'), [
    ('b16', 'cpu', (12, 'none')), ('b16', 'tpu', (1, 'products')), ('b16', 'gpu', (1, 'products')),
    ('b16', 'rocm', (1, 'products')), ('l16', 'cpu', (1, 'none')), ('r50x1', 'cpu', (1, 'none')),
    ('r50_b16', 'cpu', (1, 'none')), ('r50x1', 'tpu', (1, 'products'))])
def test_what_is_left_open_is_chosen_for_the_platform(model, platform, expected):
    config = config_lib.base(model)
    found = chosen.for_platform(config, platform)
    assert tuple(found.model[field] for field in FIELDS) == expected
    assert config.model.unroll == 0  # the user's stays as it is
    assert config_lib.flatten(found) == config_lib.flatten(config) | {
        f'model.{field}': value for field, value in zip(FIELDS, expected, strict=True)}


def test_what_the_config_says_is_not_chosen():
    config = config_lib.base('b16')
    config.model.update(unroll=3, remat_policy='dots_saveable')
    for platform in chosen.CHOICES:
        assert config_lib.flatten(chosen.for_platform(config, platform)) == config_lib.flatten(
            config)


def test_a_continued_run_keeps_what_it_has_recorded():
    recorded = {'unroll': 1, 'remat_policy': 'nothing_saveable', 'num_layers': 12}
    config = config_lib.base('b16')
    assert chosen.kept(config.model, recorded) == {
        'model.unroll': 1, 'model.remat_policy': 'nothing_saveable'}
    config.model.unroll = 4
    assert chosen.kept(config.model, recorded) == {'model.remat_policy': 'nothing_saveable'}
    assert chosen.kept(config.model, {}) == {}
