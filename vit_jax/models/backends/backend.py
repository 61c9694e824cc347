"""The type of a backend, an implementation of the layers of a transformer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def keep_everything(function: Callable) -> Callable:
    """Returns the function itself, so that JAX chooses what the backward pass keeps."""
    return function


def needs_no_padding(tokens: int) -> int:
    """Returns 0, because attention supports every number of tokens."""
    return 0


def has_no_limits(model: Mapping[str, Any]) -> list[str]:
    """Returns [], because attention supports every model."""
    return []


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of the layers of a transformer.

    All backends compute the same equations with the same parameters. Model code calls these fields
    without knowing the backend.

    Attributes:
      dense: a class with the fields and parameters of nn.DenseGeneral.
      patches: makes a module with the fields and parameters of nn.Conv, for patches that do not
        overlap.
      norm: a class with the fields and parameters of nn.LayerNorm.
      gelu: maps a key of xla.GELU and `train` to a function of an array.
      dropout: maps a rate to a module with the arguments (x, train).
      attention: models.attention.Attention, or a class with its fields and parameters.
      attend: computes softmax(query key^T / sqrt(head_dim) + bias) value. Its arguments are query,
        key and value [batch, tokens, heads, head_dim], the bias [batch, heads, queries, tokens] or
        None, and the number of tokens of an image; it ignores all later tokens.
      padding: maps the number of tokens of an image to the number of further tokens that `attend`
        needs. No token attends to them.
      remat_hidden: wraps the function (module, x) from the input of an MLP to its hidden layer.
        The backward pass may compute parts of it again.
      compiler_options: returns XLA's options for compiling a model.
      unfit: returns the fields of `config.model` that `attend` does not support, with the expected
        values.
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

    def padded(self, x: Float[Array, 'batch tokens hidden']) -> Float[Array, 'batch padded hidden']:
        """Returns the tokens, followed by the further tokens that `attend` needs.

        The model calls it once, because padding in every layer would cost more. The further tokens
        are copies of the last one, because a LayerNorm could divide by zero for zeros.
        """
        num_copies = self.padding(x.shape[1])
        if not num_copies:
            return x
        return jnp.concatenate([x, jnp.repeat(x[:, -1:], num_copies, axis=1)], axis=1)

    def jit(self, function: Callable, **options: Any) -> Callable:
        """Returns jax.jit(function, **options) with the compiler options of this backend."""
        return jax.jit(function, compiler_options=self.compiler_options(), **options)
