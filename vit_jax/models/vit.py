"""The Vision Transformer (arXiv 2010.11929, section 3.1, equations 1 to 4) and its variants."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import fields as fields_lib
from vit_jax.errors import UserError
from vit_jax.fields import RATE, SIDES, SWITCH, number, one_of, whole
from vit_jax.models import blocks, resnet
from vit_jax.models.backends.backend import Backend
from vit_jax.models.encoder import AttentionPool, AxialBlock, BlockFields
from vit_jax.models.position import Position
from vit_jax.models.stack import RematPolicy, Unroll, check_images, remat, stack

# Of the call of a block, in which the module itself is argument 0: train, return_intermediates.
STATIC_ARGUMENTS = (4, 5)


class ViT(nn.Module):
    """Images to logits; `config.model` has these fields and those of `fields` side by side."""

    # An image has the same logits at every place of a batch, and in every batch.
    rows_are_independent = True

    num_classes: int  # 0: without the last layer of the head
    patch_size: Annotated[
        tuple[int, ...], SIDES, 'in pixels; in a hybrid in points of its feature map'
    ]
    num_layers: Annotated[int, whole(1), 'transformer blocks']
    fields: BlockFields  # of all blocks
    resnet: dict | None = None  # fields of resnet.Backbone: a hybrid (section 3.1)
    attention: Annotated[
        str, one_of('full', 'axial'), 'to all tokens, or along rows and columns (appendix D.6)'
    ] = 'full'
    pool: Annotated[
        str,
        one_of('cls', 'gap', 'map', 'none'),
        'class token; mean or attention of the patches; or every patch',
    ] = 'cls'
    num_registers: Annotated[
        int, whole(0), 'learned tokens before the patches, which no head reads (arXiv 2309.16588)'
    ] = 0
    stem_norm: Annotated[
        bool,
        SWITCH,
        'a LayerNorm of all tokens before the first layer, and no bias of patches, as in CLIP',
    ] = False
    norm_after_pool: Annotated[
        bool,
        SWITCH,
        'the last LayerNorm is of what the tokens are pooled '
        "to, not of each token, as timm's fc_norm",
    ] = False
    representation_size: Annotated[
        int, whole(0), 'of the hidden tanh layer of the head; 0: a single linear layer'
    ] = 0
    partial_patches: Annotated[
        str,
        one_of('refuse', 'drop'),
        'where patches do not tile an image; '
        'drop: pixels on the right and below, as Google does it',
    ] = 'refuse'
    stochastic_depth_rate: Annotated[
        float, RATE, "of the last layer's branches; linear in depth from 0"
    ] = 0.0
    head_bias_init: Annotated[
        float, number(-1e6, 1e6, earlier=number()), 'first value of the biases of the head'
    ] = 0.0
    unroll: Unroll = 0
    remat_policy: RematPolicy = 'auto'

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'batch height width channels'],
        train: bool = False,
        return_intermediates: bool = False,
        corrupt: Callable[[Array], Array] = lambda x: x,
    ):
        """Returns float32 logits: [batch, num_classes], [batch, patches, num_classes] for no pool.

        Tokens are the class token, if there is one, registers, and patches in row-major order.

        Args:
          train: dropout and stochastic depth act, with the PRNG key 'dropout'.
          return_intermediates: return (logits, dict), the logits being equal up to rounding, with
            embedded        [batch, tokens, hidden]: the input of the first layer;
            tokens          [layers, batch, tokens, hidden]: the output of each layer;
            attention       [layers, batch, heads, query, key] float32, or row_attention and
                            column_attention [layers, batch, lines, heads, query, key] (axial);
            encoded         [batch, tokens, hidden]: after the last LayerNorm;
            representation  [batch, hidden] (or every patch's): the input of the head.
          corrupt: what changes the embedded patches [batch, patches, hidden], see masked.py.

        The representation is also sown, in the collection 'intermediates', at no other cost.

        Raises UserError when patches do not tile the image, position embeddings do not fit it, or
        images are whole numbers or not a batch.
        """
        check_images(images)
        height, width = images.shape[1:3]
        grid = self.grid((height, width))
        block = self.fields
        backend = self.backend
        norm = functools.partial(backend.norm, dtype=block.dtype, epsilon=block.layer_norm_epsilon)
        x = self.after_prefix(corrupt(self.embed(images)))
        position = Position(
            block.position, block.position_at, grid, block.num_heads, self.prefix, name='position'
        )
        x, shared = position.at_stem(x)
        x = backend.dropout(block.dropout_rate)(x, train)
        if self.stem_norm:
            x = norm(name='stem_norm')(x)
        embedded = x
        x, per_layer = self.encode(x, grid, shared, train, return_intermediates)
        last_norm = norm(name='norm')
        encoded = last_norm(x)
        if self.norm_after_pool:
            representation = last_norm(self.pool_tokens(x))
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

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of whole patches; UserError, with sizes that fit, for other images."""
        patch, stride, what = as_pair(self.patch_size), 1, 'image_size'
        if self.resnet is not None:
            stride = resnet.stride(len(self.resnet['units']))
            what = f'the feature map (one point for {stride} pixels) of'
        size = tuple(-(-side // stride) for side in image_size)
        rows, columns = (i // p for i, p in zip(size, patch, strict=True))
        grid = (rows, columns)
        partial = any(i % p for i, p in zip(size, patch, strict=True))
        if 0 in grid or (partial and self.partial_patches == 'refuse'):
            nearest = dict.fromkeys(
                'x'.join(
                    str(max(1, n + (up and i % p > 0)) * p * stride)
                    for i, n, p in zip(size, grid, patch, strict=True)
                )
                for up in (0, 1)
            )
            raise UserError(
                f'{what} {size[0]}x{size[1]} is not divisible by patch_size {patch[0]}x{patch[1]}. '
                f'The nearest image size{"s are" if len(nearest) > 1 else " is"} '
                f'{" and ".join(nearest)}'
                + (
                    '.'
                    if 0 in grid
                    else '; with model.partial_patches drop the rest of the image is not used.'
                )
            )
        return grid

    def embed(self, images):
        """Equation 1: one linear projection per patch of the image or of a ResNet's features."""
        patch = as_pair(self.patch_size)
        if self.resnet is not None:
            images = resnet.Backbone(
                **self.resnet,
                dtype=self.fields.dtype,
                unroll=self.unroll,
                remat_policy=self.remat_policy,
                name='resnet',
            )(images)[-1]
        x = self.backend.patches(
            self.fields.hidden_size,
            patch,
            strides=patch,
            padding='VALID',
            dtype=self.fields.dtype,
            use_bias=not self.stem_norm,
            name='embedding',
        )(images)
        return x.reshape(x.shape[0], -1, self.fields.hidden_size)

    @property
    def backend(self) -> Backend:
        """How the model is computed, but for the ResNet of a hybrid."""
        return self.fields.backend

    def by_xla(self) -> 'ViT':
        """The same model, computed by XLA's own layers."""
        fields = dataclasses.replace(self.fields, attention_kernel='xla', linear_kernel='xla')
        return self.clone(fields=fields)

    @property
    def prefix(self) -> int:
        """Tokens before the patches: the class token, if there is one, and registers."""
        return (self.pool == 'cls') + self.num_registers

    def after_prefix(self, x):
        """All tokens, from the patches."""
        init, size, first = nn.initializers, self.fields.hidden_size, []
        if self.pool == 'cls':
            first.append(self.param('cls', init.zeros, (1, 1, size), jnp.float32))
        if self.num_registers:  # as DINOv2's code begins
            first.append(
                self.param(
                    'registers', init.normal(1e-6), (1, self.num_registers, size), jnp.float32
                )
            )
        return (
            jnp.concatenate(
                [*(jnp.tile(token.astype(x.dtype), (x.shape[0], 1, 1)) for token in first), x],
                axis=1,
            )
            if first
            else x
        )

    def encode(self, x, grid, shared, train, return_intermediates):
        """Equations 2 and 3 for every layer; parameters are stacked [num_layers, ...]."""
        length = x.shape[1]
        needs_all_outputs = return_intermediates or self.is_initializing()
        if not needs_all_outputs:
            x = self.backend.padded(x)
        if not needs_all_outputs and self.pool == 'cls' and self.fields.position != 'relative':
            return self.encode_class_token(x, length, grid, shared, train), {}
        blocks = self.layers(self.num_layers, grid, name='blocks')
        x, outputs = blocks(x, self.depth_rates, shared, train, return_intermediates)
        return x[:, :length], outputs

    def encode_class_token(self, x, length, grid, shared, train):
        """The class token alone after the last layer, which is all that the head reads.

        Of the last layer only that token is computed. It attends to all others.
        """
        variables = {'params': self.get_variable('params', 'blocks')}
        stacked, tree = jax.tree.flatten((variables, self.depth_rates))
        # Split, because the gradient of two slices would be the sum of two arrays of all layers.
        sizes = (self.num_layers - 1, 1) if self.num_layers > 1 else (1,)
        *first, last = zip(*(jax.lax.split(array, sizes) for array in stacked), strict=True)

        def apply(block, arrays, x):
            variables, depth_rates = tree.unflatten(arrays)
            rngs = {'dropout': self.make_rng('dropout')} if self.has_rng('dropout') else {}
            tokens, _ = block.apply(variables, x, depth_rates, shared, train, False, rngs=rngs)
            return tokens

        for arrays in first:
            x = apply(self.layers(self.num_layers - 1, grid, parent=None), arrays, x)
        block_class, layout = self.block_class(grid)
        block_class = remat(block_class, self.remat_policy, STATIC_ARGUMENTS)
        block = block_class(self.fields, *layout, wanted=1, parent=None)
        return apply(block, [array[0] for array in last], x[:, :length])

    def layers(self, count, grid, **options):
        """A module of `count` layers, one after the other."""
        block_class, layout = self.block_class(grid)
        # A loop begins with the same parameters, and compiles far faster.
        unroll = 1 if self.is_initializing() else self.unroll
        repeated = stack(
            block_class,
            count,
            unroll=unroll,
            remat_policy=self.remat_policy,
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            static_argnums=STATIC_ARGUMENTS,
        )
        return repeated(self.fields, *layout, **options)

    def block_class(self, grid):
        """The class of the layers, and its arguments after the fields."""
        if self.attention == 'axial':
            return AxialBlock, (grid,)
        return blocks.get(self.fields.block), (grid, self.prefix)

    @property
    def depth_rates(self) -> Float[Array, ' layers'] | None:
        """The rate of stochastic depth of each layer; None without it."""
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
        return AttentionPool(self.fields, name='pool')(x) if self.pool == 'map' else x

    def classify(self, x):
        """The head; in float32, because the loss is sensitive to it."""
        x = x.astype(jnp.float32)
        if self.representation_size:
            x = jnp.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
        if self.num_classes:
            x = nn.Dense(
                self.num_classes,
                kernel_init=nn.initializers.zeros,
                bias_init=nn.initializers.constant(self.head_bias_init),
                name='head',
            )(x)
        return x

    def check(self) -> None:
        """Raises UserError unless the fields fit together."""
        self.fields.check()
        fields_lib.check(
            fields_lib.declared(ViT),
            vars(self) | {'patch_size': as_pair(self.patch_size, 'model.patch_size')},
            'model.',
            recorded=True,
        )
        if self.attention == 'axial' and self.prefix:
            raise UserError(
                f'model.pool is {self.pool} and model.num_registers '
                f'{self.num_registers}, but a class token and registers have no row or '
                'column for axial attention: set model.pool to gap, map or none, and '
                'model.num_registers to 0.'
            )
        if self.attention == 'axial' and self.fields.block != 'sequential':
            raise UserError(
                f'model.block is {self.fields.block} and model.attention axial, whose blocks are '
                'sequential along rows and columns: set model.block to sequential.'
            )
        blocks.get(self.fields.block)
        if (self.attention, self.fields.position, self.fields.position_at) == (
            'axial',
            'relative',
            'shared',
        ):
            raise UserError(
                'model.position is relative, which cannot be shared in axial '
                'attention, where the lengths of rows and columns may differ: set '
                'model.position_at to every_layer.'
            )
        unfit = self.backend.unfit(vars(self.fields) | {'attention': self.attention})
        if unfit:
            raise UserError(
                f'model.attention_kernel is {self.fields.attention_kernel}, which does not compute '
                f'{", ".join(unfit)}. Change that, or take xla.'
            )
        if self.resnet is not None:
            resnet.check_backbone(self.resnet)
            if self.resnet['preactivation']:
                raise UserError(
                    'model.resnet.preactivation is True, which leaves the features '
                    'that a hybrid takes as patches without normalisation: set it to '
                    'False.'
                )


def as_pair(size, field: str = 'size') -> tuple[int, int]:
    """(height, width) of side, (side,) or (height, width); raises UserError for anything else."""
    sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) not in (1, 2) or not all(isinstance(s, int) and s > 0 for s in sides):
        raise UserError(
            f'{field} {size!r}: expected one positive integer, or height and width, '
            'as in 224 or 224,160.'
        )
    return (sides[0], sides[-1])
