"""AxialResNet in float64 NumPy, written from arXiv 2003.07853 (section 3), point by point.

It shares no code with vit_jax, but its parameters and choices: GroupNorms, standardised kernels,
logits divided by their standard deviation.
"""

import itertools

import jax
import numpy as np
import scipy.special


def conv(x, p, stride=1):
    """Convolution of x [rows, columns, channels] with a kernel of mean 0 and variance 1."""
    kernel = p['kernel'] - p['kernel'].mean((0, 1, 2))
    kernel = kernel / np.sqrt((kernel**2).mean((0, 1, 2)) + 1e-10)
    size = len(kernel)
    border = (size - 1) // 2
    x = np.pad(x, [(border, border), (border, border), (0, 0)])
    return np.array(
        [
            [
                np.tensordot(x[i : i + size, j : j + size], kernel, 3)
                for j in range(0, x.shape[1] - size + 1, stride)
            ]
            for i in range(0, x.shape[0] - size + 1, stride)
        ]
    )


def norm(x, p, groups):
    """GroupNorm: over all axes and each group of neighbouring channels, the last axis."""
    parts = np.split(x, groups, axis=-1)
    x = np.concatenate([(part - part.mean()) / np.sqrt(part.var() + 1e-5) for part in parts], -1)
    return x * p['scale'] + p['bias']


def attend(x, p, heads, groups):
    """Equation 4 along each line of x [lines, length, channels]."""
    lines, length, channels = x.shape
    d = channels // heads // 2
    qkv = norm(conv(x, p['conv_qkv']), p['norm_qkv'], groups).reshape(lines, length, heads, 4 * d)
    offsets = p['position']['relative'][:, 0]
    logits = np.zeros((3, heads, lines, length, length))
    places = list(itertools.product(range(heads), range(lines), range(length), range(length)))
    for h, line, i, j in places:
        q = qkv[line, i, h, :d]
        k = qkv[line, j, h, d : 2 * d]
        r = offsets[j - i + length - 1]
        logits[0, h, line, i, j] = q @ k
        logits[1, h, line, i, j] = q @ r[:d]
        logits[2, h, line, i, j] = k @ r[d : 2 * d]
    for kind, h in itertools.product(range(3), range(heads)):
        logits[kind, h] *= p['scale'][kind, h] / np.sqrt(logits[kind, h].var() + 1e-5)
    weights = scipy.special.softmax(logits.sum(0), axis=-1)
    seen = np.zeros((lines, length, 2, heads, 2 * d))  # the second axis from last: values, places
    for h, line, i, j in places:
        seen[line, i, 0, h] += weights[h, line, i, j] * qkv[line, j, h, 2 * d :]
        seen[line, i, 1, h] += weights[h, line, i, j] * offsets[j - i + length - 1, 2 * d :]
    y = norm(seen.reshape(lines, length, 2 * channels), p['norm_out'], groups)
    return y[..., :channels] + y[..., channels:]


def pooled(x, stride, function):
    """`function` of the points in each square; the squares do not overlap."""
    return np.array(
        [
            [
                function(x[i : i + stride, j : j + stride].reshape(-1, x.shape[-1]), axis=0)
                for j in range(0, x.shape[1], stride)
            ]
            for i in range(0, x.shape[0], stride)
        ]
    )


def unit(x, p, stride, heads, groups):
    """A residual unit: 1x1, columns, rows, 1x1."""
    y = np.maximum(norm(conv(x, p['conv1']), p['norm1'], groups), 0)
    y = attend(y.swapaxes(0, 1), p['column'], heads, groups).swapaxes(0, 1)
    y = pooled(attend(y, p['row'], heads, groups), stride, np.mean)
    y = norm(conv(np.maximum(y, 0), p['conv3']), p['norm3'], groups)
    if 'conv_proj' in p:
        x = norm(conv(x, p['conv_proj'], stride), p['norm_proj'], groups)
    return np.maximum(x + y, 0)


def axial_resnet(params, image, fields):
    """Logits of one image [height, width, channels]; `fields` has all fields of the model."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    net = params['resnet']
    groups = fields['resnet']['num_groups']
    x = np.maximum(
        norm(conv(np.asarray(image, np.float64), net['root_conv'], 2), net['root_norm'], groups), 0
    )
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    x = np.array(
        [
            [padded[i : i + 3, j : j + 3].max((0, 1)) for j in range(0, x.shape[1], 2)]
            for i in range(0, x.shape[0], 2)
        ]
    )
    for s, units in enumerate(fields['resnet']['units']):
        stage = net[f'stage{s + 1}']
        for j in range(units):
            p = stage['first'] if j == 0 else jax.tree.map(lambda x, j=j: x[j - 1], stage['rest'])
            x = unit(x, p, 2 if s and not j else 1, fields['axial_heads'], groups)
    return x.mean((0, 1)) @ params['head']['kernel'] + params['head']['bias']
