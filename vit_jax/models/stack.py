"""Repeats a block of a network: one compiled body, stacked parameters, rematerialised or not."""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.fields import one_of, whole

_KEPT = jax.checkpoint_policies
# What is kept for the backward pass; None is no policy, which keeps what JAX chooses to. With
# 'products' no linear layer and no convolution is computed twice, and neither attention weights nor
# masks of dropout nor the float32 values within normalisations and GELUs are kept.
REMAT_POLICIES = {
    'auto': None,  # where training/device_defaults.py does not choose
    'products': _KEPT.save_from_both_policies(
        _KEPT.dots_with_no_batch_dims_saveable,
        lambda primitive, *_, **__: primitive is jax.lax.conv_general_dilated_p,
    ),
    'none': None,
    'nothing_saveable': _KEPT.nothing_saveable,
    'dots_saveable': _KEPT.dots_saveable,  # and convolutions
    'dots_with_no_batch_dims_saveable': _KEPT.dots_with_no_batch_dims_saveable,
    'everything_saveable': _KEPT.everything_saveable,
}

# Fields of every model that say how it is computed.
Dtype = Annotated[
    str,
    one_of('float32', 'bfloat16', 'auto'),
    'of the computation; parameters are float32. auto: bfloat16, but float32 on a CPU that is '
    'faster in it',
]
Unroll = Annotated[
    int,
    whole(0),
    'layers compiled side by side in each loop over layers or '
    'residual units; as many as there are: no loop; 0: chosen for the machine',
]
RematPolicy = Annotated[
    str,
    one_of(*REMAT_POLICIES),
    'what the backward pass keeps; it computes the rest again. products: of '
    'linear layers and convolutions; none: all; auto: chosen for the machine',
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
    """A module class that applies `block` `length` times, with parameters [length, ...].

    The parameters are the same whatever `unroll` and `remat_policy` are, so that checkpoints fit.

    Args:
      block: its __call__ takes what the previous repetition has passed on and the arguments of
        `in_axes`; it returns what it passes on, and what is collected, one entry per repetition.
      unroll: repetitions compiled side by side; with `length` there is no loop.
      in_axes: for each further argument 0 (an entry per repetition) or flax.linen.broadcast.
      static_argnums: which arguments of __call__ are Python values, self being argument 0.
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
    """`block`, recomputing in the backward pass what `policy`, of REMAT_POLICIES, does not keep.

    `prevent_cse` keeps the compiler from merging the recomputation with the forward pass, which it
    cannot do inside a loop anyway.
    """
    if REMAT_POLICIES[policy] is None:
        return block
    return nn.remat(
        block, policy=REMAT_POLICIES[policy], static_argnums=static_argnums, prevent_cse=prevent_cse
    )


def check_images(images: Float[Array, 'batch height width channels']) -> None:
    """Raises UserError for images that are no batch, none, or not normalised: of whole numbers."""
    if images.ndim != 4:
        raise UserError(
            f'images have shape {images.shape}: expected [batch, height, width, '
            'channels], for a single image images[None].'
        )
    if 0 in images.shape:
        raise UserError(f'images have shape {images.shape}: expected one or more.')
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise UserError(
            f'images have dtype {images.dtype}: expected float32, normalised as '
            '(pixels / 255 - mean) / std.'
        )
