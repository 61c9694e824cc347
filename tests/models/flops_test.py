import jax
import jax.numpy as jnp
import pytest

from vit_jax import models
from vit_jax.models import flops, variants


def test_matrix_product_convolution_and_loop():
    x = jnp.ones((5, 7))
    assert flops.count(lambda x: x @ jnp.ones((7, 11)), x) == 2 * 5 * 7 * 11
    image = jnp.ones((2, 8, 8, 3))
    kernel = jnp.ones((3, 3, 3, 6))
    conv = lambda a, b: jax.lax.conv_general_dilated(  # noqa: E731
        a, b, (1, 1), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
    assert flops.count(conv, image, kernel) == 2 * 2 * 6 * 6 * 3 * 3 * 3 * 6

    def loop(x):
        return jax.lax.scan(lambda c, _: (c @ jnp.ones((7, 7)), None), x, length=4)[0]

    assert flops.count(jax.jit(loop), x) == 4 * 2 * 5 * 7 * 7


@pytest.mark.parametrize('name', ['ti16', 'b32'])
def test_vit_counts_as_on_paper(name):
    v = variants.get(name)
    d, m, layers, (p, _) = v['hidden_size'], v['mlp_dim'], v['num_layers'], v['patch_size']
    patches = (224 // p) ** 2
    n = patches + 1
    macs = patches * p * p * 3 * d + layers * (4 * n * d * d + 2 * n * n * d + 2 * n * d * m)
    macs += d * 1000
    model = models.build(name, 1000)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    assert flops.count(model.apply, variables, image) == 2 * macs


def test_agrees_with_the_compiler_when_the_layers_are_unrolled():
    model = models.build('ti16', 1000, unroll=12)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    compiler = jax.jit(model.apply).lower(variables, image).cost_analysis()['flops']
    assert flops.count(model.apply, variables, image) == pytest.approx(compiler, rel=0.02)
