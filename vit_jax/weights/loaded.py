"""Weights with the module and the parameters that apply their model."""

import dataclasses

import flax.linen as nn
import jax
from jaxtyping import PyTree

from vit_jax import models
from vit_jax.models.backends import registry
from vit_jax.weights.model import Weights


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Weights, a module that computes their model, and the parameters as float32."""

    weights: Weights
    module: nn.Module
    params: PyTree = dataclasses.field(repr=False)


def build(weights: Weights) -> Loaded:
    """Returns the weights with a module that uses the fastest kernels of this machine."""
    return Loaded(weights, fastest_model(weights), weights.float32_params())


def fastest_model(weights: Weights) -> nn.Module:
    """Returns a module for the model of the weights, with the fastest kernels of this machine."""
    return models.build(
        weights.model,
        weights.num_classes,
        **registry.fastest(weights.model, jax.default_backend(), jax.devices()[0]),
    )
