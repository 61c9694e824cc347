"""What a model costs, in parameters and floating-point operations; nothing is run or allocated."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params


class Cost(NamedTuple):
    """Size and work of a model."""

    parameters: int  # numbers that are trained
    flops: int  # of the forward pass for one image; a multiplication and an addition are two


def of_model(model: nn.Module, image_size: tuple[int, int]) -> Cost:
    """Cost of a model from models.build for RGB images of (height, width) pixels.

    Products are counted as XLA computes them: those of other backends cannot be counted.
    """
    image = jax.ShapeDtypeStruct((1, *image_size, 3), jnp.float32)
    model = model.by_xla()
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    return Cost(
        sum(x.size for x in jax.tree.leaves(variables)), count_flops(model.apply, variables, image)
    )


def count_flops(function, *args, **kwargs) -> int:
    """FLOPs of the matrix products and convolutions of `function(*args, **kwargs)`.

    The arguments may be jax.ShapeDtypeStruct. A multiplication and an addition count as two. The
    body of a loop over layers or parts of a batch counts as often as it runs, which XLA's own cost
    analysis leaves out; of the branches of a condition the most expensive counts, and a loop whose
    end depends on values counts once. Element-wise work is left out: it is below 2 % of a ViT, and
    published figures do not include it.
    """
    return flops_of(jax.make_jaxpr(function)(*args, **kwargs).jaxpr)


def flops_of(jaxpr: Jaxpr) -> int:
    """As count_flops, of a function that has been traced; without what nothing reads."""
    total, read = 0, set(map(id, jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if not read.isdisjoint(map(id, eqn.outvars)):
            total += _count_equation(eqn)
            read.update(map(id, eqn.invars))
    return total


def _count_equation(eqn) -> int:
    name, params = eqn.primitive.name, eqn.params
    out = math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 0
    if name == 'dot_general':
        (contract, _), _ = params['dimension_numbers']
        return 2 * out * math.prod(eqn.invars[0].aval.shape[i] for i in contract)
    if name == 'conv_general_dilated':
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[params['dimension_numbers'].rhs_spec[0]]
        # The gradient of a strided convolution has zeros between the entries of its input.
        return 2 * out * (math.prod(kernel) // out_features) // math.prod(params['lhs_dilation'])
    inner = [flops_of(each) for each in jaxprs_in_params(params)]
    if name == 'cond':
        return max(inner)
    return params['length'] * sum(inner) if name == 'scan' else sum(inner)
