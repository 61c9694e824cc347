"""Classifiers of frozen features: closed-form least squares, and others for comparison.

All of them learn from training features [n, features] with labels, and return scores [queries,
classes] of other features. The class with the largest score is the prediction.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from vit_jax.evaluators.features import Features

# A large constant feature, so that its weight, the bias, is hardly regularised, as in big_vision
# (evaluators/fewshot_lsr.py).
BIAS_FEATURE = 100.0
STD_EPSILON = 1e-5
# Neighbours are weighted as in Wu et al. (arXiv 1805.01978), with DINO's numbers (arXiv
# 2104.14294).
NEIGHBOURS = 20
TEMPERATURE = 0.07
PROBE_L2 = 0.01  # added to the mean cross-entropy of the linear probe
PROBE_STEPS = 500  # largest number of L-BFGS steps
PROBE_GRADIENT = 1e-5  # norm of the gradient at which the linear probe stops

Queries = Float[np.ndarray, 'queries features']
Scores = Float[np.ndarray, 'queries classes']


def whiten(train: Queries, *others: Queries) -> list[Float[np.ndarray, 'rows features']]:
    """Features in float64, minus the mean of `train` and divided by its standard deviation."""
    values = [np.asarray(x, np.float64) for x in (train, *others)]
    mean = values[0].mean(axis=0)
    std = values[0].std(axis=0) + STD_EPSILON
    return [(x - mean) / std for x in values]


def least_squares(
    train: Features, queries: Queries, num_classes: int, l2: tuple[float, ...]
) -> list[Scores]:
    """Regularised least squares with targets {-1, +1}^classes in closed form, for each L2.

    This is the few-shot classifier of section 4.1. X has the whitened features and a constant, and
    Y has the targets. One eigendecomposition of the smaller of X^T X and X X^T gives the W that
    minimises |X W - Y|^2 + L2 |W|^2 for every L2.
    """
    whitened, whitened_queries = whiten(train.values, queries)
    x = _with_bias_feature(whitened)
    queries = _with_bias_feature(whitened_queries)
    y = 2.0 * np.eye(num_classes)[train.labels] - 1
    if len(x) >= x.shape[1]:  # W = (X^T X + L2)^-1 X^T Y
        eigenvalues, vectors = np.linalg.eigh(x.T @ x)
        left = queries @ vectors
        right = vectors.T @ (x.T @ y)
    else:  # W = X^T (X X^T + L2)^-1 Y
        eigenvalues, vectors = np.linalg.eigh(x @ x.T)
        left = queries @ (x.T @ vectors)
        right = vectors.T @ y
    return [(left / (eigenvalues + value)) @ right for value in l2]


def _with_bias_feature(x):
    return np.pad(x, ((0, 0), (0, 1)), constant_values=BIAS_FEATURE)


def nearest_prototype(train: Features, queries: Queries, num_classes: int) -> Scores:
    """Cosine similarity to the mean of the normalised features of each class."""
    sums = np.eye(num_classes)[train.labels].T @ _directions(train.values)
    return _directions(queries) @ _directions(sums).T


def nearest_neighbours(train: Features, queries: Queries, num_classes: int) -> Scores:
    """Votes of the NEIGHBOURS nearest features, weights exp(cosine similarity / TEMPERATURE)."""
    directions = _directions(train.values)
    scores = np.zeros((len(queries), num_classes))
    count = min(NEIGHBOURS, len(directions))
    parts = 1 + len(queries) * len(directions) // 2**26  # all similarities may not fit in memory
    for rows in np.array_split(np.arange(len(queries)), parts):
        similarity = _directions(queries[rows]) @ directions.T
        nearest = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        weights = np.exp(np.take_along_axis(similarity, nearest, axis=1) / TEMPERATURE)
        np.add.at(scores, (rows[:, None], train.labels[nearest]), weights)
    return scores


def linear_probe(train: Features, queries: Queries, num_classes: int) -> Scores:
    """Logits of softmax regression on whitened features, fitted by L-BFGS in float32.

    The fit minimises mean cross-entropy + PROBE_L2 / 2 |W|^2; the bias is not regularised.
    """
    whitened, queries = whiten(train.values, queries)
    x = jnp.asarray(whitened, jnp.float32)
    labels = jnp.asarray(train.labels)

    def objective(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params['kernel'] + params['bias'], labels
        )
        return losses.mean() + PROBE_L2 / 2 * jnp.sum(params['kernel'] ** 2)

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(objective)

    def should_continue(carry):
        _, _, gradient_norm, count = carry
        return (gradient_norm > PROBE_GRADIENT) & (count < PROBE_STEPS)

    def step(carry):
        params, state, _, count = carry
        value, grad = value_and_grad(params, state=state)
        updates, state = solver.update(
            grad, state, params, value=value, grad=grad, value_fn=objective
        )
        return optax.apply_updates(params, updates), state, optax.tree.norm(grad), count + 1

    params = {'kernel': jnp.zeros((x.shape[1], num_classes)), 'bias': jnp.zeros(num_classes)}
    fit = jax.jit(lambda carry: jax.lax.while_loop(should_continue, step, carry))
    params, *_ = fit((params, solver.init(params), jnp.inf, 0))
    return queries @ np.asarray(params['kernel'], np.float64) + np.asarray(params['bias'])


def _directions(x):
    """Normalises rows to length 1, in float64; rows of zeros do not change."""
    x = np.asarray(x, np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
