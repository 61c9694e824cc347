"""The Vision Transformer (arXiv 2010.11929, section 3.1, equations 1 to 4) and its variants."""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.fields import RATE, SIDES, SWITCH, number, one_of, whole
from vit_jax.models import blocks, class_token, compatibility, resnet
from vit_jax.models.backends.backend import Backend
from vit_jax.models.block_fields import BlockFields
from vit_jax.models.encoder import AttentionPool, AxialBlock
from vit_jax.models.patch_grid import as_pair, whole_patches
from vit_jax.models.position import Position
from vit_jax.models.stack import RematPolicy, Unroll, check_images, remat, stack

# Python values among the arguments of a block, whose argument 0 is the module itself: train and
# return_intermediates.
STATIC_ARGUMENTS = (4, 5)


class ViT(nn.Module):
    """Maps images to logits by a Vision Transformer.

    The fields of this class and of `fields` are the fields of `config.model`.
    """

    # The logits of an image do not depend on the other images of its batch.
    rows_are_independent = True

    num_classes: int  # 0: the head has no last layer
    patch_size: Annotated[
        tuple[int, ...],
        SIDES,
        'height and width of a patch, in pixels; in a hybrid, in points of the feature map',
    ]
    num_layers: Annotated[int, whole(1), 'number of transformer blocks']
    fields: BlockFields  # shared by all blocks
    resnet: dict | None = None  # fields of resnet.Backbone: a hybrid (section 3.1)
    attention: Annotated[
        str,
        one_of('full', 'axial'),
        'full: each token attends to all tokens; axial: along rows and columns (appendix D.6)',
    ] = 'full'
    pool: Annotated[
        str,
        one_of('cls', 'gap', 'map', 'none'),
        'input of the head: cls: the class token; gap: the mean of the patches; map: attention '
        'pooling; none: every patch',
    ] = 'cls'
    num_registers: Annotated[
        int,
        whole(0),
        'number of learned tokens before the patches that the head ignores (arXiv 2309.16588)',
    ] = 0
    stem_norm: Annotated[
        bool,
        SWITCH,
        'a LayerNorm before the first layer and no bias in the patch embedding, like CLIP',
    ] = False
    norm_after_pool: Annotated[
        bool,
        SWITCH,
        "apply the last LayerNorm after pooling instead of before it, like timm's fc_norm",
    ] = False
    representation_size: Annotated[
        int, whole(0), 'size of the hidden tanh layer of the head; 0: no hidden layer'
    ] = 0
    partial_patches: Annotated[
        str,
        one_of('refuse', 'drop'),
        'images whose size is not a multiple of the patch size: refuse: an error; drop: ignore '
        "the pixels left over on the right and at the bottom, like Google's code",
    ] = 'refuse'
    stochastic_depth_rate: Annotated[
        float, RATE, 'stochastic depth rate of the last layer; the rate rises linearly from 0'
    ] = 0.0
    head_bias_init: Annotated[
        float, number(-1e6, 1e6, earlier=number()), "initial value of the head's biases"
    ] = 0.0
    unroll: Unroll = 0
    remat_policy: RematPolicy = 'auto'

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'batch height width channels'],
        train: bool = False,
        return_intermediates: bool = False,
        corrupt: Callable[[Array], Array] = lambda patches: patches,
    ):
        """Computes float32 logits.

        The tokens are the class token if there is one, the registers, and the patches in row-major
        order. The representation is also sown in the collection 'intermediates'.

        Args:
          images: normalised pixels.
          train: enables dropout and stochastic depth, which need the PRNG key 'dropout'.
          return_intermediates: also return a dict of intermediate values.
          corrupt: maps the embedded patches [batch, patches, hidden] to embeddings of the same
            shape, see masked.py.

        Returns:
          Logits [batch, num_classes], or [batch, patches, num_classes] if `pool` is 'none'. With
          `return_intermediates` a tuple (logits, dict), whose logits are equal up to rounding:
            embedded        [batch, tokens, hidden]: the input of the first layer;
            tokens          [layers, batch, tokens, hidden]: the output of each layer;
            attention       [layers, batch, heads, query, key] float32; an axial model has
                            row_attention and column_attention instead, both
                            [layers, batch, lines, heads, query, key];
            encoded         [batch, tokens, hidden]: the output of the last LayerNorm;
            representation  [batch, hidden], or one for every patch: the input of the head.

        Raises:
          UserError: the patches do not tile the image, the position embedding has another size, or
            `images` is not a batch of floating-point images.
        """
        check_images(images)
        height, width = images.shape[1:3]
        grid = self.grid((height, width))

        # Equation 1: z_0 = [x_class; x_1 E; ...; x_N E] + E_pos
        x = corrupt(self.embed(images))
        x = self.prepend_tokens(x)
        x, shared_position = self.position_embedding(grid).at_stem(x)
        x = self.backend.dropout(self.fields.dropout_rate)(x, train)
        if self.stem_norm:
            x = self.layer_norm('stem_norm')(x)
        embedded = x

        # Equations 2 and 3, for l = 1 ... L:
        # z'_l = MSA(LN(z_{l-1})) + z_{l-1}
        # z_l = MLP(LN(z'_l)) + z'_l
        x, per_layer = self.encode(x, grid, shared_position, train, return_intermediates)

        # Equation 4: y = LN(z_L^0)
        norm = self.layer_norm('norm')
        encoded = norm(x)
        if self.norm_after_pool:
            representation = norm(self.pool_tokens(x))
        else:
            representation = self.pool_tokens(encoded)

        self.sow('intermediates', 'representation', representation)
        logits = self.classify(representation)
        if not return_intermediates:
            return logits
        return logits, {
            'embedded': embedded,
            **per_layer,
            'encoded': encoded,
            'representation': representation,
        }

    def embed(self, images):
        """Equation 1: one linear projection per patch of the image or of a ResNet's features."""
        if self.resnet is not None:
            backbone = resnet.Backbone(
                **self.resnet,
                dtype=self.fields.dtype,
                unroll=self.unroll,
                remat_policy=self.remat_policy,
                name='resnet',
            )
            images = backbone(images)[-1]
        patch_size = as_pair(self.patch_size)
        embedding = self.backend.patches(
            self.fields.hidden_size,
            patch_size,
            strides=patch_size,
            padding='VALID',
            dtype=self.fields.dtype,
            use_bias=not self.stem_norm,
            name='embedding',
        )
        x = embedding(images)
        return x.reshape(x.shape[0], -1, self.fields.hidden_size)

    def prepend_tokens(self, patches):
        """Equation 1: the class token and the registers, before the patches."""
        shape = (1, 1, self.fields.hidden_size)
        tokens = []
        if self.pool == 'cls':
            tokens.append(self.param('cls', nn.initializers.zeros, shape, jnp.float32))
        if self.num_registers:
            shape = (1, self.num_registers, self.fields.hidden_size)
            init = nn.initializers.normal(1e-6)  # as in DINOv2
            tokens.append(self.param('registers', init, shape, jnp.float32))
        if not tokens:
            return patches
        batch = patches.shape[0]
        tokens = [jnp.tile(token.astype(patches.dtype), (batch, 1, 1)) for token in tokens]
        return jnp.concatenate([*tokens, patches], axis=1)

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: the class token, if there is one, and registers."""
        if self.pool == 'cls':
            return 1 + self.num_registers
        return self.num_registers

    def position_embedding(self, grid):
        """Equation 1: the position embedding, where the stem uses it."""
        return Position(
            self.fields.position,
            self.fields.position_at,
            grid,
            self.fields.num_heads,
            self.prefix,
            name='position',
        )

    def layer_norm(self, name):
        """Makes a LayerNorm outside of the blocks."""
        return self.backend.norm(
            dtype=self.fields.dtype, epsilon=self.fields.layer_norm_epsilon, name=name
        )

    def encode(self, x, grid, shared_position, train, return_intermediates):
        """Equations 2 and 3 for every layer; parameters are stacked [num_layers, ...]."""
        num_tokens = x.shape[1]
        if return_intermediates or self.is_initializing():
            layers = self.layers(self.num_layers, grid, name='blocks')
            return layers(x, self.depth_rates, shared_position, train, return_intermediates)
        x = self.backend.padded(x)
        if self.pool == 'cls' and self.fields.position != 'relative':
            return class_token.encode(self, x, num_tokens, grid, shared_position, train), {}
        layers = self.layers(self.num_layers, grid, name='blocks')
        x, per_layer = layers(x, self.depth_rates, shared_position, train, return_intermediates)
        return x[:, :num_tokens], per_layer

    def layers(self, count, grid, **options):
        """Makes a module of `count` consecutive layers."""
        block_class, arguments = self.block_class(grid)
        # During initialisation a loop creates the same parameters and compiles far faster.
        unroll = 1 if self.is_initializing() else self.unroll
        layers = stack(
            block_class,
            count,
            unroll=unroll,
            remat_policy=self.remat_policy,
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            static_argnums=STATIC_ARGUMENTS,
        )
        return layers(self.fields, *arguments, **options)

    def last_layer(self, grid, num_queries):
        """Makes one layer that returns only the first `num_queries` tokens."""
        block_class, arguments = self.block_class(grid)
        block_class = remat(block_class, self.remat_policy, STATIC_ARGUMENTS)
        return block_class(self.fields, *arguments, num_queries=num_queries, parent=None)

    def block_class(self, grid):
        """Returns the class of the layers, and its arguments after the fields."""
        if self.attention == 'axial':
            return AxialBlock, (grid,)
        return blocks.get(self.fields.block), (grid, self.prefix)

    @property
    def depth_rates(self) -> Float[Array, ' layers'] | None:
        """The stochastic depth rate of each layer; None if stochastic depth is off."""
        if not self.stochastic_depth_rate:
            return None
        return jnp.linspace(0, self.stochastic_depth_rate, self.num_layers)

    def pool_tokens(self, x):
        """Equation 4, or one of its alternatives (appendix D.3)."""
        if self.pool == 'cls':
            return x[:, 0]
        if self.num_registers:
            x = x[:, self.num_registers :]
        if self.pool == 'gap':
            return x.mean(axis=1, dtype=jnp.float32)
        if self.pool == 'map':
            return AttentionPool(self.fields, name='pool')(x)
        return x

    def classify(self, x):
        """Applies the head in float32, because the loss is sensitive to its rounding."""
        x = x.astype(jnp.float32)
        if self.representation_size:
            x = jnp.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
        if not self.num_classes:
            return x
        head = nn.Dense(
            self.num_classes,
            kernel_init=nn.initializers.zeros,
            bias_init=nn.initializers.constant(self.head_bias_init),
            name='head',
        )
        return head(x)

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Returns the (rows, columns) of patches of an image of (height, width) pixels.

        Raises:
          UserError: the patches do not tile the image; the message names the nearest sizes.
        """
        stride = 1
        if self.resnet is not None:
            stride = resnet.stride(len(self.resnet['units']))
        drop_partial = self.partial_patches == 'drop'
        return whole_patches(image_size, as_pair(self.patch_size), stride, drop_partial)

    @property
    def backend(self) -> Backend:
        """The implementation of all layers except the ResNet of a hybrid."""
        return self.fields.backend

    def by_xla(self) -> 'ViT':
        """Returns the same model, computed by XLA's own layers."""
        fields = dataclasses.replace(self.fields, attention_kernel='xla', linear_kernel='xla')
        return self.clone(fields=fields)

    def check(self) -> None:
        """Raises UserError unless the fields fit together."""
        compatibility.check(self)
