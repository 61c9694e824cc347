"""The blocks of a transformer by their names in a config, and those besides the paper's."""

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax import plugins
from vit_jax.errors import UserError
from vit_jax.models.encoder import Block, EncoderBlock, Mlp


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)) (ViT-22B, arXiv 2302.05442, section 2.1).

    ViT-22B also leaves out biases of the projections and norms, and normalises queries and keys.
    This block has the parts of EncoderBlock, with one norm.
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
        """As EncoderBlock."""
        x, relative = self.with_positions(x, embedding)
        y = self.layer_norm('norm')(x)
        queries = y[:, : self.wanted]
        attended, weights = self.self_attention(queries, y, relative, train, return_intermediates)
        transformed = Mlp(self.fields, name='mlp')(queries, train)
        x = x[:, : self.wanted]
        x = x + self.branch(attended, depth_rate, train, 'scale1')
        x = x + self.branch(transformed, depth_rate, train, 'scale2')
        return x, {'tokens': x, 'attention': weights} if return_intermediates else None


BLOCKS = {'sequential': EncoderBlock, 'parallel': ParallelBlock}


def get(name: str) -> type[Block]:
    """The class of `model.block`: a key of BLOCKS, or PACKAGE.MODULE:CLASS.

    Raises UserError if the class cannot be imported or is no Block.
    """
    if name in BLOCKS:
        return BLOCKS[name]
    block = plugins.imported(name, 'model.block', BLOCKS)
    if not (isinstance(block, type) and issubclass(block, Block)):
        raise UserError(
            f'model.block is {name!r}, which is no subclass of vit_jax.models.encoder.Block.'
        )
    return block
