import types

import pytest

from tests.support.errors import refused
from tests.support.runs import begin
from vit_jax import config as config_lib
from vit_jax import machine, models
from vit_jax.models import variants
from vit_jax.models.backends import registry
from vit_jax.training import device_defaults
from vit_jax.workdir import record

FIELDS = ('unroll', 'remat_policy')


@pytest.mark.parametrize(
    ('model', 'platform', 'expected'),
    [
        ('b16', 'cpu', (12, 'none')),
        ('b16', 'tpu', (1, 'products')),
        ('b16', 'gpu', (1, 'products')),
        ('b16', 'rocm', (1, 'products')),
        ('l16', 'cpu', (1, 'none')),
        ('r50x1', 'cpu', (1, 'none')),
        ('r50_b16', 'cpu', (1, 'none')),
        ('r50x1', 'tpu', (1, 'products')),
    ],
)
def test_open_fields_are_chosen_for_the_platform(model, platform, expected):
    config = config_lib.base(model)
    before = config.to_dict()
    chosen = device_defaults.for_platform(config.model, platform)
    assert config.to_dict() == before  # the argument does not change
    kernels = registry.fastest(config.model, platform)
    choices = dict(zip(FIELDS, expected, strict=True)) | kernels
    assert chosen == {f'model.{field}': value for field, value in choices.items()}


def test_the_root_of_a_resnet_needs_no_loop():
    config = config_lib.base('b16')
    config.model.resnet = variants.hybrid_resnet(units=())
    assert device_defaults.for_platform(config.model, 'cpu')['model.unroll'] == 12


def test_fields_of_the_config_are_not_chosen():
    config = config_lib.base('b16')
    config.model.update(
        unroll=3,
        remat_policy='dots_saveable',
        attention_kernel='cudnn',
        linear_kernel='xla',
        dtype='bfloat16',
    )
    for platform in device_defaults.CHOICES:
        assert device_defaults.for_platform(config.model, platform) == {}


def test_resumed_run_keeps_its_recorded_choices():
    recorded = {'unroll': 1, 'remat_policy': 'nothing_saveable', 'num_layers': 12}
    config = config_lib.base('b16')
    assert device_defaults.kept(config.model, recorded) == {
        'model.unroll': 1,
        'model.remat_policy': 'nothing_saveable',
        'model.attention_kernel': 'xla',
        'model.linear_kernel': 'xla',
    }
    assert device_defaults.kept(
        config.model, {'attention_kernel': 'cudnn', 'linear_kernel': 'cpu'}
    ) == {
        'model.attention_kernel': 'cudnn',
        'model.linear_kernel': 'cpu',
    }
    config.model.update(unroll=4, attention_kernel='xla', linear_kernel='xla')
    recorded['attention_kernel'] = 'cudnn'
    assert device_defaults.kept(config.model, recorded) == {
        'model.remat_policy': 'nothing_saveable'
    }
    assert device_defaults.kept(config.model, {}) == {}


@pytest.mark.parametrize(
    ('platform', 'dtype', 'expected'),
    [
        ('cpu', 'bfloat16', 'cpu'),
        ('cpu', 'float32', 'xla'),
        ('tpu', 'bfloat16', 'xla'),
        ('gpu', 'bfloat16', 'xla'),
    ],
)
def test_linear_layers_have_the_fastest_kernel_for_a_dtype(platform, dtype, expected):
    config = config_lib.changed(config_lib.base(), {'model.dtype': dtype})
    assert device_defaults.for_platform(config.model, platform)['model.linear_kernel'] == expected
    begun = device_defaults.kept(config.model, {'unroll': 1})  # of a version without the field
    config = config_lib.changed(config, begun)
    assert 'model.linear_kernel' not in device_defaults.for_platform(config.model, platform)


DEVICE = types.SimpleNamespace(platform='gpu', device_kind='Accelerator X')


def test_kernels_that_a_device_has(monkeypatch):
    for model in (dict(attention_kernel='auto'), dict(attention_kernel='xla'), {}):  # a ResNet
        device_defaults.check_kernel(model, DEVICE)
    model = dict(attention_kernel='cudnn')
    with refused('value', field='model.attention_kernel', value='cudnn') as error:
        device_defaults.check_kernel(model, DEVICE)
    assert 'this is gpu (Accelerator X), which has: xla, cpu.' in str(error.value)
    monkeypatch.setattr(registry, 'has_cudnn', lambda device: device is DEVICE)
    device_defaults.check_kernel(model, DEVICE)


def chosen_model(config, device=None):
    """`config.model` with the choices for a GPU."""
    choices = device_defaults.for_platform(config.model, 'gpu', device)
    return config_lib.changed(config, choices).model


@pytest.mark.parametrize(
    ('model', 'dtype', 'expected'),
    [
        ('b16', 'bfloat16', (48, 'none', 'cudnn', 'gpu')),
        ('h14', 'bfloat16', (48, 'none', 'cudnn', 'gpu')),
        ('r50_b16', 'bfloat16', (1, 'products', 'cudnn', 'gpu')),
        ('b16*5', 'bfloat16', (1, 'products', 'cudnn', 'gpu')),
        ('b16', 'float32', (1, 'products', 'xla', 'xla')),
        ('axial_b16', 'bfloat16', (1, 'products', 'xla', 'xla')),
    ],
)
def test_choices_for_a_gpu_with_cudnn(model, dtype, expected, monkeypatch):
    """Only the residual units of a hybrid and a large number of layers run in a loop."""
    monkeypatch.setattr(registry, 'has_cudnn', lambda device: device is DEVICE)
    config = config_lib.base(model.removesuffix('*5'))
    config.model.dtype = dtype
    if model.endswith('*5'):
        config.model.num_layers *= 5
    chosen = chosen_model(config, DEVICE)
    assert tuple(chosen[field] for field in models.PER_MACHINE) == expected
    looped = config_lib.changed(config, {'model.unroll': 3})
    # A loop would copy the arrays that it keeps.
    chosen = chosen_model(looped, DEVICE)
    assert tuple(chosen[field] for field in models.PER_MACHINE) == (3, 'products', *expected[2:])
    chosen = chosen_model(config)  # for a plan
    assert tuple(chosen[field] for field in models.PER_MACHINE) == (1, 'products', 'xla', 'xla')
    config.model.attention_kernel = 'xla'
    chosen = chosen_model(config, DEVICE)
    assert tuple(chosen[field] for field in models.PER_MACHINE) == (1, 'products', 'xla', 'xla')


def narrow(fields):
    return config_lib.changed(config_lib.base(), {'model.hidden_size': 384} | fields)


@pytest.mark.parametrize(
    ('fields', 'cores', 'expected'),
    [
        ({}, 2, 2),
        ({}, 64, 2),
        ({}, 1, 1),
        ({'batch_size': 511}, 2, 1),
        ({'accum_steps': 256}, 2, 2),
        ({'accum_steps': 512}, 2, 1),
        ({'model.hidden_size': 768}, 2, 1),
        ({'mesh.data': 1}, 2, 1),
        ({'mesh.fsdp': 2}, 2, 1),
        ({'mesh.tensor': -1}, 2, 1),
        ({'mesh.host_devices': 3}, 2, 3),
        ({'mesh.host_devices': 1}, 2, 1),
    ],
)
def test_a_cpu_with_more_cores_is_several_devices(fields, cores, expected, monkeypatch):
    """Exceptions: the mesh says otherwise, the batch (512) cannot be split, the model is wide."""
    monkeypatch.setattr(machine, 'cores', lambda: cores)
    config = narrow({'batch_size': 512} | fields)
    assert device_defaults.host_devices({'': config}) == expected
    wide = 'model.hidden_size' in fields
    assert device_defaults.host_devices({'': config}, trains=False) == (2 if wide else expected)


def with_devices(number):
    return narrow({'mesh.host_devices': number})


def test_resumed_run_keeps_the_number_of_host_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, 'cores', lambda: 2)
    config, workdir = narrow({}), str(tmp_path)
    record.write(workdir, with_devices(1), ['ant', 'bee'])
    assert device_defaults.host_devices({workdir: config}) == 2  # nothing has been saved
    begin(tmp_path, with_devices(1))
    assert device_defaults.host_devices({workdir: config}) == 1
    monkeypatch.setattr(machine, 'cores', lambda: 1)
    assert device_defaults.host_devices({workdir: with_devices(2)}) == 2


@pytest.mark.parametrize(
    ('recorded', 'cores', 'expected'),
    [([], 2, 2), ([], 1, 1), ([2], 1, 2), ([1], 2, 1), ([None], 2, 1), ([0], 2, 2), ([4, 2], 1, 2)],
)
def test_runs_of_one_process_use_the_devices_of_runs_that_have_started(
    recorded, cores, expected, tmp_path, monkeypatch
):
    """0 is recorded on a GPU; None means a version without the field. Other runs are new."""
    monkeypatch.setattr(machine, 'cores', lambda: cores)
    for number, devices in enumerate(recorded):
        begin(
            tmp_path / str(number),
            with_devices(devices or 0),
            without=['host_devices'] if devices is None else [],
        )
    configs = {str(tmp_path / str(number)): narrow({}) for number in range(4)}
    assert device_defaults.host_devices(configs) == expected
    assert device_defaults.host_devices({workdir: with_devices(3) for workdir in configs}) == 3
    configs['other'] = with_devices(3)
    with refused('value', field='mesh.host_devices', value=[0, 3]):
        device_defaults.host_devices(configs)


def test_a_batch_that_cannot_be_split_means_one_device_for_all_runs(monkeypatch):
    monkeypatch.setattr(machine, 'cores', lambda: 2)
    configs = {str(size): narrow({'batch_size': size}) for size in (510, 511)}
    assert device_defaults.host_devices(configs) == 1
