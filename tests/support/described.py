"""Models of programs that cannot be installed here, built from the layers that they use.

torchvision: no CPU build fits the tested PyTorch. big_vision and Google's code: they are no
packages. Layers of PyTorch and Flax define the names and shapes of the arrays.
"""

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import interop
from vit_jax.weights import array_files


def torchvision_logits(given, path, images):
    """Logits of torchvision's VisionTransformer, which uses PyTorch's own attention layer."""
    torch = interop.require('torch')
    functional = torch.nn.functional
    state = {name: torch.tensor(x) for name, x in array_files.read(path)[0].items()}

    def linear(name, x):
        return functional.linear(x, state[f'{name}.weight'], state[f'{name}.bias'])

    def norm(name, x):
        return functional.layer_norm(
            x, x.shape[-1:], state[f'{name}.weight'], state[f'{name}.bias'], eps=1e-6
        )

    kernel = state['conv_proj.weight']
    x = functional.conv2d(
        torch.from_numpy(images).permute(0, 3, 1, 2),
        kernel,
        state['conv_proj.bias'],
        kernel.shape[2:],
    )
    x = torch.cat([state['class_token'].expand(len(x), -1, -1), x.flatten(2).mT], dim=1)
    x = x + state['encoder.pos_embedding']
    for i in range(given.model['num_layers']):
        layer = f'encoder.layers.encoder_layer_{i}'
        attention = torch.nn.MultiheadAttention(
            x.shape[-1], given.model['num_heads'], batch_first=True
        )
        prefix = f'{layer}.self_attention.'
        attention.load_state_dict(
            {n.removeprefix(prefix): y for n, y in state.items() if n.startswith(prefix)},
            strict=True,
        )
        y = norm(f'{layer}.ln_1', x)
        x = x + attention(y, y, y, need_weights=False)[0]
        y = functional.gelu(linear(f'{layer}.mlp.0', norm(f'{layer}.ln_2', x)))
        x = x + linear(f'{layer}.mlp.3', y)
    return linear('heads.head', norm('encoder.ln', x)[:, 0]).detach().numpy()


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, mlp_dim):
        return nn.Dense(x.shape[-1], name='Dense_1')(nn.gelu(nn.Dense(mlp_dim, name='Dense_0')(x)))


class Block(nn.Module):
    """A block whose layers Flax numbers, as in the newer files."""

    @nn.compact
    def __call__(self, x, num_heads, mlp_dim):
        x = x + nn.MultiHeadDotProductAttention(num_heads)(nn.LayerNorm()(x))
        return x + Mlp(name='MlpBlock_0')(nn.LayerNorm()(x), mlp_dim)


class Pool(nn.Module):
    @nn.compact
    def __call__(self, x, num_heads, mlp_dim):
        probe = self.param('probe', nn.initializers.zeros, (1, 1, x.shape[-1]))
        x = nn.MultiHeadDotProductAttention(num_heads)(jnp.tile(probe, (len(x), 1, 1)), x)
        return (x + Mlp(name='MlpBlock_0')(nn.LayerNorm()(x), mlp_dim))[:, 0]


class Position(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param('pos_embedding', nn.initializers.zeros, x[:1].shape)


class Encoder(nn.Module):
    big_vision: bool

    @nn.compact
    def __call__(self, x, num_layers, *sizes):
        if not self.big_vision:
            x = Position(name='posembed_input')(x)
        for i in range(num_layers):
            x = Block(name=f'encoderblock_{i}')(x, *sizes)
        return nn.LayerNorm(name='encoder_norm')(x)


class Described(nn.Module):
    """The model of big_vision, which adds positions before the class token, or Google's: after."""

    fields: dict
    num_classes: int
    big_vision: bool

    @nn.compact
    def __call__(self, images):
        f = self.fields
        x = nn.Conv(f['hidden_size'], f['patch_size'], f['patch_size'], name='embedding')(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        if self.big_vision:
            x = x + self.param('pos_embedding', nn.initializers.zeros, x[:1].shape)
        if f['pool'] == 'cls':
            cls = self.param('cls', nn.initializers.zeros, (1, 1, x.shape[-1]))
            x = jnp.concatenate([jnp.tile(cls, (len(x), 1, 1)), x], axis=1)
        sizes = f['num_heads'], f['mlp_dim']
        x = Encoder(self.big_vision, name='Transformer')(x, f['num_layers'], *sizes)
        x = {
            'cls': lambda x: x[:, 0],
            'gap': lambda x: x.mean(1),
            'map': lambda x: Pool(name='MAPHead_0')(x, *sizes),
        }[f['pool']](x)
        if f['representation_size']:
            x = jnp.tanh(nn.Dense(f['representation_size'], name='pre_logits')(x))
        return nn.Dense(self.num_classes, name='head')(x)


def big_vision_logits(given, path, images):
    return _flax_logits(given, path, images, big_vision=True)


def google_logits(given, path, images):
    return _flax_logits(given, path, images, big_vision=False)


def _flax_logits(given, path, images, big_vision):
    with np.load(path) as file:
        arrays = dict(file)
    if not big_vision:  # the files have older names than today's Flax
        arrays = {
            name.replace('Attention_1', 'Attention_0')
            .replace('LayerNorm_2', 'LayerNorm_1')
            .replace('MlpBlock_3', 'MlpBlock_0'): x
            for name, x in arrays.items()
        }
    params = flax.traverse_util.unflatten_dict(arrays, sep='/')
    model = Described(given.model, given.num_classes, big_vision)
    expected = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
    return np.asarray(jax.jit(model.apply)({'params': params}, images))


def big_vision_resnet_logits(path, images):
    """Logits of models/bit_paper.py, or of models/bit.py, which normalises after convolutions.

    The root's pooling pads with zeros, as in BiT. In bit_paper.py the zeros have no effect.
    """
    with np.load(path) as file:
        arrays = dict(file)
    paper = 'norm-pre-head/scale' in arrays

    def conv(name, x, stride=1):
        kernel = arrays[f'{name}/kernel']
        kernel = kernel - kernel.mean((0, 1, 2))
        if paper:
            kernel = kernel / np.sqrt((kernel**2).mean((0, 1, 2)) + 1e-10)
            border = (len(kernel) // 2, len(kernel) // 2)
            pad = [border, border]
        else:
            kernel = kernel / (kernel.std((0, 1, 2)) + 1e-5)
            pad = 'SAME'
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), pad, dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )

    def norm(name, x):
        params = {leaf: arrays[f'{name}/{leaf}'].ravel() for leaf in ('scale', 'bias')}
        layer = nn.GroupNorm(epsilon=1e-5 if paper else 1e-6)
        return layer.apply({'params': params}, x)

    def unit_before(name, x, stride):
        y = nn.relu(norm(f'{name}/gn1', x))
        if f'{name}/conv_proj/kernel' in arrays:
            x = conv(f'{name}/conv_proj', y, stride)
        y = nn.relu(norm(f'{name}/gn2', conv(f'{name}/conv1', y)))
        y = nn.relu(norm(f'{name}/gn3', conv(f'{name}/conv2', y, stride)))
        return x + conv(f'{name}/conv3', y)

    def unit_after(name, x, stride):
        y = nn.relu(norm(f'{name}/gn1', conv(f'{name}/conv1', x)))
        y = nn.relu(norm(f'{name}/gn2', conv(f'{name}/conv2', y, stride)))
        y = norm(f'{name}/gn3', conv(f'{name}/conv3', y))
        if f'{name}/conv_proj/kernel' in arrays:
            x = norm(f'{name}/gn_proj', conv(f'{name}/conv_proj', x, stride))
        return nn.relu(x + y)

    x = conv('root_block/conv_root' if paper else 'conv_root', images, 2)
    if paper:
        x = nn.max_pool(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (2, 2))
    else:
        x = nn.max_pool(nn.relu(norm('gn_root', x)), (3, 3), (2, 2), padding='SAME')
    units = {name.rpartition('/conv1/')[0] for name in arrays if '/conv1/' in name}
    for name in sorted(units):
        is_first = name.endswith(('unit1', 'unit01'))
        stride = 2 if is_first and not name.startswith('block1/') else 1
        x = unit_before(name, x, stride) if paper else unit_after(name, x, stride)
    if paper:
        x = nn.relu(norm('norm-pre-head', x))
    return np.asarray(x.mean((1, 2)) @ arrays['head/kernel'] + arrays['head/bias'])


LOGITS = {
    'torchvision': torchvision_logits,
    'big_vision': big_vision_logits,
    'google': google_logits,
}
