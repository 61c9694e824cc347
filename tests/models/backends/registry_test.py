import types

import jax
import pytest

from vit_jax import models
from vit_jax.models import masked
from vit_jax.models.backends import gpu as gpu_backend
from vit_jax.models.backends import registry


@pytest.mark.parametrize(
    ('platform', 'dtype', 'expected'),
    [
        ('cpu', 'float32', ('cpu', 'xla')),
        ('cpu', 'bfloat16', ('cpu', 'cpu')),
        ('tpu', 'bfloat16', ('xla', 'xla')),
        ('gpu', 'bfloat16', ('xla', 'xla')),
        ('rocm', 'float32', ('xla', 'xla')),
    ],
)
def test_the_fastest_of_a_platform_and_a_dtype(platform, dtype, expected):
    fields = models.fields('ti16') | {'dtype': dtype}
    for device in (None, jax.devices()[0]):  # a CPU that stands for another device
        found = registry.fastest(fields, platform, device)
        assert (found['attention_kernel'], found['linear_kernel']) == expected
        models.build(fields, 3, **found)


def test_a_resnet_has_none():
    assert registry.fastest(models.fields('r50x1'), 'cpu') == {}


@pytest.mark.parametrize('flags', ['', '--xla_gpu_enable_triton_gemm=true'])
def test_what_the_compiler_is_told(flags, monkeypatch):
    """What the user says about it stays."""
    monkeypatch.setenv('XLA_FLAGS', flags)
    expected = dict(gpu_backend.COMPILER_OPTIONS)
    if flags:
        del expected['xla_gpu_enable_triton_gemm']
    by = {
        kernel: models.build('ti16', 3, linear_kernel=kernel) for kernel in ('gpu', 'cpu', 'auto')
    }
    assert by['gpu'].backend.compiler_options() == expected
    masked_patches = masked.MaskedPatches(by['gpu'], 'pixels', 0.5, (0.5,) * 3, (0.5,) * 3)
    assert masked_patches.backend.compiler_options() == expected
    for other in (by['cpu'], by['auto'], models.build('r50x1', 3)):
        assert other.backend.compiler_options() is None


def test_the_compiler_knows_what_it_is_told():
    """On a CPU, too; a version without one of the options would train on no GPU."""
    assert jax.jit(lambda x: x + 1, compiler_options=gpu_backend.COMPILER_OPTIONS)(1) == 2


@pytest.fixture
def cudnn(monkeypatch):
    """JAX that has cuDNN."""
    monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda query, *_, implementation: query)


def gpu(capability):
    return types.SimpleNamespace(platform='gpu', compute_capability=capability)


def test_an_nvidia_gpu_has_cudnn_from_ampere_on(cudnn):
    """It tells its compute capability as a number, 8.0 being Ampere; AMD's are no numbers."""
    assert all(map(registry.has_cudnn, map(gpu, ('8.0', '8.9', '9.0', '10.3', '12.0'))))
    assert not any(map(registry.has_cudnn, map(gpu, ('7.5', '5.2', 'gfx90a'))))
    assert not registry.has_cudnn(jax.devices()[0])


def test_cudnn_may_not_be_installed(monkeypatch):
    def raises(*_, implementation):
        raise RuntimeError(f'{implementation} is not detected.')  # as JAX does

    monkeypatch.setattr(jax.nn, 'dot_product_attention', raises)
    assert not registry.has_cudnn(gpu('9.0'))


@pytest.mark.parametrize(
    ('fields', 'expected'),
    [
        (dict(), ('cudnn', 'gpu')),
        (dict(pool='gap'), ('cudnn', 'gpu')),
        (dict(dtype='float32'), ('xla', 'xla')),
        (dict(attention_dropout_rate=0.1), ('xla', 'xla')),
        (dict(num_heads=1, hidden_size=192), ('xla', 'xla')),
        (dict(attention='axial', pool='gap'), ('xla', 'xla')),
        (dict(position='relative', position_at='every_layer'), ('xla', 'xla')),
    ],
    ids=str,
)
def test_cudnn_is_the_fastest_of_what_it_computes(fields, expected, cudnn):
    fields = models.fields('b16') | dict(dtype='bfloat16') | fields
    found = registry.fastest(fields, 'gpu', gpu('9.0'))
    assert (found['attention_kernel'], found['linear_kernel']) == expected
    models.build(fields, 3, **found)
