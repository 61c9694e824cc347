"""Position embeddings (ViT appendix D.4, table 8)."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError

# Which layers can use each kind: 'stem' adds it to the tokens once, before the first layer;
# 'every_layer' has an embedding for each layer; 'shared' has one embedding that every layer uses. A
# relative embedding acts inside the attention of every layer. The paper lists it under 'stem' and
# does not say whether layers share it.
ALL_PLACES = ('stem', 'every_layer', 'shared')
PLACES = {
    'none': ('stem',),
    'learned_1d': ALL_PLACES,
    'learned_2d': ALL_PLACES,
    'sincos_2d': ALL_PLACES,
    'relative': ('every_layer', 'shared'),
}


class Position(nn.Module):
    """A position embedding, used at the stem or in every layer.

    The tokens before the patches (class token and registers) have learned embeddings in
    'learned_1d', and are the first tokens of the sequence in 'relative'. In the 2-D kinds these
    tokens have no embedding, because they have no coordinates.
    """

    kind: str  # a key of PLACES
    place: str  # one of PLACES[kind]
    grid: tuple[int, int]  # (rows, columns) of patches
    num_heads: int  # for 'relative'
    prefix: int = 0  # number of tokens before the patches
    stddev: float = 0.02  # of the initial values of the learned kinds

    def at_stem(self, x: Float[Array, 'batch tokens hidden']):
        """Returns the input of the first layer, and the embedding that all layers share or None.

        Raises:
          UserError: the parameters were made for another number of tokens. The 1-D kinds cannot
            distinguish two grids with the same number of tokens.
        """
        if self.kind == 'none' or self.place == 'every_layer':
            return x, None
        embedding = self.embedding(x.shape[-1])
        if self.place == 'shared':
            return x, embedding
        return _add(x, embedding), None

    def in_layer(self, x: Float[Array, 'batch tokens hidden'], shared: Array | None):
        """Returns the tokens of a layer, and the table for relative_logits or None.

        Args:
          x: the output of the layer before.
          shared: the embedding that at_stem returned.
        """
        if self.place == 'stem':
            return x, None
        embedding = shared
        if embedding is None:
            embedding = self.embedding(x.shape[-1])
        if self.kind == 'relative':
            return x, embedding
        return _add(x, embedding), None

    @nn.compact
    def embedding(self, hidden_size: int) -> Float[Array, '...']:
        """Returns an embedding [1, tokens, hidden_size] to add, or a table for relative_logits."""
        rows, columns = self.grid
        tokens = rows * columns + self.prefix
        if self.kind == 'relative':
            return self.learned(
                'relative', (2 * tokens - 1, self.num_heads, hidden_size // self.num_heads)
            )
        if self.kind == 'learned_1d':
            return self.learned('embedding', (1, tokens, hidden_size))
        if self.kind == 'learned_2d':
            row = self.learned('row', (rows, 1, hidden_size // 2))
            column = self.learned('column', (1, columns, hidden_size // 2))
            grid = jnp.concatenate(jnp.broadcast_arrays(row, column), axis=-1)
        else:
            grid = jnp.asarray(sincos_2d(self.grid, hidden_size))
        patches = grid.reshape(1, rows * columns, hidden_size)
        return jnp.pad(patches, ((0, 0), (self.prefix, 0), (0, 0)))

    def learned(self, name, shape):
        """Makes a learned parameter whose shape depends on the grid."""
        current = self.get_variable('params', name)
        if current is not None and current.shape != shape:
            raise UserError(
                f'the position embedding ({self.kind}, {name}) was made with shape {current.shape} '
                f'and these {self.grid[0]}x{self.grid[1]} patches need {shape}. Use images of the '
                'size that the parameters were trained on, or resize the embedding first.',
                kind='value',
                field='images',
                value=self.grid,
            )
        return self.param(name, nn.initializers.normal(self.stddev), shape, jnp.float32)


def _add(x, embedding):
    """Returns x + embedding; the tokens that Backend.padded adds get no position."""
    num_padding_tokens = x.shape[1] - embedding.shape[1]
    if num_padding_tokens:
        embedding = jnp.pad(embedding, ((0, 0), (0, num_padding_tokens), (0, 0)))
    return x + embedding.astype(x.dtype)


def sincos_2d(grid: tuple[int, int], hidden_size: int) -> np.ndarray:
    """Returns the fixed embedding [rows, columns, hidden_size] of Plain ViT (arXiv 2205.01580).

    The quarters of its features are the sine of x, cosine of x, sine of y and cosine of y, in
    wavelengths that grow geometrically from 2 pi to 20,000 pi. The dtype is float32.
    """
    quarter = hidden_size // 4
    frequency = 10_000.0 ** -(np.arange(quarter) / max(quarter - 1, 1))
    rows, columns = np.mgrid[: grid[0], : grid[1]]
    y = rows[..., None] * frequency
    x = columns[..., None] * frequency
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], -1).astype(np.float32)


def relative_logits(
    query: Float[Array, 'batch tokens heads head_dim'],
    table: Float[Array, 'offsets heads head_dim'],
) -> Float[Array, 'batch heads tokens tokens']:
    """Returns the float32 numbers that relative positions add to the attention logits.

    The embedding of the offset between query q and key k is row k - q + tokens - 1 of `table`. Its
    product with the query is scaled like the product of query and key (appendix D.4).
    """
    batch, tokens, heads, head_dim = query.shape
    x = jnp.einsum(
        'bqhd,rhd->bhqr', query, table.astype(query.dtype), preferred_element_type=jnp.float32
    ) / np.sqrt(head_dim)
    # The result needs row q from its entry tokens - 1 - q on. With rows padded to length 2 tokens,
    # that entry is at tokens - 1 + q (2 tokens - 1) of the flat array. Dropping the first
    # tokens - 1 entries and cutting the rest into rows of 2 tokens - 1 aligns all rows. A gather
    # would be slow on TPUs.
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    x = x[:, :, tokens - 1 : -1].reshape(batch, heads, tokens, 2 * tokens - 1)
    return x[..., :tokens]


def check(kind: str, place: str, hidden_size: int) -> None:
    """Raises UserError unless the fields position, position_at and hidden_size fit together."""
    if place not in PLACES[kind]:
        raise UserError(
            f'model.position_at is {place}: expected {" or ".join(PLACES[kind])}, because '
            f'model.position is {kind}.',
            kind='value',
            field='model.position_at',
            value=place,
        )
    divisor = {'learned_2d': 2, 'sincos_2d': 4}.get(kind, 1)
    if hidden_size % divisor:
        raise UserError(
            f'model.hidden_size is {hidden_size}: expected a multiple of {divisor}, because '
            f'model.position is {kind}.',
            kind='value',
            field='model.hidden_size',
            value=hidden_size,
        )
