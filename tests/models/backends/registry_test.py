"""The backends by name, and the fastest one for each device."""

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
def test_fastest_kernels_of_each_platform_and_dtype(platform, dtype, expected):
    fields = models.fields('ti16') | {'dtype': dtype}
    for device in (None, jax.devices()[0]):  # a CPU simulates the device
        kernels = registry.fastest(fields, platform, device)
        assert (kernels['attention_kernel'], kernels['linear_kernel']) == expected
        models.build(fields, 3, **kernels)


def test_a_resnet_has_no_kernels():
    assert registry.fastest(models.fields('r50x1'), 'cpu') == {}


@pytest.mark.parametrize('flags', ['', '--xla_gpu_enable_triton_gemm=true'])
def test_compiler_options_are_those_of_the_backend(flags, monkeypatch):
    """XLA_FLAGS of the user take precedence."""
    monkeypatch.setenv('XLA_FLAGS', flags)
    expected = dict(gpu_backend.COMPILER_OPTIONS)
    if flags:
        del expected['xla_gpu_enable_triton_gemm']
    model = models.build('ti16', 3, linear_kernel='gpu')
    assert model.backend.compiler_options() == expected
    masked_patches = masked.MaskedPatches(model, 'pixels', 0.5, (0.5,) * 3, (0.5,) * 3)
    assert masked_patches.backend.compiler_options() == expected
    others = [models.build('ti16', 3, linear_kernel=kernel) for kernel in ('cpu', 'auto')]
    others.append(models.build('r50x1', 3))
    for other in others:
        assert other.backend.compiler_options() is None


def test_the_compiler_accepts_the_options():
    """A CPU accepts them too. A version of XLA without an option could not train on a GPU."""
    assert jax.jit(lambda x: x + 1, compiler_options=gpu_backend.COMPILER_OPTIONS)(1) == 2


@pytest.fixture
def cudnn(monkeypatch):
    """JAX behaves as if cuDNN is installed."""
    monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda query, *_, implementation: query)


def gpu(capability):
    return types.SimpleNamespace(platform='gpu', compute_capability=capability)


def test_an_nvidia_gpu_has_cudnn_from_ampere_on(cudnn):
    """The compute capability of Ampere is 8.0. AMD's capabilities are not numbers."""
    assert all(map(registry.has_cudnn, map(gpu, ('8.0', '8.9', '9.0', '10.3', '12.0'))))
    assert not any(map(registry.has_cudnn, map(gpu, ('7.5', '5.2', 'gfx90a'))))
    assert not registry.has_cudnn(jax.devices()[0])


def test_a_gpu_without_cudnn_installed_has_none(monkeypatch):
    def raises(*_, implementation):
        raise RuntimeError(f'{implementation} is not detected.')  # JAX's error

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
def test_cudnn_is_the_fastest_for_models_that_it_supports(fields, expected, cudnn):
    fields = models.fields('b16') | dict(dtype='bfloat16') | fields
    kernels = registry.fastest(fields, 'gpu', gpu('9.0'))
    assert (kernels['attention_kernel'], kernels['linear_kernel']) == expected
    models.build(fields, 3, **kernels)
