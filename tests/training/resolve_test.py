"""The functions that resolve the config of a user to the config of a run."""

import jax
import pytest
from ml_collections import FrozenConfigDict

from tests.support.errors import refused
from tests.support.programs import small_config
from vit_jax import config as config_lib
from vit_jax import machine
from vit_jax.objectives import registry
from vit_jax.parallel import microbatch, sharding
from vit_jax.training import device_defaults, resolve
from vit_jax.training.program import Program


def given(**fields):
    config = config_lib.base('ti16')
    config.update(num_steps=40)
    config.update_from_flattened_dict({name.replace('__', '.'): x for name, x in fields.items()})
    return config


def recorded(**fields):
    return config_lib.changed(given(accum_steps=1, log_every=2), fields).to_dict()


def one_device():
    return sharding.make_mesh(config_lib.base().mesh, jax.devices()[:1])


def everything(config):
    """The results of all functions of the chain for the config of a user."""
    mesh = one_device()
    return [
        resolve.as_recorded(config, None),
        resolve.as_recorded(config, recorded()),
        resolve.with_machine(config, 'cpu', jax.devices()[0], 'bfloat16', {'pretrained': '/a'}),
        resolve.with_data(config, 5000, 3, teacher_checksum=7),
        resolve.with_accum_steps(config, registry.of_config(config).module, mesh),
        resolve.for_mesh(config, mesh),
    ]


def test_every_function_returns_a_frozen_config_and_keeps_its_argument():
    config = given(dataset__num_classes=3, dataset__num_examples=5000)
    before = config.to_dict()
    for resolved in everything(config):
        assert isinstance(resolved, FrozenConfigDict)
        assert config.to_dict() == before


@pytest.mark.parametrize(
    ('accum_steps', 'begun_with', 'expected'),
    [(-1, 4, 4), (0, 4, 4), (2, 4, 2), (-1, None, -1), (0, None, 0)],
)
def test_a_resumed_run_keeps_its_parts_where_the_config_leaves_them_open(
    accum_steps, begun_with, expected
):
    run = begun_with and recorded(accum_steps=begun_with)
    assert resolve.as_recorded(given(accum_steps=accum_steps), run).accum_steps == expected


def test_a_resumed_run_keeps_the_interval_of_its_log():
    config = given(log_every=0)
    assert resolve.with_data(config, 5000, 3).log_every == 2
    assert resolve.as_recorded(config, recorded(log_every=7)).log_every == 7
    assert resolve.as_recorded(given(log_every=3), recorded(log_every=7)).log_every == 3


def test_a_resumed_run_keeps_the_splits_that_were_chosen():
    run = recorded(**{'dataset.train_split': 'train[:90%]', 'dataset.eval_split': 'train[90%:]'})
    for train_split, eval_split, expected in (
        ('train', '', ('train[:90%]', 'train[90%:]')),
        ('train', 'val', ('train', 'val')),
        ('train[:50%]', '', ('train[:50%]', 'train[90%:]')),
    ):
        config = given(dataset__train_split=train_split, dataset__eval_split=eval_split)
        found = resolve.as_recorded(config, run).dataset
        assert (found.train_split, found.eval_split) == expected


def test_a_subset_may_state_the_number_of_examples_of_the_whole_split():
    """A recipe states it."""
    config = given(dataset__num_examples=5000)
    assert resolve.with_data(config, 50, 3, whole=5000).dataset.num_examples == 50
    with refused('value', field='dataset.num_examples', value=5000):
        resolve.with_data(config, 50, 3, whole=4000)


@pytest.mark.parametrize(
    ('dtype', 'platform', 'is_fast', 'expected'),
    [
        ('auto', 'tpu', False, 'bfloat16'),
        ('auto', 'gpu', False, 'bfloat16'),
        ('auto', 'cpu', True, 'bfloat16'),
        ('auto', 'cpu', False, 'float32'),
        ('float32', 'tpu', True, 'float32'),
        ('bfloat16', 'cpu', False, 'bfloat16'),
    ],
)
@pytest.mark.parametrize('model', ['ti16', 'r50x1'])
def test_an_open_dtype_is_the_fastest_of_the_devices(
    model, dtype, platform, is_fast, expected, monkeypatch
):
    monkeypatch.setattr(machine, 'is_fast_in_bfloat16', lambda: is_fast)
    config = config_lib.changed(config_lib.base(model), {'model.dtype': dtype, 'num_steps': 40})
    found = resolve.for_mesh(resolve.with_data(config, 5000, 3), one_device(), platform)
    assert found.model.dtype == expected
    if model == 'ti16' and platform == 'cpu':  # its kernel depends on the dtype
        assert found.model.linear_kernel == {'bfloat16': 'cpu', 'float32': 'xla'}[expected]


def test_processes_use_a_dtype_that_is_slow_for_none_of_them(monkeypatch):
    monkeypatch.setattr(machine, 'is_fast_in_bfloat16', lambda: True)
    assert device_defaults.fastest_dtype('cpu') == 'bfloat16'
    monkeypatch.setattr(device_defaults.consensus, 'gather', lambda value: [value, False])
    assert device_defaults.fastest_dtype('cpu') == 'float32'


def test_a_resumed_run_keeps_its_dtype_on_every_machine():
    for dtype in ('bfloat16', 'float32'):
        config = resolve.as_recorded(given(model__dtype='auto'), recorded(**{'model.dtype': dtype}))
        assert config.model.dtype == dtype
    asked = resolve.as_recorded(
        given(model__dtype='float32'), recorded(**{'model.dtype': 'bfloat16'})
    )
    assert config_lib.differences(recorded(**{'model.dtype': 'bfloat16'}), asked) == [
        "model.dtype: 'bfloat16' in the workdir, 'float32' now"
    ]


def test_open_parts_are_the_fastest_of_the_platform(monkeypatch):
    """The caches of the CPU hold four of sixteen images (65 tokens)."""
    monkeypatch.setattr(microbatch, 'TRAINED_AT_ONCE', 4 * 65)
    mesh = one_device()

    def resolved_accum_steps(accum_steps, platform=''):
        config = resolve.for_mesh(small_config(accum_steps=accum_steps), mesh, platform)
        return config.accum_steps

    assert resolved_accum_steps(-1) == 4
    assert resolved_accum_steps(-1, 'tpu') == 1
    assert resolved_accum_steps(0) == 0
    assert resolved_accum_steps(2) == 2


def test_a_batch_that_the_devices_cannot_share_is_refused():
    mesh = sharding.make_mesh(config_lib.base().mesh, jax.devices()[:3])
    with refused('value', field='batch_size', value=16):
        resolve.for_mesh(small_config(accum_steps=-1), mesh)


def test_a_program_keeps_its_config():
    mesh = one_device()
    config = resolve.for_mesh(small_config(accum_steps=-1), mesh)
    assert config.accum_steps == 1
    assert Program(config, mesh).config == config
