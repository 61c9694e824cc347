"""The training steps of vision_transformer, big_vision and big_transfer in plain JAX.

They are written from the published definitions, for benchmarks/certificate.py, without vit_jax,
Flax and Optax. Parameters are nested dicts with the names of vit_jax, and the parameters of
transformer layers are stacked. All functions compute in the precision of their arguments.
"""

import jax
import jax.numpy as jnp
import numpy as np


def layer_norm(x, p):
    """LayerNorm with epsilon 1e-6 under the root."""
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p['scale'] + p['bias']


def gelu(x):
    """GELU, approximated by tanh."""
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


def attention(x, p):
    """Multi-head self-attention, from and to [batch, tokens, width]."""

    def project(name):
        return jnp.einsum('btw,whd->bhtd', x, p[name]['kernel']) + p[name]['bias'][:, None]

    q = project('query')
    k = project('key')
    v = project('value')
    weights = jnp.einsum('bhqd,bhkd->bhqk', q, k) / np.sqrt(q.shape[-1])
    weights = jnp.exp(weights - weights.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    mixed = jnp.einsum('bhqk,bhkd->bhqd', weights, v)
    return jnp.einsum('bhtd,hdw->btw', mixed, p['out']['kernel']) + p['out']['bias']


def sincos(rows, columns, width):
    """posemb_sincos_2d of big_vision's models/vit.py: [1, patches, width]."""
    y, x = np.mgrid[:rows, :columns]
    omega = 1 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    x = np.outer(x.ravel(), omega)
    y = np.outer(y.ravel(), omega)
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None]


def vit(params, images):
    """The logits of a ViT.

    Parameters with a class token have learned positions. Without one the model has fixed positions
    and reads the mean of the tokens.
    """
    kernel = params['embedding']['kernel']
    batch = len(images)
    height, width = kernel.shape[:2]
    rows = images.shape[1] // height
    columns = images.shape[2] // width
    patches = images.reshape(batch, rows, height, columns, width, 3).transpose(0, 1, 3, 2, 4, 5)
    x = patches.reshape(batch, rows * columns, -1) @ kernel.reshape(-1, kernel.shape[-1])
    x = x + params['embedding']['bias']
    if 'cls' in params:
        class_tokens = jnp.broadcast_to(params['cls'], (batch, *params['cls'].shape[1:]))
        x = jnp.concatenate([class_tokens, x], axis=1)
        x = x + params['position']['embedding']
    else:
        x = x + sincos(rows, columns, x.shape[-1]).astype(x.dtype)
    for layer in range(len(params['blocks']['norm1']['scale'])):
        p = jax.tree.map(lambda value, layer=layer: value[layer], params['blocks'])
        x = x + attention(layer_norm(x, p['norm1']), p['attention'])
        dense1 = p['mlp']['dense1']
        dense2 = p['mlp']['dense2']
        y = gelu(layer_norm(x, p['norm2']) @ dense1['kernel'] + dense1['bias'])
        x = x + y @ dense2['kernel'] + dense2['bias']
    x = layer_norm(x, params['norm'])
    x = x[:, 0] if 'cls' in params else x.mean(1)
    if 'pre_logits' in params:
        x = jnp.tanh(x @ params['pre_logits']['kernel'] + params['pre_logits']['bias'])
    return x @ params['head']['kernel'] + params['head']['bias']


def group_norm(x, p, groups):
    """GroupNorm with epsilon 1e-5 under the root."""
    y = x.reshape(*x.shape[:3], groups, -1)
    y = y - y.mean((1, 2, 4), keepdims=True)
    y = y / jnp.sqrt((y * y).mean((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * p['scale'] + p['bias']


def standardised_conv(x, p, stride):
    """Convolution by a kernel of mean 0 and variance 1, with equal zero padding on all sides."""
    kernel = p['kernel']
    kernel = kernel - kernel.mean((0, 1, 2))
    kernel = kernel / jnp.sqrt((kernel * kernel).mean((0, 1, 2)) + 1e-10)
    pad = (len(kernel) - 1) // 2
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )


def max_pool(x):
    """The maximum of 3x3 windows with stride 2, without padding."""
    rows = (x.shape[1] - 3) // 2 + 1
    columns = (x.shape[2] - 3) // 2 + 1
    shifted = []
    for i in range(3):
        for j in range(3):
            shifted.append(x[:, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2])
    return jnp.stack(shifted).max(0)


def bit(params, images, groups):
    """The logits of a BiT ResNet with one unit in each stage."""
    net = params['resnet']
    x = standardised_conv(images, net['root_conv'], 2)
    x = max_pool(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))))
    for stage in sorted(name for name in net if name.startswith('stage')):
        p = net[stage]['first']
        stride = 1 if stage == 'stage1' else 2
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
    log_p = -jnp.logaddexp(0.0, -logits)
    log_not_p = -jnp.logaddexp(0.0, logits)
    return -(targets * log_p + (1 - targets) * log_not_p).sum(-1).mean()


def warm(step, warmup, rate):
    """A rate multiplied by a linear warm-up from 0, as in big_vision and vision_transformer."""
    if not warmup:
        return rate
    return rate * min(1.0, step / warmup)


def cosine(step, total, warmup, peak):
    """The learning rate of a cosine schedule in step 0, 1, ... in float64."""
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    return warm(step, warmup, peak * 0.5 * (1 + np.cos(np.pi * progress)))


def linear(step, total, warmup, peak, end):
    """The learning rate of a linear schedule, down to `end`."""
    progress = min(max((step - warmup) / (total - warmup), 0.0), 1.0)
    return warm(step, warmup, end + (peak - end) * (1 - progress))


def hyperrule(step, supports, base):
    """get_lr of bit_hyperrule.py.

    `supports` are the last steps of the warm-up, of each level, and of the run.
    """
    if step < supports[0]:
        return base * step / supports[0]
    num_decays = sum(step > support for support in supports[1:-1])
    return base / 10**num_decays


def clipped(grads, max_norm):
    """Gradients, scaled down to a global norm of at most `max_norm`."""
    norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm * max_norm), grads)


def decayed(params, amount):
    """`amount` times every array named kernel, and zeros for all others."""
    return jax.tree.map_with_path(
        lambda path, x: amount * x if path[-1].key == 'kernel' else jnp.zeros_like(x), params
    )


def adam(params, grads, memory, count, rate, decay, mean_dtype):
    """Adam (0.9, 0.999, 1e-8) with decoupled decay: the parameters and memory after step `count`.

    `rate` multiplies Adam's direction and `decay` multiplies the kernels. The mean is stored in
    mean_dtype and rounded after its use. 0.9 times the mean is rounded too, as in Optax.
    """
    mean, square = memory
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, grads)

    def direction(m, s):
        return m / (1 - 0.9**count) / (jnp.sqrt(s / (1 - 0.999**count)) + 1e-8)

    params = jax.tree.map(
        lambda x, m, s, shrink: x - rate * direction(m, s) - shrink,
        params,
        mean,
        square,
        decayed(params, decay),
    )
    return params, (jax.tree.map(lambda m: m.astype(mean_dtype), mean), square)


def momentum(params, grads, memory, rate):
    """SGD with momentum 0.9."""
    memory = jax.tree.map(lambda m, g: 0.9 * m + g, memory, grads)
    return jax.tree.map(lambda x, m: x - rate * m, params, memory), memory
