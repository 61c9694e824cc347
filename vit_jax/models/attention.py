"""Multi-head self-attention (ViT appendix A, equations 5 to 8)."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float


class SelfAttention(nn.Module):
    """Self-attention over tokens, without dropout on the attention weights, as in the paper.

    Attributes:
      num_heads: heads; hidden_size is divided evenly among them.
      dtype: dtype of the computation; parameters are float32, the softmax is computed in float32.
    """

    num_heads: int
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden']
                 ) -> Float[Array, 'batch tokens hidden']:
        hidden_size = x.shape[-1]

        def project(name):
            return nn.DenseGeneral((self.num_heads, hidden_size // self.num_heads),
                                   kernel_init=nn.initializers.xavier_uniform(),
                                   dtype=self.dtype, name=name)

        query, key, value = (project(n)(x) for n in ('query', 'key', 'value'))
        x = jax.nn.dot_product_attention(query, key, value)  # [batch, tokens, heads, head_dim]
        return nn.DenseGeneral(hidden_size, axis=(-2, -1),
                               kernel_init=nn.initializers.xavier_uniform(),
                               dtype=self.dtype, name='out')(x)
