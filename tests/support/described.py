"""Programs that cannot be installed here, written down with the layers that they are made of.

torchvision: no CPU build fits the tested PyTorch; big_vision and Google's code are no packages.
Their models are written down with layers of PyTorch and Flax, whose names and shapes decide.
"""

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import interop
from vit_jax.weights import files


def torchvision_logits(given, path, images):
    """Of torchvision's VisionTransformer, whose attention is PyTorch's own layer."""
    torch = interop.require('torch')
    functional = torch.nn.functional
    state = {name: torch.tensor(x) for name, x in files.read(path)[0].items()}

    def linear(name, x):
        return functional.linear(x, state[f'{name}.weight'], state[f'{name}.bias'])

    def norm(name, x):
        return functional.layer_norm(x, x.shape[-1:], state[f'{name}.weight'],
                                     state[f'{name}.bias'], eps=1e-6)

    kernel = state['conv_proj.weight']
    x = functional.conv2d(torch.from_numpy(images).permute(0, 3, 1, 2), kernel,
                          state['conv_proj.bias'], kernel.shape[2:])
    x = torch.cat([state['class_token'].expand(len(x), -1, -1), x.flatten(2).mT], dim=1)
    x = x + state['encoder.pos_embedding']
    for i in range(given.model['num_layers']):
        layer = f'encoder.layers.encoder_layer_{i}'
        attention = torch.nn.MultiheadAttention(x.shape[-1], given.model['num_heads'],
                                                batch_first=True)
        prefix = f'{layer}.self_attention.'
        attention.load_state_dict({n.removeprefix(prefix): y for n, y in state.items()
                                   if n.startswith(prefix)}, strict=True)
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
    """Flax numbers its layers, which gives the names of the newer generation."""

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
    """big_vision's model: positions are added before the class token joins; or Google's: after."""

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
        x = {'cls': lambda x: x[:, 0], 'gap': lambda x: x.mean(1),
             'map': lambda x: Pool(name='MAPHead_0')(x, *sizes)}[f['pool']](x)
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
    if not big_vision:  # the names in the files are the older ones; Flax gives the newer
        arrays = {name.replace('Attention_1', 'Attention_0').replace('LayerNorm_2', 'LayerNorm_1')
                  .replace('MlpBlock_3', 'MlpBlock_0'): x for name, x in arrays.items()}
    params = flax.traverse_util.unflatten_dict(arrays, sep='/')
    model = Described(given.model, given.num_classes, big_vision)
    expected = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
    return np.asarray(jax.jit(model.apply)({'params': params}, images))


LOGITS = {'torchvision': torchvision_logits, 'big_vision': big_vision_logits,
          'google': google_logits}
