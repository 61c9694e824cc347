import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax import models
from vit_jax.models import cost, masked, variants


def test_flops_of_matrix_product_convolution_and_loop():
    x = jnp.ones((5, 7))
    assert cost.count_flops(lambda x: x @ jnp.ones((7, 11)), x) == 2 * 5 * 7 * 11
    image = jnp.ones((2, 8, 8, 3))
    kernel = jnp.ones((3, 3, 3, 6))
    conv = lambda a, b: jax.lax.conv_general_dilated(  # noqa: E731
        a, b, (1, 1), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    assert cost.count_flops(conv, image, kernel) == 2 * 2 * 6 * 6 * 3 * 3 * 3 * 6

    def loop(x):
        return jax.lax.scan(lambda c, _: (c @ jnp.ones((7, 7)), None), x, length=4)[0]

    assert cost.count_flops(jax.jit(loop), x) == 4 * 2 * 5 * 7 * 7


def test_flops_inside_other_functions():
    """Derivatives, rematerialisation, custom gradients, and the larger branch of a condition."""
    x = jnp.ones((5, 5))
    product = 2 * 5**3

    @jax.custom_vjp
    def squared(x):
        return x @ x

    squared.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert cost.count_flops(squared, x) == product
    assert cost.count_flops(jax.value_and_grad(lambda x: squared(x).sum()), x) == 3 * product
    assert cost.count_flops(jax.grad(lambda x: squared(x).sum()), x) == 2 * product  # no value
    again = jax.checkpoint(lambda x: jnp.sin(x @ x))
    assert cost.count_flops(jax.value_and_grad(lambda x: again(x).sum()), x) == 4 * product

    def condition(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)

    assert cost.count_flops(condition, x) == 2 * product
    assert cost.count_flops(loop, x) == 3 * product


@pytest.mark.parametrize('stride', [1, 2])
def test_gradients_of_a_convolution_cost_twice_its_value(stride):
    image = jnp.ones((2, 8, 8, 3))
    kernel = jnp.ones((3, 3, 3, 4))

    def conv(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )

    value = cost.count_flops(conv, image, kernel)
    both = jax.value_and_grad(lambda *args: conv(*args).sum(), argnums=(0, 1))
    assert cost.count_flops(both, image, kernel) == 3 * value


@pytest.mark.parametrize(('name', 'parameters'), [('ti16', 5_717_416), ('b32', 88_224_232)])
def test_flops_of_a_vit_equal_a_count_by_hand(name, parameters):
    """The last layer computes only the class token."""
    v = variants.get(name)
    d = v['hidden_size']
    m = v['mlp_dim']
    layers = v['num_layers']
    p, _ = v['patch_size']
    patches = (224 // p) ** 2
    n = patches + 1
    macs = patches * p * p * 3 * d + (layers - 1) * (4 * n * d * d + 2 * n * n * d + 2 * n * d * m)
    macs += 2 * n * d * d + 2 * d * d + 2 * n * d + 2 * d * m  # all keys and values, one query
    macs += d * 1000
    assert cost.of_model(models.build(name, 1000), (224, 224)) == (parameters, 2 * macs)


def lowered_flops(model, image_size):
    """Returns the FLOPs of matrix products and convolutions, from the text of a lowered program."""
    image = jax.ShapeDtypeStruct((1, *image_size, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    text = jax.jit(model.apply).lower(variables, image).as_text()
    assert 'stablehlo.while' not in text
    functions = dict(re.findall(r'func\.func \w+ @(\w+)\(.*\n((?:    .*\n)*)', text))

    @functools.cache
    def flops(name):
        lines = functions[name].splitlines()
        called = re.findall(r'call @(\w+)\(', functions[name])
        return sum(map(line_flops, lines)) + sum(map(flops, called))

    return flops('main')


def line_flops(line):
    if not re.search(r'stablehlo\.(dot_general|convolution)', line):
        return 0
    left, right, out = (
        [int(n) for n in shape.split('x')[:-1]]
        for shape in re.search(r'\(tensor<(.*)>, tensor<(.*)>\) -> tensor<(.*)>', line).groups()
    )
    if 'dot_general' in line:
        contracted = re.search(r'contracting_dims = \[([\d, ]*)\]', line).group(1)
        return 2 * math.prod(out) * math.prod(left[int(i)] for i in contracted.split(','))
    order = re.search(r'x\[([\w, ]+)\]->', line).group(1).split(', ')
    return 2 * math.prod(out) * math.prod(right) // right[order.index('o')]


@pytest.mark.parametrize(
    ('name', 'fields'),
    [
        ('ti16', {}),
        ('r_ti16', {}),
        ('ti16', dict(num_registers=4, stem_norm=True)),
        *(
            pytest.param(name, fields, marks=pytest.mark.slow)
            for name, fields in (
                ('b32', dict(pool='map', representation_size=768)),
                ('axial_b16', {}),
                ('ti16', dict(position='relative', position_at='every_layer', pool='gap')),
            )
        ),
        *(
            pytest.param(name, {}, marks=[pytest.mark.slow, *marks])
            for name, *marks in (
                ('r50x1',),
                *((name, pytest.mark.nightly) for name in ('r50_b32', 'r50_b16', 'r101x1')),
            )
        ),
    ],
    ids=str,
)
def test_flops_agree_with_the_lowered_program(name, fields):
    """The program has no loops. A loop over layers has the same FLOPs."""
    looped, unrolled = (models.build(name, 1000, unroll=n, **fields) for n in (1, 40))
    counted = cost.of_model(looped, (224, 224))
    assert counted == cost.of_model(unrolled, (224, 224))
    assert counted.flops == pytest.approx(lowered_flops(unrolled, (224, 224)), rel=0.02)


@pytest.mark.parametrize('masked_target', [None, 'mean_color'])
def test_flops_do_not_depend_on_kernels(masked_target):
    def cost_by(kernel, linear='xla'):
        model = models.build(
            'ti16', 10, pool='gap', dtype='bfloat16', attention_kernel=kernel, linear_kernel=linear
        )
        if masked_target:
            model = masked.build(
                model, dict(target=masked_target, rate=0.5), dict(mean=(0.5,) * 3, std=(0.5,) * 3)
            )
        return cost.of_model(model, (32, 32))

    assert cost_by('cudnn') == cost_by('xla') == cost_by('xla', 'cpu')


@pytest.mark.parametrize(
    ('name', 'fields', 'giga'),
    [
        ('r50x1', {}, 4.1),
        pytest.param('r152x1', {}, 11.5, marks=pytest.mark.nightly),
        ('b16', dict(pool='gap'), 17.6),
        ('r50_b16', dict(pool='gap'), 21.5),
    ],
    ids=str,
)
def test_multiplications_agree_with_published_numbers(name, fields, giga):
    """In 10**9 at 224 px, within 5 %.

    The published numbers count all tokens of the last layer, so the models pool by their mean.
    """
    flops = cost.of_model(models.build(name, 1000, **fields), (224, 224)).flops
    assert flops / 2e9 == pytest.approx(giga, rel=0.05)
