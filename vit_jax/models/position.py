"""Position embeddings: what tells a token where its patch was (ViT appendix D.4, table 8)."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError

# Where each kind can act: it is added to the tokens once, at the stem, or in every layer, which has
# its own parameters ('every_layer') or those of all layers ('shared'). A relative embedding acts
# inside the attention of every layer; the paper's, which it lists under 'stem', is taken to have
# parameters in each.
ALL_PLACES = ('stem', 'every_layer', 'shared')
PLACES = {
    'none': ('stem',),
    'learned_1d': ALL_PLACES,
    'learned_2d': ALL_PLACES,
    'sincos_2d': ALL_PLACES,
    'relative': ('every_layer', 'shared'),
}


class Position(nn.Module):
    """Makes a position embedding and applies it, at the stem and in every layer.

    What precedes the patches, a class token and registers, has an embedding of its own in
    'learned_1d' and takes part in 'relative' as the first of the sequence; it has no coordinates
    and so no embedding in the 2-D kinds.
    """

    kind: str  # a key of PLACES
    place: str  # one of PLACES[kind]
    grid: tuple[int, int]  # (rows, columns) of patches
    num_heads: int  # for 'relative'
    prefix: int = 0  # tokens that precede the patches
    stddev: float = 0.02  # of the learned kinds at first

    def at_stem(self, x: Float[Array, 'batch tokens hidden']):
        """Returns the tokens for the first layer, and the embedding that all layers share or None.

        Raises UserError when the parameters were made for another number of tokens; the 1-D kinds
        do not notice another grid with as many tokens.
        """
        if self.kind == 'none' or self.place == 'every_layer':
            return x, None
        embedding = self.embedding(x.shape[-1])
        return (x, embedding) if self.place == 'shared' else (_add(x, embedding), None)

    def in_layer(self, x: Float[Array, 'batch tokens hidden'], shared: Array | None):
        """Returns the tokens of a layer, and the table for relative_logits or None.

        `shared` is the embedding that at_stem has returned.
        """
        if self.place == 'stem':
            return x, None
        embedding = self.embedding(x.shape[-1]) if shared is None else shared
        return (x, embedding) if self.kind == 'relative' else (_add(x, embedding), None)

    @nn.compact
    def embedding(self, hidden_size: int) -> Float[Array, '...']:
        """[1, tokens, hidden_size] to be added to the tokens; 'relative': see relative_logits."""
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
        """A parameter whose shape depends on the grid."""
        found = self.get_variable('params', name)
        if found is not None and found.shape != shape:
            raise UserError(
                f'the position embedding ({self.kind}, {name}) was made with shape {found.shape} '
                f'and these {self.grid[0]}x{self.grid[1]} patches need {shape}. Use images of the '
                'size that the parameters were trained on, or resize the embedding first.'
            )
        return self.param(name, nn.initializers.normal(self.stddev), shape, jnp.float32)


def _add(x, embedding):
    """Tokens that only fill up, see Backend.padded, have no position."""
    if more := x.shape[1] - embedding.shape[1]:
        embedding = jnp.pad(embedding, ((0, 0), (0, more), (0, 0)))
    return x + embedding.astype(x.dtype)


def sincos_2d(grid: tuple[int, int], hidden_size: int) -> np.ndarray:
    """Fixed embedding [rows, columns, hidden_size] float32 of Plain ViT (arXiv 2205.01580).

    A quarter of the features each for sine and cosine of x, then of y, in wavelengths that grow
    geometrically from 2 pi to 20,000 pi.
    """
    quarter = hidden_size // 4
    frequency = 10_000.0 ** -(np.arange(quarter) / max(quarter - 1, 1))
    y, x = (i[..., None] * frequency for i in np.mgrid[: grid[0], : grid[1]])
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], -1).astype(np.float32)


def relative_logits(
    query: Float[Array, 'batch tokens heads head_dim'],
    table: Float[Array, 'offsets heads head_dim'],
) -> Float[Array, 'batch heads tokens tokens']:
    """What relative positions add to the attention logits, scaled as those are; float32.

    The embedding of the offset between query q and key k, row k - q + tokens - 1 of `table`, takes
    the place of a key (appendix D.4).
    """
    batch, tokens, heads, head_dim = query.shape
    x = jnp.einsum(
        'bqhd,rhd->bhqr', query, table.astype(query.dtype), preferred_element_type=jnp.float32
    ) / np.sqrt(head_dim)
    # Row q is wanted from its entry tokens - 1 - q onwards. With rows padded to length 2 tokens,
    # that entry lies at tokens - 1 + q (2 tokens - 1) of the flat array. So the first tokens - 1
    # entries are dropped, and the rest is cut into rows of 2 tokens - 1: a gather is slow on TPUs.
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    x = x[:, :, tokens - 1 : -1].reshape(batch, heads, tokens, 2 * tokens - 1)
    return x[..., :tokens]


def check(kind: str, place: str, hidden_size: int) -> None:
    """Raises UserError unless model.position and model.position_at fit each other and the size."""
    if place not in PLACES[kind]:
        raise UserError(
            f'model.position {kind} cannot act at model.position_at {place}: set '
            f'model.position_at to {" or ".join(PLACES[kind])}.'
        )
    divisor = {'learned_2d': 2, 'sincos_2d': 4}.get(kind, 1)
    if hidden_size % divisor:
        raise UserError(
            f'model.hidden_size {hidden_size} is not divisible by {divisor}, which '
            f'model.position {kind} needs.'
        )
