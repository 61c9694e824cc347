"""Backends compute the same functions as XLA's own layers."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import nightly_but
from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.models import encoder, variants
from vit_jax.models.backends import cpu, gpu, gpu_dropout, registry, xla
from vit_jax.models.backends.layers import broadcast

IMAGES = (2, 8, 12, 3)
FIELDS = [
    dict(),
    dict(pool='gap', layer_scale_init=0.5),
    dict(pool='map'),
    dict(attention='axial', pool='none'),
    dict(attention_dropout_rate=0.5, dropout_rate=0.1),
    dict(position='relative', position_at='every_layer', remat_policy='products'),
    dict(num_registers=2, stem_norm=True, gelu='quick'),
]

SUMS = {'cpu': cpu.sum_of_rows, 'gpu': gpu.sum_of_rows}


def backend(kernel):
    """The backend of a linear_kernel."""
    return registry.LINEAR[kernel]


def build(kernel, **fields):
    """A model whose layers, and on a CPU attention, are computed by one kernel."""
    attention_kernel = 'cpu' if kernel == 'cpu' else 'xla'
    return models.build(SMALL | fields, 5, linear_kernel=kernel, attention_kernel=attention_kernel)


def loss(model, params, images):
    """The sum of the squared logits."""
    logits = model.apply(
        {'params': params}, images, train=True, rngs={'dropout': jax.random.key(1)}
    )
    return (logits**2).sum()


def loss_and_gradients(model, params, images):
    """The loss, and its gradients by the parameters and the images."""
    return jax.jit(jax.value_and_grad(functools.partial(loss, model), (0, 1)))(params, images)


def assert_all_close(results, expected):
    rounding = 1e-7 * max(np.abs(x).max() for x in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + rounding),
        results,
        expected,
    )


@functools.cache
def by_xla(fields):
    """Parameters of a model with fields as (name, value), and its loss and gradients."""
    images = random_images(*IMAGES)
    model = build('xla', **dict(fields))
    params = randomised(model, images)
    return params, loss_and_gradients(model, params, images)


@pytest.mark.parametrize('kernel', ['cpu', 'gpu'])
@pytest.mark.parametrize(
    'fields',
    [
        pytest.param(
            fields,
            marks=pytest.mark.slow if {'pool', 'dropout_rate', 'num_registers'} & {*fields} else (),
        )
        for fields in FIELDS
    ],
    ids=str,
)
def test_outputs_and_gradients_of_a_model_equal_those_of_xla(fields, kernel):
    if kernel == 'gpu':  # its dropout draws other random numbers, see below
        fields = {name: value for name, value in fields.items() if name != 'dropout_rate'}
    params, expected = by_xla(tuple(fields.items()))
    result = loss_and_gradients(build(kernel, **fields), params, random_images(*IMAGES))
    assert_all_close(result, expected)


@pytest.mark.slow
def test_initial_parameters_equal_those_of_xla():
    fields = dict(pool='map', layer_scale_init=0.5, position='relative', position_at='every_layer')

    def initial(kernel):
        init = jax.jit(build(kernel, **fields).init)
        return init(jax.random.key(0), random_images(*IMAGES))

    expected = initial('xla')
    for kernel in ('cpu', 'gpu'):
        jax.tree.map(np.testing.assert_array_equal, initial(kernel), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        *(
            pytest.param(fields, marks=pytest.mark.nightly)
            for fields in (dict(remat_policy='products'), dict(unroll=1))
        ),
    ],
    ids=str,
)
def test_dropout_by_a_gpu_equals_xla_with_the_same_random_numbers(fields, monkeypatch):
    """The other model has XLA's layers, with the dropout of a GPU."""
    images = random_images(*IMAGES)
    fields = dict(dropout_rate=0.3, gelu='erf', num_layers=2) | fields
    params = randomised(build('xla', **fields), images)
    result = loss_and_gradients(build('gpu', **fields), params, images)
    other_loss = jax.jit(functools.partial(loss, build('xla', **fields)))(params, images)
    backend = dataclasses.replace(registry.XLA, dropout=gpu_dropout.Dropout)
    monkeypatch.setitem(registry.LINEAR, 'xla', backend)
    expected = loss_and_gradients(build('xla', **fields), params, images)
    assert abs(other_loss - expected[0]) > 0.01 * expected[0]
    assert_all_close(result, expected)


@pytest.mark.parametrize('kernel', ['cpu', 'gpu'])
@pytest.mark.parametrize(
    'fields', [dict(), pytest.param(dict(pool='map'), marks=pytest.mark.slow)], ids=str
)
def test_bfloat16_is_as_exact_as_xla(fields, kernel):
    """Errors are measured against float32, whose own error is 2 ** 16 times smaller."""
    images = random_images(*IMAGES)
    params, exact = by_xla(tuple(fields.items()))
    _, low = by_xla((*fields.items(), ('dtype', 'bfloat16')))
    result = loss_and_gradients(build(kernel, dtype='bfloat16', **fields), params, images)
    exact, low, result = (jax.flatten_util.ravel_pytree(x)[0] for x in (exact, low, result))
    xla_error = np.linalg.norm(low - exact)
    assert 1e-4 * np.linalg.norm(exact) < xla_error
    assert np.linalg.norm(result - exact) < 1.2 * xla_error


@pytest.mark.parametrize(
    ('layer', 'shape'),
    [('dense', (3, 5)), ('heads', (2, 3, 8)), ('joined', (2, 3, 4, 2)), ('norm', (2, 3, 8))],
)
def test_layers_equal_those_of_flax(layer, shape):
    xavier = nn.initializers.xavier_uniform()
    normal = nn.initializers.normal(0.1)
    make = {
        'dense': lambda kernel: backend(kernel).dense(7, kernel_init=xavier, bias_init=normal),
        'heads': lambda kernel: backend(kernel).dense((4, 2), kernel_init=xavier),
        'joined': lambda kernel: backend(kernel).dense(8, axis=(-2, -1), bias_init=normal),
        'norm': lambda kernel: backend(kernel).norm(
            epsilon=0.1, scale_init=normal, bias_init=normal
        ),
    }[layer]
    x = random_images(*shape)
    variables = make('xla').init(jax.random.key(3), x)
    for kernel in ('cpu', 'gpu'):
        jax.tree.map(
            np.testing.assert_array_equal, variables, make(kernel).init(jax.random.key(3), x)
        )
        np.testing.assert_allclose(
            make(kernel).apply(variables, x), make('xla').apply(variables, x), atol=1e-6
        )


@pytest.mark.parametrize('kernel', ['cpu', 'gpu'])
def test_gradients_of_parameters_are_sums_in_float32(kernel):
    """A sum of 4096 numbers in bfloat16 would lose most of them."""
    x = random_images(4096, 16) + 1
    bias = jnp.zeros(16)
    rounded = x.astype(jnp.bfloat16)

    def loss(bias):
        repeated = broadcast(bias, x.shape, jnp.bfloat16, SUMS[kernel])
        return (repeated * rounded).sum(dtype=jnp.float32)

    gradient = jax.grad(loss)(bias)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, np.asarray(rounded, np.float64).sum(0), rtol=1e-6)


def test_a_gpu_adds_biases_to_matrices():
    """cuBLAS fuses the addition only in this form."""
    layer = backend('gpu').dense((4, 2))
    x = random_images(2, 3, 8)
    variables = layer.init(jax.random.key(0), x)
    shapes_of_sums = [
        equation.outvars[0].aval.shape
        for equation in jax.make_jaxpr(layer.apply)(variables, x).eqns
        if equation.primitive.name == 'add'
    ]
    assert shapes_of_sums == [(2, 3, 8)]


def test_gelu_of_inference_on_a_gpu_has_the_form_of_cublas():
    """cuBLAS fuses the plain form with a product and a bias; training has another form."""
    model = build('gpu', dtype='bfloat16', unroll=1)
    images = random_images(*IMAGES)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def operations(train):
        return str(jax.make_jaxpr(functools.partial(model.apply, train=train))(variables, images))

    assert 'tanh' in operations(False)
    assert 'tanh' not in operations(True)


def test_products_round_their_result_once():
    a = random_images(5, 300).astype(jnp.bfloat16)
    b = random_images(300, 4, seed=2)
    exact = np.asarray(a, np.float64) @ np.asarray(b.astype(jnp.bfloat16), np.float64)
    bias = 10 * random_images(4, seed=3)
    for expected, arguments in ((exact, (a, b)), (exact + bias, (a, b, bias))):
        product = cpu.product('ij,jk->ik', *arguments)
        assert product.dtype == jnp.bfloat16
        np.testing.assert_allclose(product.astype(jnp.float32), expected, rtol=2**-8, atol=1e-5)
    gradients = jax.grad(lambda *x: cpu.product('ij,jk->ik', *x).sum(), (0, 1, 2))(a, b, bias)
    assert [x.dtype for x in gradients] == [jnp.bfloat16, jnp.float32, jnp.float32]
    np.testing.assert_allclose(gradients[1][:, 0], np.asarray(a, np.float64).sum(0), atol=1e-5)
    np.testing.assert_array_equal(gradients[2], [5, 5, 5, 5])


@pytest.mark.parametrize('width', [4, pytest.param(36, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ('batch', 'tokens'), nightly_but([(1, 1), (3, 13)], [(1, 1), (1, 13), (3, 1), (3, 13)])
)
def test_small_models_have_finite_gradients_on_a_cpu(batch, width, tokens):
    """XLA fails for sizes without a kernel for products with a float32 result."""
    model = build('cpu', dtype='bfloat16', pool='gap', hidden_size=width, num_layers=1)
    images = random_images(batch, 4, 4 * tokens, 3)
    result = loss_and_gradients(model, randomised(model, images), images)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result))


@pytest.mark.parametrize('kernel', ['cpu', 'gpu'])
@pytest.mark.parametrize('form', xla.GELU)
def test_gelu_is_rounded_once(form, kernel):
    x = jnp.linspace(-6, 6, 4001)
    plain_gelu = xla.GELU[form]
    gelu = backend(kernel).gelu(form, True)
    np.testing.assert_allclose(gelu(x), plain_gelu(x), atol=1e-6, rtol=0)
    x = x.astype(jnp.bfloat16)
    exact, slope = jax.vmap(jax.value_and_grad(plain_gelu))(x.astype(jnp.float32))
    if kernel == 'gpu' and form == 'tanh':  # computed in another form
        np.testing.assert_allclose(gelu(x).astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)
    else:
        np.testing.assert_array_equal(gelu(x), exact.astype(jnp.bfloat16))
    gradient = jax.vmap(jax.grad(gelu))(x)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(jnp.float32), slope, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize('form', xla.GELU)
def test_gelu_of_large_arguments_is_finite(form):
    x = jnp.array([-1e4, -100, -20, 0, 20, 100, 1e4])
    for kernel in ('xla', 'gpu'):
        y, slope = jax.vmap(jax.value_and_grad(backend(kernel).gelu(form, True)))(x)
        np.testing.assert_allclose(y, jnp.maximum(x, 0), atol=1e-6)
        np.testing.assert_allclose(slope, [0, 0, 0, 0.5, 1, 1, 1], atol=1e-6)


@pytest.mark.parametrize('kernel', ['xla', 'cpu'])
def test_the_backward_pass_of_gelu_on_a_cpu_keeps_only_the_argument(kernel):
    """XLA keeps four or more arrays."""
    gelu = backend(kernel).gelu('tanh', True)
    x = jnp.ones(64, jnp.bfloat16)
    _, pull = jax.vjp(gelu, x)
    kept = [array for array in jax.tree.leaves(pull) if array.shape == x.shape]
    if kernel == 'cpu':
        assert [array.dtype for array in kept] == [jnp.bfloat16]
    else:
        assert len(kept) >= 4


def test_the_backward_pass_of_an_mlp_on_a_gpu_keeps_products_and_bits():
    """The backward pass keeps the first product, the input of the second, and masks of bits."""
    fields = build('gpu', dtype='bfloat16', dropout_rate=0.1, mlp_dim=48).fields
    mlp = encoder.Mlp(fields)
    x = random_images(3, 5, fields.hidden_size).astype(jnp.bfloat16)
    params = jax.jit(mlp.init, static_argnums=2)(jax.random.key(0), x, False)
    _, pull = jax.vjp(
        lambda params: mlp.apply(params, x, True, rngs={'dropout': jax.random.key(1)}), params
    )
    kept = [array for array in jax.tree.leaves(pull) if array.shape[:2] == (3, 5)]
    hidden = 3 * 5 * 48
    outer = x.size
    assert sorted((array.dtype.name, array.size) for array in kept) == [
        ('bfloat16', outer),
        ('bfloat16', hidden),
        ('bfloat16', hidden),
        ('uint8', outer // 8),
        ('uint8', hidden // 8),
    ]


@pytest.mark.parametrize('kernel', ['cpu', 'gpu'])
@pytest.mark.parametrize(
    ('fields', 'shape'),
    [
        (dict(patch_size=(2, 4)), (2, 8, 12, 3)),
        pytest.param(dict(partial_patches='drop'), (2, 11, 14, 3), marks=pytest.mark.nightly),
        (dict(patch_size=(1, 1), resnet=variants.hybrid_resnet(units=(1, 1))), (2, 16, 32, 3)),
    ],
    ids=str,
)
def test_patches_equal_those_of_a_convolution(fields, shape, kernel):
    images = random_images(*shape)
    params = randomised(build('xla', **fields), images)
    expected = apply(build('xla', **fields), {'params': params}, images)
    logits = apply(build(kernel, **fields), {'params': params}, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    program = str(jax.make_jaxpr(build(kernel, **fields).apply)({'params': params}, images))
    if kernel == 'gpu':
        assert 'window_strides=(1, 1)' in program
    else:
        assert ('conv_general_dilated' in program) == ('resnet' in fields)
