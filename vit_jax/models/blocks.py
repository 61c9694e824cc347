"""The blocks of a transformer by their names in a config, and a block that is not in the paper."""

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax import plugins
from vit_jax.errors import UserError
from vit_jax.models.encoder import Block, EncoderBlock, Mlp


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)) (ViT-22B, arXiv 2302.05442, section 2.1).

    The parts are the same as in EncoderBlock, with one norm. Unlike ViT-22B, this block keeps the
    biases of projections and norms and does not normalise queries and keys.
    """

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch tokens hidden'],
        depth_rate: Float[Array, ''] | None,
        embedding: Array | None,
        train: bool,
        return_intermediates: bool,
    ):
        """See EncoderBlock.__call__."""
        x, relative = self.with_positions(x, embedding)
        y = self.layer_norm('norm')(x)
        queries = y[:, : self.num_queries]
        attended, weights = self.self_attention(queries, y, relative, train, return_intermediates)
        transformed = Mlp(self.fields, name='mlp')(queries, train)
        x = x[:, : self.num_queries]
        x = x + self.branch(attended, depth_rate, train, 'scale1')
        x = x + self.branch(transformed, depth_rate, train, 'scale2')
        if not return_intermediates:
            return x, None
        return x, {'tokens': x, 'attention': weights}


BLOCKS = {'sequential': EncoderBlock, 'parallel': ParallelBlock}


def get(name: str) -> type[Block]:
    """Returns the class of `model.block`: a value of BLOCKS, or an imported class.

    Args:
      name: a key of BLOCKS, or PACKAGE.MODULE:CLASS.

    Raises:
      UserError: the class cannot be imported, or it is not a subclass of Block.
    """
    if name in BLOCKS:
        return BLOCKS[name]
    block = plugins.imported(name, 'model.block', BLOCKS)
    if not (isinstance(block, type) and issubclass(block, Block)):
        raise UserError(
            f'model.block is {name!r}: expected a subclass of vit_jax.models.encoder.Block.',
            kind='value',
            field='model.block',
            value=name,
        )
    return block
