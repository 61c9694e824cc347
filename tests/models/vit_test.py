import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import vit

SMALL = dict(patch_size=(4, 4), hidden_size=32, num_layers=3, mlp_dim=48, num_heads=4)


def randomised(model, images, seed=0):
    """Parameters with every array random, so that a zero head or bias hides nothing."""
    params = model.init(jax.random.key(seed), images)['params']
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return treedef.unflatten([jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for x in leaves])


def norm(x, p, epsilon=1e-6):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p['scale'] + p['bias']


def gelu(x, kind):
    if kind == 'erf':
        return x / 2 * (1 + scipy.special.erf(x / np.sqrt(2)))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def paper_vit(params, images, patch, kind):
    """Equations 1 to 4 in float64 NumPy, patch by patch and head by head."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    images = np.asarray(images, np.float64)
    kernel = params['embedding']['kernel']
    logits = []
    for image in images:
        tokens = [params['cls'][0, 0]]
        for top in range(0, image.shape[0], patch[0]):
            for left in range(0, image.shape[1], patch[1]):
                pixels = image[top:top + patch[0], left:left + patch[1]]
                tokens.append(np.tensordot(pixels, kernel, 3) + params['embedding']['bias'])
        z = np.stack(tokens) + params['position']['embedding'][0]
        for layer in range(kernel_layers(params)):
            p = jax.tree.map(lambda x, layer=layer: x[layer], params['blocks'])
            y, a, heads = norm(z, p['norm1']), p['attention'], []
            for h in range(a['query']['kernel'].shape[1]):
                q, k, v = (y @ a[n]['kernel'][:, h] + a[n]['bias'][h]
                           for n in ('query', 'key', 'value'))
                weights = scipy.special.softmax(q @ k.T / np.sqrt(q.shape[-1]), axis=-1)
                heads.append(weights @ v @ a['out']['kernel'][h])
            z = z + sum(heads) + a['out']['bias']
            m = p['mlp']
            y = norm(z, p['norm2']) @ m['dense1']['kernel'] + m['dense1']['bias']
            z = z + gelu(y, kind) @ m['dense2']['kernel'] + m['dense2']['bias']
        y = norm(z, params['norm'])[0]
        if 'pre_logits' in params:
            y = np.tanh(y @ params['pre_logits']['kernel'] + params['pre_logits']['bias'])
        logits.append(y @ params['head']['kernel'] + params['head']['bias'])
    return np.stack(logits)


def kernel_layers(params):
    return len(params['blocks']['norm1']['scale'])


@pytest.mark.parametrize('kind', ['tanh', 'erf'])
@pytest.mark.parametrize('representation_size', [0, 20])
def test_equals_the_paper_in_numpy(kind, representation_size):
    model = models.build(SMALL, 7, gelu=kind, representation_size=representation_size)
    images = jax.random.uniform(jax.random.key(1), (2, 8, 12, 3), minval=-1)
    params = randomised(model, images)
    expected = paper_vit(params, images, (4, 4), kind)
    logits = model.apply({'params': params}, images)
    assert logits.dtype == jnp.float32
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


def test_unrolled_equals_scan():
    images = jax.random.uniform(jax.random.key(1), (2, 8, 8, 3))
    scan = models.build(SMALL, 5)
    unrolled = models.build(SMALL, 5, unroll=3)
    params = randomised(scan, images)
    assert jax.tree.structure(params) == jax.tree.structure(
        unrolled.init(jax.random.key(0), images)['params'])
    np.testing.assert_array_equal(scan.apply({'params': params}, images),
                                  unrolled.apply({'params': params}, images))


def test_bfloat16_computes_low_and_keeps_float32_parameters_and_logits():
    images = jax.random.uniform(jax.random.key(1), (2, 8, 8, 3))
    low = models.build(SMALL, 5, dtype='bfloat16')
    params = randomised(low, images)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
    logits = low.apply({'params': params}, images)
    exact = models.build(SMALL, 5).apply({'params': params}, images)
    assert logits.dtype == jnp.float32
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.1  # it did compute in bfloat16, and reasonably


def test_dropout_acts_in_training_only_and_follows_its_key():
    images = jax.random.uniform(jax.random.key(1), (2, 8, 8, 3))
    model = models.build(SMALL, 5, dropout_rate=0.5)
    params = {'params': randomised(model, images)}
    evaluated = model.apply(params, images)
    np.testing.assert_array_equal(evaluated, models.build(SMALL, 5).apply(params, images))
    a, b, c = (model.apply(params, images, train=True, rngs={'dropout': jax.random.key(k)})
               for k in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3
    assert np.abs(a - evaluated).max() > 1e-3


def test_head_starts_at_zero_with_the_bias_asked_for():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 5, head_bias_init=-10.0)
    params = model.init(jax.random.key(0), images)
    np.testing.assert_array_equal(model.apply(params, images), np.full((1, 5), -10.0))


def test_no_classes_returns_the_representation():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 0)
    out, params = model.init_with_output(jax.random.key(0), images)
    assert out.shape == (1, 32)
    assert 'head' not in params['params']


@pytest.mark.parametrize(('size', 'pair'), [(224, (224, 224)), ((8,), (8, 8)), ([6, 4], (6, 4))])
def test_as_pair(size, pair):
    assert vit.as_pair(size) == pair


@pytest.mark.parametrize('size', [0, (1, 2, 3), (2.5, 1), ()])
def test_as_pair_refuses(size):
    with pytest.raises(UserError, match='expected one positive integer'):
        vit.as_pair(size)


def test_image_not_divisible_by_patch():
    with pytest.raises(UserError, match=r'image_size 384x384 is not divisible by patch_size 14x14. '
                                        r'The nearest sizes are 378x378 and 392x392'):
        jax.eval_shape(models.build('ti14', 10).init, jax.random.key(0), jnp.ones((1, 384, 384, 3)))


def test_image_of_another_size_than_trained():
    model = models.build(SMALL, 5)
    params = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
    with pytest.raises(UserError, match='made for 5 tokens of size 32 and the image gives 10'):
        model.apply(params, jnp.ones((1, 12, 12, 3)))
