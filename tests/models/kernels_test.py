import pytest

from vit_jax import models
from vit_jax.models import kernels


@pytest.mark.parametrize(('platform', 'dtype', 'expected'), [
    ('cpu', 'float32', ('cpu', 'xla')), ('cpu', 'bfloat16', ('cpu', 'cpu')),
    ('tpu', 'bfloat16', ('xla', 'xla')), ('gpu', 'bfloat16', ('xla', 'xla')),
    ('rocm', 'float32', ('xla', 'xla'))])
def test_the_fastest_of_a_platform_and_a_dtype(platform, dtype, expected):
    fields = models.fields('ti16') | {'dtype': dtype}
    found = kernels.fastest(fields, platform)
    assert (found['attention_kernel'], found['linear_kernel']) == expected
    models.build(fields, 3, **found)


def test_a_resnet_has_none():
    assert kernels.fastest(models.fields('r50x1'), 'cpu') == {}
