"""Multi-head attention (ViT appendix A, equations 5 to 8)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models import cpu_attention, linear
from vit_jax.models.dropout import Dropout
from vit_jax.models.position import relative_logits

KERNELS = ('auto', 'xla', 'cpu', 'cudnn')  # auto: as xla, where training/chosen.py does not choose


class Attention(nn.Module):
    """Attention of some tokens to others, or to themselves."""

    num_heads: int  # the hidden size is divided evenly among them
    dropout_rate: float  # of the attention weights; 0 in the paper
    dtype: jax.typing.DTypeLike  # of the computation, but for the softmax, which is in float32
    kernel: str = 'auto'  # one of KERNELS
    linear_kernel: str = 'auto'  # one of linear.KERNELS
    tokens: int | None = None  # of the context; in _attend nothing attends to further ones

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch queries hidden'],
        context: Float[Array, 'batch tokens hidden'],
        relative: Float[Array, 'offsets heads head_dim'] | None = None,
        train: bool = False,
        return_weights: bool = False,
    ):
        """Returns tokens like `x`, and float32 weights [batch, heads, queries, tokens] or None.

        Queries come from `x`, keys and values from `context`, which is `x` in self-attention, and
        `relative` are embeddings of the offsets, see position.relative_logits. `return_weights`
        also computes the weights, without dropout, separately.
        """
        hidden_size, dense = x.shape[-1], linear.dense(self.linear_kernel)
        drops = train and self.dropout_rate
        # A bias of the keys does not change the weights; as these add up to 1, that of the values
        # can be added to the result. Then neither needs a sum over all tokens for its gradient.
        apart = self.linear_kernel == 'gpu' and train and not drops

        def project(name, tokens, **options):
            y = dense(
                (self.num_heads, hidden_size // self.num_heads),
                kernel_init=nn.initializers.xavier_uniform(),
                dtype=self.dtype,
                name=name,
                **options,
            )(tokens)
            y, bias = y if options else (y, None)
            return nn.with_logical_constraint(y, ('batch', 'tokens', 'heads', 'head_dim')), bias

        options = dict(return_bias=True) if apart else {}
        query, _ = project('query', x)
        key, _ = project('key', context, **options)
        value, shift = project('value', context, **options)
        bias = None if relative is None else relative_logits(query, relative)
        weights = attention_weights(query, key, bias) if return_weights else None
        if drops:
            dropped = Dropout(self.dropout_rate)(attention_weights(query, key, bias), train).astype(
                value.dtype
            )
            y = jnp.einsum('bhqk,bkhd->bqhd', dropped, value)
        else:
            y = _attend(query, key, value, bias, self.kernel, self.tokens or key.shape[1])
        y = dense(
            hidden_size,
            axis=(-2, -1),
            kernel_init=nn.initializers.xavier_uniform(),
            dtype=self.dtype,
            name='out',
        )(y, *([shift] if apart else []))
        return y, weights


def _attend(query, key, value, bias, kernel, tokens):
    """attention_weights(query, key, bias) value over the first `tokens`, by one of KERNELS.

    'cpu' and 'cudnn' compute self-attention without a bias, 'cudnn' only where no tokens have to be
    added. XLA computes the rest: that of the class token alone costs little.
    """
    plain = query.shape == key.shape and bias is None
    if kernel == 'cpu' and plain:
        return cpu_attention.attend(query, key, value)
    lengths = {}
    if key.shape[1] > tokens:  # of each image, on the device that has it
        lengths = {
            name: nn.with_logical_constraint(jnp.full(len(key), n, jnp.int32), ('batch',))
            for name, n in (
                ('query_seq_lengths', query.shape[1]),
                ('key_value_seq_lengths', tokens),
            )
        }
    by_cudnn = kernel == 'cudnn' and plain and not padding_tokens(key.shape[1])
    return jax.nn.dot_product_attention(
        query, key, value, bias, **lengths, implementation='cudnn' if by_cudnn else 'xla'
    )


def padding_tokens(tokens: int) -> int:
    """How many tokens, to which nothing attends, cuDNN needs in addition."""
    more = tokens % 2  # of an odd number JAX refuses gradients
    # cuDNN's may be NaN: github.com/pytorch/pytorch/issues/196678
    return more + 2 if (tokens + more) % 128 == 64 else more


def attention_weights(
    query: Float[Array, 'batch queries heads head_dim'],
    key: Float[Array, 'batch tokens heads head_dim'],
    bias: Float[Array, 'batch heads queries tokens'] | None,
) -> Float[Array, 'batch heads queries tokens']:
    """softmax(query key / sqrt(head_dim) + bias) over the tokens, in float32 (equation 6)."""
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
    logits = logits / np.sqrt(query.shape[-1])
    return jax.nn.softmax(logits if bias is None else logits + bias)
