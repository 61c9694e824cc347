"""The type of a backend: how a platform computes the parts of a transformer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def keep_everything(function: Callable) -> Callable:
    """The function itself: the backward pass keeps what JAX chooses to keep."""
    return function


def needs_no_padding(tokens: int) -> int:
    """0: attention takes any number of tokens."""
    return 0


def has_no_limits(model: Mapping[str, Any]) -> list[str]:
    """[]: every model can be computed."""
    return []


@dataclasses.dataclass(frozen=True)
class Backend:
    """How one platform computes the layers of a transformer.

    All backends compute the same equations with the same parameters. Model code calls these fields
    and does not ask which backend it has.

    Attributes:
      dense: a class with the fields and parameters of nn.DenseGeneral.
      patches: makes a module with the fields and parameters of nn.Conv, for patches that do not
        overlap.
      norm: a class with the fields and parameters of nn.LayerNorm.
      gelu: from a key of xla.GELU and `train` to a function of an array.
      dropout: from a rate to a module with the arguments (x, train).
      attention: the class of attention layers: models.attention.Attention, or one with its fields
        and parameters.
      attend: from query, key, value [batch, tokens, heads, head_dim], a bias of the logits
        [batch, heads, queries, tokens] or None, and the number of tokens of an image to
        softmax(query key / sqrt(head_dim) + bias) value, over these tokens only.
      padding: how many tokens, which nothing attends to, `attend` needs besides those of an image.
      remat_hidden: wraps the function (module, x) from the input of an MLP to its hidden layer,
        and may compute parts of it again in the backward pass.
      compiler_options: what XLA is told where it compiles a model.
      unfit: from `config.model` to what `attend` does not compute, each with what it expects.
    """

    dense: type[nn.Module]
    patches: Callable[..., nn.Module]
    norm: type[nn.Module]
    gelu: Callable[[str, bool], Callable[[Array], Array]]
    dropout: Callable[[float], nn.Module]
    attention: type[nn.Module]
    attend: Callable[..., Array]
    padding: Callable[[int], int] = needs_no_padding
    remat_hidden: Callable[[Callable], Callable] = keep_everything
    compiler_options: Callable[[], dict[str, Any] | None] = lambda: None
    unfit: Callable[[Mapping[str, Any]], list[str]] = has_no_limits

    def padded(self, x: Float[Array, 'batch tokens hidden']) -> Float[Array, 'batch more hidden']:
        """The tokens and those that `attend` needs besides.

        They are padded once, because a copy in every layer costs more. The last token is repeated:
        zeros are what a LayerNorm may divide by.
        """
        more = self.padding(x.shape[1])
        if not more:
            return x
        return jnp.concatenate([x, jnp.repeat(x[:, -1:], more, axis=1)], axis=1)

    def jit(self, function: Callable, **options: Any) -> Callable:
        """jax.jit with the compiler options of this backend."""
        return jax.jit(function, compiler_options=self.compiler_options(), **options)
