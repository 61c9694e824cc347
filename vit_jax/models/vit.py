"""The Vision Transformer (arXiv 2010.11929, section 3.1, equations 1 to 4) and its variants."""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.models import resnet
from vit_jax.models.encoder import AttentionPool, AxialBlock, EncoderBlock
from vit_jax.models.position import Position
from vit_jax.models.stack import stack


class ViT(nn.Module):
    """Images to logits. Attributes are the fields of `config.model`."""

    num_classes: int  # 0: no last layer of the head, what stands before it
    patch_size: tuple[int, ...]  # (height, width); of the feature map in a hybrid
    hidden_size: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    resnet: dict | None = None  # fields of resnet.Backbone: a hybrid (section 3.1)
    attention: str = 'full'  # | 'axial' (appendix D.6)
    position: str = 'learned_1d'  # | 'none' | 'learned_2d' | 'sincos_2d' | 'relative' (table 8)
    position_at: str = 'stem'  # | 'every_layer' | 'shared' by all layers
    pool: str = 'cls'  # class token | 'gap': mean | 'map': attention | 'none': every token
    representation_size: int = 0  # hidden tanh layer of the head; 0: a single linear layer
    dropout_rate: float = 0.0  # after the embedding and each dense layer of a block but q, k, v
    attention_dropout_rate: float = 0.0  # of attention weights in the blocks
    stochastic_depth_rate: float = 0.0  # of the last layer's branches; linear in depth from 0
    layer_scale_init: float = 0.0  # of learned factors of residual branches; 0: none
    gelu: str = 'tanh'  # as in Google's code | 'erf' as in timm and Hugging Face
    layer_norm_epsilon: float = 1e-6
    head_bias_init: float = 0.0
    dtype: str = 'float32'  # | 'bfloat16': of the computation; parameters are float32
    unroll: int = 1  # layers compiled side by side in the scan over layers; num_layers: no loop
    remat_policy: str = 'none'  # what the backward pass recomputes, see stack.REMAT_POLICIES

    @nn.compact
    def __call__(self, images: Float[Array, 'batch height width channels'], train: bool = False,
                 return_intermediates: bool = False):
        """Returns float32 logits: [batch, num_classes], [batch, tokens, num_classes] for no pool.

        Tokens are patches in row-major order, after the class token where there is one.

        Args:
          train: dropout and stochastic depth act, with the PRNG key 'dropout'.
          return_intermediates: return (logits, dict), the logits being equal up to rounding, with
            embedded        [batch, tokens, hidden]: what the first layer gets;
            tokens          [layers, batch, tokens, hidden]: what each layer gives;
            attention       [layers, batch, heads, query, key] float32; in an axial model
                            row_attention and column_attention
                            [layers, batch, rows or columns, heads, query, key] instead;
            encoded         [batch, tokens, hidden]: after the last LayerNorm;
            representation  [batch, hidden] (or every token's): what the head gets.

        Raises:
          UserError: an image side is not a multiple of the patch's, or the position embedding was
            made for another number of patches.
        """
        grid = self.grid(images.shape[1:3])
        x = self.embed(images)
        if self.pool == 'cls':
            cls = self.param('cls', nn.initializers.zeros, (1, 1, self.hidden_size))
            x = jnp.concatenate([jnp.tile(cls.astype(x.dtype), (x.shape[0], 1, 1)), x], axis=1)
        embedding = None
        if self.position != 'none' and self.position_at != 'every_layer':
            embedding = Position(self.position, grid, self.pool == 'cls', self.num_heads,
                                name='position')(self.hidden_size)
        if self.position_at == 'stem' and embedding is not None:
            x, embedding = x + embedding.astype(x.dtype), None
        x = embedded = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x, per_layer = self.encode(x, grid, embedding, train, return_intermediates)
        encoded = nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name='norm')(x)
        representation = self.pool_tokens(encoded)
        logits = self.classify(representation)
        if not return_intermediates:
            return logits
        return logits, {'embedded': embedded, **per_layer, 'encoded': encoded,
                        'representation': representation}

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches; raises UserError when patches do not tile the image."""
        patch = as_pair(self.patch_size)
        if self.resnet is None:
            check_divisible(image_size, patch)
            return image_size[0] // patch[0], image_size[1] // patch[1]
        num_stages = len(self.resnet['units'])
        features = resnet.feature_grid(image_size, num_stages)
        check_divisible(features, patch, resnet.stride(num_stages))
        return features[0] // patch[0], features[1] // patch[1]

    def embed(self, images):
        """Equation 1: one linear projection per patch of the image or of a ResNet's features."""
        patch = as_pair(self.patch_size)
        if self.resnet is not None:
            images = resnet.Backbone(**self.resnet, dtype=self.dtype, unroll=self.unroll,
                                     remat_policy=self.remat_policy, name='resnet')(images)[-1]
        x = nn.Conv(self.hidden_size, patch, strides=patch, padding='VALID', dtype=self.dtype,
                    name='embedding')(images)
        return x.reshape(x.shape[0], -1, self.hidden_size)

    def encode(self, x, grid, embedding, train, return_intermediates):
        """Equations 2 and 3 for every layer; parameters are stacked [num_layers, ...]."""
        fields = {name: getattr(self, name) for name in (
            'mlp_dim', 'num_heads', 'dropout_rate', 'attention_dropout_rate', 'layer_scale_init',
            'gelu', 'layer_norm_epsilon', 'dtype')}
        where = dict(position=self.position, position_at=self.position_at, grid=grid)
        if self.attention == 'axial':
            block, fields = AxialBlock, {'make_block': functools.partial(EncoderBlock, **fields)}
        else:
            block, where['class_token'] = EncoderBlock, self.pool == 'cls'
        blocks = stack(block, self.num_layers, unroll=self.unroll, remat_policy=self.remat_policy,
                       in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
                       static_argnums=(4, 5))
        rates = None
        if self.stochastic_depth_rate:
            rates = jnp.linspace(0, self.stochastic_depth_rate, self.num_layers)
        return blocks(**fields, **where, name='blocks')(x, rates, embedding, train,
                                                        return_intermediates)

    def pool_tokens(self, x):
        """Equation 4, or one of its alternatives (appendix D.3)."""
        if self.pool == 'cls':
            return x[:, 0]
        if self.pool == 'gap':
            return x.mean(axis=1, dtype=jnp.float32)
        if self.pool == 'map':
            return AttentionPool(self.mlp_dim, self.num_heads, self.gelu, self.layer_norm_epsilon,
                                 self.dtype, name='pool')(x)
        return x

    def classify(self, x):
        """The head; in float32, because the loss is sensitive to it."""
        x = x.astype(jnp.float32)
        if self.representation_size:
            x = jnp.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
        if self.num_classes:
            x = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros,
                         bias_init=nn.initializers.constant(self.head_bias_init), name='head')(x)
        return x


def as_pair(size, field: str = 'size') -> tuple[int, int]:
    """(height, width) of a size given as an int, (side,) or (height, width); int means square.

    Raises UserError when it is none of these.
    """
    sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) not in (1, 2) or not all(isinstance(s, int) and s > 0 for s in sides):
        raise UserError(f'{field} {size!r}: expected one positive integer, or height and width, '
                        'as in 224 or 224,160.')
    return (sides[0], sides[-1])


def check_divisible(size: tuple[int, int], patch_size: tuple[int, int], stride: int = 1) -> None:
    """Raises UserError, with the nearest image sizes that fit, unless patches tile the image.

    Args:
      size: of the image, or of the feature map that has one point for `stride` pixels.
    """
    if all(i and i % p == 0 for i, p in zip(size, patch_size, strict=True)):
        return
    smaller, larger = (
        'x'.join(str(max(1, i // p + up) * p * stride)
                 for i, p in zip(size, patch_size, strict=True)) for up in (0, 1))
    what = 'image_size' if stride == 1 else f'the feature map (one point for {stride} pixels) of'
    raise UserError(
        f'{what} {size[0]}x{size[1]} is not divisible by patch_size {patch_size[0]}x'
        f'{patch_size[1]}. The nearest image sizes are {smaller} and {larger}.')
