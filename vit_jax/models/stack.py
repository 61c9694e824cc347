"""Repetition of a block: one compiled body, stacked parameters, optional rematerialisation."""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.fields import one_of, whole

_POLICIES = jax.checkpoint_policies
# Which values the backward pass keeps; None lets JAX choose. With 'products' it repeats no linear
# layer and no convolution. It repeats attention weights, dropout masks, and the float32 values
# within normalisations and GELUs.
REMAT_POLICIES = {
    'auto': None,  # only until training/device_defaults.py chooses
    'products': _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable,
        lambda primitive, *_, **__: primitive is jax.lax.conv_general_dilated_p,
    ),
    'none': None,
    'nothing_saveable': _POLICIES.nothing_saveable,
    'dots_saveable': _POLICIES.dots_saveable,  # and convolutions
    'dots_with_no_batch_dims_saveable': _POLICIES.dots_with_no_batch_dims_saveable,
    'everything_saveable': _POLICIES.everything_saveable,
}

# Fields that all models have.
Dtype = Annotated[
    str,
    one_of('float32', 'bfloat16', 'auto'),
    'dtype of the computation; parameters are float32. auto: bfloat16, except on a CPU that is '
    'faster in float32',
]
Unroll = Annotated[
    int,
    whole(0),
    'number of layers or residual units per iteration of the loop over them; the number of layers: '
    'no loop; 0: chosen for the machine',
]
RematPolicy = Annotated[
    str,
    one_of(*REMAT_POLICIES),
    'values that the backward pass keeps; it computes all others again. products: outputs of '
    'linear layers and convolutions; none: all values; auto: chosen for the machine',
]


def stack(
    block: type[nn.Module],
    length: int,
    *,
    unroll: int,
    remat_policy: str,
    in_axes=(),
    static_argnums: tuple[int, ...] = (),
) -> type[nn.Module]:
    """Returns a module class that applies `block` `length` times, with stacked parameters.

    The parameters [length, ...] do not depend on `unroll` and `remat_policy`, so checkpoints fit
    all values of both.

    Args:
      block: a module class. Its __call__ takes the carry and the arguments of `in_axes`, and
        returns the carry and the outputs, which are collected along a first axis.
      length: number of repetitions.
      unroll: repetitions per iteration of the loop; if it equals `length`, there is no loop.
      remat_policy: a key of REMAT_POLICIES.
      in_axes: for each argument after the carry, 0 (one entry per repetition) or
        flax.linen.broadcast.
      static_argnums: arguments of __call__ that are Python values, where self is argument 0.
    """
    block = remat(block, remat_policy, static_argnums, prevent_cse=unroll >= length)
    return nn.scan(
        block,
        variable_axes={'params': 0},
        in_axes=in_axes,
        split_rngs={'params': True, 'dropout': True},
        length=length,
        unroll=min(unroll or 1, length),
    )


def remat(
    block: type[nn.Module],
    policy: str,
    static_argnums: tuple[int, ...] = (),
    prevent_cse: bool = True,
) -> type[nn.Module]:
    """Returns `block` with rematerialisation in its backward pass.

    Args:
      block: a module class.
      policy: a key of REMAT_POLICIES, which says what is kept.
      static_argnums: arguments of __call__ that are Python values, where self is argument 0.
      prevent_cse: whether to keep the compiler from merging the recomputation with the forward
        pass. Inside a loop the compiler cannot merge them anyway.
    """
    if REMAT_POLICIES[policy] is None:
        return block
    return nn.remat(
        block, policy=REMAT_POLICIES[policy], static_argnums=static_argnums, prevent_cse=prevent_cse
    )


def check_images(images: Float[Array, 'batch height width channels']) -> None:
    """Raises UserError unless `images` is a batch of one or more floating-point images."""
    if images.ndim != 4:
        raise UserError(
            f'images have shape {images.shape}: expected [batch, height, width, channels], for a '
            'single image images[None].',
            kind='value',
            field='images',
            value=images.shape,
        )
    if 0 in images.shape:
        raise UserError(
            f'images have shape {images.shape}: expected one or more.',
            kind='value',
            field='images',
            value=images.shape,
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise UserError(
            f'images have dtype {images.dtype}: expected float32, normalised as '
            '(pixels / 255 - mean) / std.',
            kind='value',
            field='images',
            value=images.dtype,
        )
