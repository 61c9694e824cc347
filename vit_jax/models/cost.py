"""What a model costs, in parameters and floating-point operations; nothing is run or allocated."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params


class Cost(NamedTuple):
    """Size and work of a model.

    Attributes:
      parameters: numbers that are trained.
      flops: of the forward pass for one image; a multiplication and an addition are two.
    """

    parameters: int
    flops: int


def of_model(model: nn.Module, image_size: tuple[int, int], channels: int = 3) -> Cost:
    """Cost of a model from models.build for images of (height, width) pixels."""
    image = jax.ShapeDtypeStruct((1, *image_size, channels), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    return Cost(sum(x.size for x in jax.tree.leaves(variables)),
                count_flops(model.apply, variables, image))


def count_flops(function, *args, **kwargs) -> int:
    """FLOPs of the matrix products and convolutions of `function(*args, **kwargs)`.

    A multiplication and an addition count as two. Bodies of loops over layers are multiplied by
    their length, which XLA's own cost analysis does not do. Element-wise work is left out: it is
    below 2 % of a ViT and no figure of the field includes it.

    Args:
      *args: arrays or jax.ShapeDtypeStruct; nothing is allocated.
    """
    return _count(jax.make_jaxpr(function)(*args, **kwargs).jaxpr)


def _count(jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == 'dot_general':
            (contract, _), _ = eqn.params['dimension_numbers']
            lhs = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[i] for i in contract)
        elif eqn.primitive.name == 'conv_general_dilated':
            kernel = eqn.invars[1].aval.shape
            out_features = kernel[eqn.params['dimension_numbers'].rhs_spec[0]]
            total += (2 * math.prod(eqn.outvars[0].aval.shape)
                      * math.prod(kernel) // out_features)
        else:
            times = eqn.params['length'] if eqn.primitive.name == 'scan' else 1
            total += times * sum(_count(j) for j in jaxprs_in_params(eqn.params))
    return total
