"""The number of parameters and floating-point operations of a model, without running it."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params


class Cost(NamedTuple):
    """Size and work of a model."""

    parameters: int  # number of trained numbers
    flops: int  # of the forward pass for one image; a multiplication and an addition count as two


def of_model(model: nn.Module, image_size: tuple[int, int]) -> Cost:
    """Returns the cost of a model for one RGB image.

    The count is for XLA's own layers, because the kernels of other backends cannot be counted.

    Args:
      model: a model from models.build.
      image_size: (height, width) in pixels.
    """
    image = jax.ShapeDtypeStruct((1, *image_size, 3), jnp.float32)
    model = model.by_xla()
    variables = jax.eval_shape(model.init, jax.random.key(0), image)
    parameters = sum(x.size for x in jax.tree.leaves(variables))
    return Cost(parameters, count_flops(model.apply, variables, image))


def count_flops(function, *args, **kwargs) -> int:
    """Returns the FLOPs of the matrix products and convolutions of `function(*args, **kwargs)`.

    A multiplication and an addition count as two. The body of a loop counts once per iteration,
    unlike in XLA's own cost analysis; a loop whose end depends on values counts once. Of the
    branches of a condition, only the most expensive branch counts. Element-wise operations do not
    count: they are below 2 % of a ViT, and published figures exclude them.

    Args:
      function: a function that JAX can trace.
      *args: its arguments, which may be jax.ShapeDtypeStruct.
      **kwargs: its keyword arguments.
    """
    return flops_of(jax.make_jaxpr(function)(*args, **kwargs).jaxpr)


def flops_of(jaxpr: Jaxpr) -> int:
    """Returns the FLOPs of a traced function as count_flops does, without unused results."""
    total = 0
    used = {id(variable) for variable in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        outputs = {id(variable) for variable in equation.outvars}
        if not used.isdisjoint(outputs):
            total += _count_equation(equation)
            used.update(id(variable) for variable in equation.invars)
    return total


def _count_equation(equation) -> int:
    name = equation.primitive.name
    params = equation.params
    if name == 'dot_general':
        (contracted_axes, _), _ = params['dimension_numbers']
        left_shape = equation.invars[0].aval.shape
        return 2 * _output_size(equation) * math.prod(left_shape[i] for i in contracted_axes)
    if name == 'conv_general_dilated':
        kernel_shape = equation.invars[1].aval.shape
        out_features = kernel_shape[params['dimension_numbers'].rhs_spec[0]]
        products = math.prod(kernel_shape) // out_features
        # The gradient of a strided convolution has zeros between the entries of its input.
        return 2 * _output_size(equation) * products // math.prod(params['lhs_dilation'])
    inner = [flops_of(jaxpr) for jaxpr in jaxprs_in_params(params)]
    if name == 'cond':
        return max(inner)
    if name == 'scan':
        return params['length'] * sum(inner)
    return sum(inner)


def _output_size(equation):
    return math.prod(equation.outvars[0].aval.shape)
