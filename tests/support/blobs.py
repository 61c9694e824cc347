"""Features of classes that overlap."""

import numpy as np

RNG = np.random.default_rng(0)


def blobs(count=300, classes=3, size=5, spread=1.0):
    """Features around one centre for each class, and targets."""
    labels = np.arange(count) % classes
    centres = 2 * np.random.default_rng(1).normal(size=(classes, size))
    features = centres[labels] + spread * RNG.normal(size=(count, size))
    return features, np.eye(classes, dtype=bool)[labels]
