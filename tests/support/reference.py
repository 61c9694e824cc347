"""The transformers of the paper in float64 NumPy, written from the paper.

It shares no code with vit_jax and loops over patches, heads and layers.
"""

import itertools

import jax
import numpy as np
import scipy.special


def norm(x, p, epsilon=1e-6):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * p['scale'] + p['bias']


def gelu(x, kind):
    if kind == 'erf':
        return x / 2 * (1 + scipy.special.erf(x / np.sqrt(2)))
    if kind == 'quick':
        return x / (1 + np.exp(-1.702 * x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dense(x, p):
    return x @ p['kernel'] + p['bias']


def mlp(x, p, kind):
    return dense(gelu(dense(x, p['dense1']), kind), p['dense2'])


def attend(y, context, p, table=None):
    """Equations 5 to 8, and the relative attention of appendix D.4; returns y and the weights."""
    result = p['out']['bias']
    all_weights = []
    for h in range(p['query']['kernel'].shape[1]):
        q = y @ p['query']['kernel'][:, h] + p['query']['bias'][h]
        k = context @ p['key']['kernel'][:, h] + p['key']['bias'][h]
        v = context @ p['value']['kernel'][:, h] + p['value']['bias'][h]
        logits = q @ k.T
        if table is not None:
            for i, j in itertools.product(range(len(q)), range(len(k))):
                logits[i, j] += q[i] @ table[j - i + len(q) - 1, h]
        weights = scipy.special.softmax(logits / np.sqrt(q.shape[-1]), axis=-1)
        result = result + weights @ v @ p['out']['kernel'][h]
        all_weights.append(weights)
    return result, np.stack(all_weights)


def positions(p, kind, grid, prefix, hidden_size):
    """The position embeddings [tokens, hidden_size], in the order of rows and columns."""
    if kind == 'learned_1d':
        return p['embedding'][0]
    embedding = [np.zeros(hidden_size) for _ in range(prefix)]
    for row, column in itertools.product(range(grid[0]), range(grid[1])):
        if kind == 'learned_2d':
            embedding.append(np.concatenate([p['row'][row, 0], p['column'][0, column]]))
        else:
            x, y = _angles(column, hidden_size), _angles(row, hidden_size)
            embedding.append(np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)]))
    return np.stack(embedding)


def _angles(place, hidden_size):
    quarter = hidden_size // 4
    return [place / 10_000 ** (i / (quarter - 1)) for i in range(quarter)]


def block(z, p, fields, table=None):
    """Equations 2 and 3, with LayerScale."""
    epsilon = fields['layer_norm_epsilon']
    y = norm(z, p['norm1'], epsilon)
    y, weights = attend(y, y, p['attention'], table)
    z = z + y * p.get('scale1', 1)
    y = mlp(norm(z, p['norm2'], epsilon), p['mlp'], fields['gelu'])
    return z + y * p.get('scale2', 1), weights


def parallel_block(z, p, fields, table=None):
    """Attention and MLP on the same tokens (arXiv 2302.05442, section 2.1), with LayerScale."""
    y = norm(z, p['norm'], fields['layer_norm_epsilon'])
    attended, weights = attend(y, y, p['attention'], table)
    transformed = mlp(y, p['mlp'], fields['gelu'])
    return z + attended * p.get('scale1', 1) + transformed * p.get('scale2', 1), weights


def axial_block(z, p, fields, grid):
    """Attention along each row, then along each column (appendix D.6)."""
    z = z.reshape(*grid, -1)
    for name in ('row', 'column'):
        table = p[name]['position']['relative'] if fields['position'] == 'relative' else None
        z = np.stack([block(line, p[name], fields, table)[0] for line in z]).swapaxes(0, 1)
    return z.reshape(grid[0] * grid[1], -1), None


def vit(params, image, fields):
    """Logits of one image [height, width, channels], and the attention weights of each layer.

    `fields` has all fields of the model.
    """
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    image = np.asarray(image, np.float64)
    patch = fields['patch_size']
    hidden_size = fields['hidden_size']
    grid = image.shape[0] // patch[0], image.shape[1] // patch[1]
    has_class_token = fields['pool'] == 'cls'
    kind = fields['position']
    place = fields['position_at']
    tokens = []
    if has_class_token:
        tokens.append(params['cls'][0, 0])
    if 'registers' in params:
        tokens += [*params['registers'][0]]
    prefix = len(tokens)
    for row, column in itertools.product(range(grid[0]), range(grid[1])):
        pixels = image[row * patch[0] :, column * patch[1] :][: patch[0], : patch[1]]
        embedding = params['embedding']
        tokens.append(np.tensordot(pixels, embedding['kernel'], 3) + embedding.get('bias', 0))
    z = np.stack(tokens)
    all_weights = []
    if place == 'stem' and kind != 'none':
        z = z + positions(params.get('position', {}), kind, grid, prefix, hidden_size)
    if fields['stem_norm']:
        z = norm(z, params['stem_norm'], fields['layer_norm_epsilon'])

    for layer in range(fields['num_layers']):
        p = jax.tree.map(lambda x, layer=layer: x[layer], params['blocks'])
        owner = p if place == 'every_layer' else params
        position = owner.get('position', {})
        table = None
        if kind == 'relative':
            table = position.get('relative')
        elif place != 'stem':
            z = z + positions(position, kind, grid, prefix, hidden_size)
        if fields['attention'] == 'axial':
            z, weights = axial_block(z, p, fields, grid)
        elif fields['block'] == 'parallel':
            z, weights = parallel_block(z, p, fields, table)
        else:
            z, weights = block(z, p, fields, table)
        all_weights.append(weights)

    if not fields['norm_after_pool']:
        z = norm(z, params['norm'], fields['layer_norm_epsilon'])
    z = z[0] if has_class_token else z[prefix:]
    if fields['pool'] == 'gap':
        z = z.mean(0)
    elif fields['pool'] == 'map':
        p = params['pool']
        z, _ = attend(p['probe'][0], z, p['attention'])
        z = (z + mlp(norm(z, p['norm'], fields['layer_norm_epsilon']), p['mlp'], fields['gelu']))[0]
    if fields['norm_after_pool']:
        z = norm(z, params['norm'], fields['layer_norm_epsilon'])
    if 'pre_logits' in params:
        z = np.tanh(dense(z, params['pre_logits']))
    return dense(z, params['head']), all_weights
