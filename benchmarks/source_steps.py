"""The training steps of vision_transformer, big_vision and big_transfer, stated anew in plain JAX.

Written from their published definitions, for benchmarks/certificate.py. Nothing here uses vit_jax,
Flax or Optax; parameters are nested dicts with the names that vit_jax gives them, and what belongs
to the layers of a transformer is stacked. Everything is computed in the precision of what comes in.
"""

import jax
import jax.numpy as jnp
import numpy as np


def layer_norm(x, p):
    """With epsilon 1e-6 under the root."""
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p['scale'] + p['bias']


def gelu(x):
    """The approximation by tanh."""
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


def attention(x, p):
    """Of every token to all, [batch, tokens, width]."""
    q, k, v = (
        jnp.einsum('btw,whd->bhtd', x, p[name]['kernel']) + p[name]['bias'][:, None]
        for name in ('query', 'key', 'value')
    )
    weights = jnp.einsum('bhqd,bhkd->bhqk', q, k) / np.sqrt(q.shape[-1])
    weights = jnp.exp(weights - weights.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    mixed = jnp.einsum('bhqk,bhkd->bhqd', weights, v)
    return jnp.einsum('bhtd,hdw->btw', mixed, p['out']['kernel']) + p['out']['bias']


def sincos(rows, columns, width):
    """big_vision's models/vit.py, posemb_sincos_2d: [1, patches, width]."""
    y, x = np.mgrid[:rows, :columns]
    omega = 1 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    x, y = np.outer(x.ravel(), omega), np.outer(y.ravel(), omega)
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None]


def vit(params, images):
    """Logits: with a class token if there is one, else with the mean and fixed positions."""
    kernel = params['embedding']['kernel']
    batch, (height, width) = len(images), kernel.shape[:2]
    rows, columns = images.shape[1] // height, images.shape[2] // width
    patches = images.reshape(batch, rows, height, columns, width, 3).transpose(0, 1, 3, 2, 4, 5)
    x = patches.reshape(batch, rows * columns, -1) @ kernel.reshape(-1, kernel.shape[-1])
    x = x + params['embedding']['bias']
    if 'cls' in params:
        x = jnp.concatenate(
            [jnp.broadcast_to(params['cls'], (batch, *params['cls'].shape[1:])), x], axis=1
        )
        x = x + params['position']['embedding']
    else:
        x = x + sincos(rows, columns, x.shape[-1]).astype(x.dtype)
    for layer in range(len(params['blocks']['norm1']['scale'])):
        p = jax.tree.map(lambda value, layer=layer: value[layer], params['blocks'])
        x = x + attention(layer_norm(x, p['norm1']), p['attention'])
        y = gelu(
            layer_norm(x, p['norm2']) @ p['mlp']['dense1']['kernel'] + p['mlp']['dense1']['bias']
        )
        x = x + y @ p['mlp']['dense2']['kernel'] + p['mlp']['dense2']['bias']
    x = layer_norm(x, params['norm'])
    x = x[:, 0] if 'cls' in params else x.mean(1)
    if 'pre_logits' in params:
        x = jnp.tanh(x @ params['pre_logits']['kernel'] + params['pre_logits']['bias'])
    return x @ params['head']['kernel'] + params['head']['bias']


def group_norm(x, p, groups):
    """With epsilon 1e-5 under the root."""
    y = x.reshape(*x.shape[:3], groups, -1)
    y = y - y.mean((1, 2, 4), keepdims=True)
    y = y / jnp.sqrt((y * y).mean((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * p['scale'] + p['bias']


def standardised_conv(x, p, stride):
    """With a kernel of mean 0 and variance 1, and the same number of zeros on all sides."""
    kernel = p['kernel']
    kernel = kernel - kernel.mean((0, 1, 2))
    kernel = kernel / jnp.sqrt((kernel * kernel).mean((0, 1, 2)) + 1e-10)
    pad = (len(kernel) - 1) // 2
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )


def bit(params, images, groups):
    """Logits of a BiT ResNet whose stages have one unit each."""
    net = params['resnet']
    x = jnp.pad(standardised_conv(images, net['root_conv'], 2), ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = ((side - 3) // 2 + 1 for side in x.shape[1:3])
    x = jnp.stack(
        [
            x[:, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2]
            for i in range(3)
            for j in range(3)
        ]
    ).max(0)
    for stage in sorted(name for name in net if name.startswith('stage')):
        p, stride = net[stage]['first'], 1 if stage == 'stage1' else 2
        y = jax.nn.relu(group_norm(x, p['norm1'], groups))
        x = standardised_conv(y, p['conv_proj'], stride)
        y = standardised_conv(y, p['conv1'], 1)
        y = standardised_conv(jax.nn.relu(group_norm(y, p['norm2'], groups)), p['conv2'], stride)
        x = x + standardised_conv(jax.nn.relu(group_norm(y, p['norm3'], groups)), p['conv3'], 1)
    x = jax.nn.relu(group_norm(x, params['norm'], groups)).mean((1, 2))
    return x @ params['head']['kernel'] + params['head']['bias']


def softmax_loss(logits, targets):
    """Cross-entropy, mean over the batch."""
    logits = logits - logits.max(-1, keepdims=True)
    log_p = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    return -(targets * log_p).sum(-1).mean()


def sigmoid_loss(logits, targets):
    """Binary cross-entropies summed over classes, mean over the batch."""
    log_p, log_not_p = (-jnp.logaddexp(0.0, -sign * logits) for sign in (1, -1))
    return -(targets * log_p + (1 - targets) * log_not_p).sum(-1).mean()


def warm(step, warmup, rate):
    """A linear warm-up from 0, as big_vision and vision_transformer multiply it."""
    return rate * min(1.0, step / warmup) if warmup else rate


def cosine(step, total, warmup, peak):
    """Learning rate of step 0, 1, ... in float64."""
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    return warm(step, warmup, peak * 0.5 * (1 + np.cos(np.pi * progress)))


def linear(step, total, warmup, peak, end):
    """The same, down to `end`."""
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    return warm(step, warmup, end + (peak - end) * (1 - progress))


def hyperrule(step, supports, base):
    """bit_hyperrule.py's get_lr: `supports` are ends of the warm-up, of each level, of the run."""
    if step < supports[0]:
        return base * step / supports[0]
    return base / 10 ** sum(step > support for support in supports[1:-1])


def clipped(grads, most):
    """Scaled down to a global norm of at most `most`."""
    norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm * most), grads)


def decayed(params, amount):
    """`amount` times every array named kernel, and zeros."""
    return jax.tree.map_with_path(
        lambda path, x: amount * x if path[-1].key == 'kernel' else jnp.zeros_like(x), params
    )


def adam(params, grads, memory, count, rate, decay, mean_dtype):
    """Adam (0.9, 0.999, 1e-8) with decoupled decay: parameters and memory after update `count`.

    `rate` and `decay` are what Adam's direction and the kernels are multiplied by in this step.
    The mean is kept in mean_dtype, rounded after its use; so is 0.9 times it, as Optax does it.
    """
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, memory[0], grads)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, memory[1], grads)
    direction = jax.tree.map(
        lambda m, s: m / (1 - 0.9**count) / (jnp.sqrt(s / (1 - 0.999**count)) + 1e-8), mean, square
    )
    params = jax.tree.map(
        lambda x, d, shrink: x - rate * d - shrink, params, direction, decayed(params, decay)
    )
    return params, (jax.tree.map(lambda m: m.astype(mean_dtype), mean), square)


def momentum(params, grads, memory, rate):
    """SGD with momentum 0.9."""
    memory = jax.tree.map(lambda m, g: 0.9 * m + g, memory, grads)
    return jax.tree.map(lambda x, m: x - rate * m, params, memory), memory
