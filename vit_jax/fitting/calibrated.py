"""Weights whose probabilities match how often they are right."""

import dataclasses

import numpy as np

from vit_jax.weights import Weights


def with_temperature(weights: Weights, temperature: float) -> Weights:
    """The weights with logits that are divided by a temperature.

    The head is linear, so that its kernel and bias are divided: every program that reads the
    weights, in whatever layout, then has the calibrated probabilities.
    """
    head = {
        name: (np.asarray(array, np.float64) / temperature).astype(np.float32)
        for name, array in weights.params['head'].items()
    }
    return dataclasses.replace(weights, params={**weights.params, 'head': head})
