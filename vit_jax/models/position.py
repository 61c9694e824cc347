"""Position embeddings: what tells a token where its patch was (ViT appendix D.4, table 8)."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError, check_choice

# Where each kind can act: added to the tokens once at the stem, or in every layer, with its own
# parameters or with shared ones. A relative embedding acts inside the attention of every layer;
# the paper's, which it lists under 'stem', is taken to have parameters in each (every_layer).
PLACES = {
    'none': ('stem',),
    'learned_1d': ('stem', 'every_layer', 'shared'),
    'learned_2d': ('stem', 'every_layer', 'shared'),
    'sincos_2d': ('stem', 'every_layer', 'shared'),
    'relative': ('every_layer', 'shared'),
}


class Position(nn.Module):
    """The embedding of every token, or, for 'relative', of every offset between two tokens.

    Attributes:
      kind: a key of PLACES except 'none'.
      grid: (rows, columns) of patches.
      class_token: whether a class token stands before them. It has an embedding of its own in
        'learned_1d' and takes part in 'relative' as the first of the sequence; it has no
        coordinates and so none in the 2-D kinds.
      num_heads: for 'relative'.
    """

    kind: str
    grid: tuple[int, int]
    class_token: bool
    num_heads: int

    @nn.compact
    def __call__(self, hidden_size: int) -> Float[Array, '...']:
        """Returns [1, tokens, hidden_size] to be added; 'relative': see relative_logits.

        Raises UserError when the parameters were made for another number of tokens; a grid of
        another shape with as many tokens is not noticed in the 1-D kinds.
        """
        rows, columns = self.grid
        tokens = rows * columns + self.class_token
        if self.kind == 'relative':
            return self.learned('relative', (2 * tokens - 1, self.num_heads,
                                             hidden_size // self.num_heads))
        if self.kind == 'learned_1d':
            return self.learned('embedding', (1, tokens, hidden_size))
        if self.kind == 'learned_2d':
            row = self.learned('row', (rows, 1, hidden_size // 2))
            column = self.learned('column', (1, columns, hidden_size // 2))
            half = (rows, columns, hidden_size // 2)
            grid = jnp.concatenate([jnp.broadcast_to(row, half), jnp.broadcast_to(column, half)],
                                   axis=-1)
        else:
            grid = jnp.asarray(sincos_2d(self.grid, hidden_size))
        patches = grid.reshape(1, rows * columns, hidden_size)
        return jnp.pad(patches, ((0, 0), (int(self.class_token), 0), (0, 0)))

    def learned(self, name, shape):
        """A parameter whose shape depends on the grid."""
        if self.has_variable('params', name):
            known = self.get_variable('params', name).shape
            if known != shape:
                raise UserError(
                    f'the position embedding ({self.kind}, {name}) was made with shape {known} and '
                    f'these {self.grid[0]}x{self.grid[1]} patches need {shape}. Use '
                    'images of the size that the parameters were trained on, or resize the '
                    'embedding first.')
        return self.param(name, nn.initializers.normal(stddev=0.02), shape)


def sincos_2d(grid: tuple[int, int], hidden_size: int, temperature: float = 10_000.0
              ) -> np.ndarray:
    """Fixed embedding [rows, columns, hidden_size] float32 of Plain ViT (arXiv 2205.01580).

    A quarter of the features each for sine and cosine of x, then of y, in wavelengths that grow
    geometrically from 2 pi to 2 pi times `temperature`.
    """
    quarter = hidden_size // 4
    frequency = temperature ** -(np.arange(quarter) / max(quarter - 1, 1))
    y, x = (i[..., None] * frequency for i in np.mgrid[:grid[0], :grid[1]])
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], -1).astype(np.float32)


def relative_logits(query: Float[Array, 'batch tokens heads head_dim'],
                    table: Float[Array, 'offsets heads head_dim']
                    ) -> Float[Array, 'batch heads tokens tokens']:
    """What relative positions add to the attention logits, scaled as they are; float32.

    The embedding of the offset between query q and key k, row k - q + tokens - 1 of `table`, stands
    in for a key (appendix D.4).
    """
    batch, tokens, heads, head_dim = query.shape
    x = jnp.einsum('bqhd,rhd->bhqr', query, table.astype(query.dtype),
                   preferred_element_type=jnp.float32) / np.sqrt(head_dim)
    # Row q is wanted from entry tokens - 1 - q on. In rows padded to 2 tokens that entry lies at
    # tokens - 1 + q (2 tokens - 1), so after dropping tokens - 1 entries rows of 2 tokens - 1 start
    # there. A gather would be slow on TPU.
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(batch, heads, -1)
    x = x[:, :, tokens - 1:-1].reshape(batch, heads, tokens, 2 * tokens - 1)
    return x[..., :tokens]


def check(kind: str, place: str, hidden_size: int) -> None:
    """Raises UserError unless model.position and model.position_at fit each other and the size."""
    check_choice('model.position', kind, tuple(PLACES))
    check_choice('model.position_at', place, ('stem', 'every_layer', 'shared'))
    if place not in PLACES[kind]:
        raise UserError(f'model.position {kind} cannot act at model.position_at {place}: with it '
                        f'model.position_at is {" or ".join(PLACES[kind])}.')
    divisor = {'learned_2d': 2, 'sincos_2d': 4}.get(kind, 1)
    if hidden_size % divisor:
        raise UserError(f'model.hidden_size {hidden_size} is not divisible by {divisor}, which '
                        f'model.position {kind} needs.')
