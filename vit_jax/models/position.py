"""Position embeddings: what tells a token where its patch was."""

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.errors import UserError


class Learned1D(nn.Module):
    """Adds one learned embedding per token, class token included (ViT equation 1)."""

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden']
                 ) -> Float[Array, 'batch tokens hidden']:
        if self.has_variable('params', 'embedding'):
            known = self.get_variable('params', 'embedding').shape
            if known[1:] != x.shape[1:]:
                raise UserError(
                    f'the position embedding was made for {known[1]} tokens of size {known[2]} and '
                    f'the image gives {x.shape[1]} of size {x.shape[2]}. Use images of the size '
                    'that the parameters were trained on, or resize the embedding first.')
        embedding = self.param('embedding', nn.initializers.normal(stddev=0.02), (1, *x.shape[1:]))
        return x + embedding.astype(x.dtype)
