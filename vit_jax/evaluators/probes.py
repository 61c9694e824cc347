"""Classifiers of frozen features: closed-form least squares, and others to hold it against.

All take training features [n, features] with their labels, and return scores [queries, classes]
of other features, of which the largest is the answer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from vit_jax.evaluators.features import Features

# As in big_vision's evaluators/fewshot_lsr.py: a constant so large that the bias, which is its
# weight, is hardly regularised.
BIAS_FEATURE = 100.0
STD_EPSILON = 1e-5
# As Wu et al. (arXiv 1805.01978) weigh neighbours, with DINO's numbers (arXiv 2104.14294).
NEIGHBOURS, TEMPERATURE = 20, 0.07
# Of the mean cross-entropy of the linear probe; its gradient is then small enough to stop.
PROBE_L2, PROBE_STEPS, PROBE_GRADIENT = 0.01, 500, 1e-5

Queries = Float[np.ndarray, 'queries features']
Scores = Float[np.ndarray, 'queries classes']


def whiten(train: Queries, *others: Queries) -> list[Float[np.ndarray, 'rows features']]:
    """Features in float64, less the mean of the first and divided by its standard deviation."""
    values = [np.asarray(x, np.float64) for x in (train, *others)]
    mean, std = values[0].mean(axis=0), values[0].std(axis=0) + STD_EPSILON
    return [(x - mean) / std for x in values]


def least_squares(
    train: Features, queries: Queries, num_classes: int, l2: tuple[float, ...]
) -> list[Scores]:
    """Regularised least squares to {-1, +1}^classes in closed form (section 4.1), for each L2.

    With X the whitened features and a constant, and Y the targets, it minimises
    |X W - Y|^2 + L2 |W|^2, by one eigendecomposition of the smaller of X^T X and X X^T.
    """
    x, queries = (
        np.pad(a, ((0, 0), (0, 1)), constant_values=BIAS_FEATURE)
        for a in whiten(train.values, queries)
    )
    y = 2.0 * np.eye(num_classes)[train.labels] - 1
    if len(x) >= x.shape[1]:  # W = (X^T X + L2)^-1 X^T Y
        eigenvalues, vectors = np.linalg.eigh(x.T @ x)
        left, right = queries @ vectors, vectors.T @ (x.T @ y)
    else:  # W = X^T (X X^T + L2)^-1 Y
        eigenvalues, vectors = np.linalg.eigh(x @ x.T)
        left, right = queries @ (x.T @ vectors), vectors.T @ y
    return [(left / (eigenvalues + value)) @ right for value in l2]


def nearest_prototype(train: Features, queries: Queries, num_classes: int) -> Scores:
    """Cosine similarity to the mean of each class's features, of which each has length 1."""
    sums = np.eye(num_classes)[train.labels].T @ _directions(train.values)
    return _directions(queries) @ _directions(sums).T


def nearest_neighbours(train: Features, queries: Queries, num_classes: int) -> Scores:
    """Votes of the NEIGHBOURS of largest cosine similarity s, weighing exp(s / TEMPERATURE)."""
    directions, scores = _directions(train.values), np.zeros((len(queries), num_classes))
    count = min(NEIGHBOURS, len(directions))
    parts = 1 + len(queries) * len(directions) // 2**26  # at once may not fit in memory
    for rows in np.array_split(np.arange(len(queries)), parts):
        similarity = _directions(queries[rows]) @ directions.T
        nearest = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        weights = np.exp(np.take_along_axis(similarity, nearest, axis=1) / TEMPERATURE)
        np.add.at(scores, (rows[:, None], train.labels[nearest]), weights)
    return scores


def linear_probe(train: Features, queries: Queries, num_classes: int) -> Scores:
    """Logits of softmax regression on whitened features, found with L-BFGS in float32.

    It minimises the mean cross-entropy + PROBE_L2 / 2 |W|^2, the bias being free.
    """
    whitened, queries = whiten(train.values, queries)
    x, labels = jnp.asarray(whitened, jnp.float32), jnp.asarray(train.labels)

    def objective(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params['kernel'] + params['bias'], labels
        )
        return losses.mean() + PROBE_L2 / 2 * jnp.sum(params['kernel'] ** 2)

    solver, value_and_grad = optax.lbfgs(), optax.value_and_grad_from_state(objective)

    def step(carry):
        params, state, _, count = carry
        value, grad = value_and_grad(params, state=state)
        updates, state = solver.update(
            grad, state, params, value=value, grad=grad, value_fn=objective
        )
        return optax.apply_updates(params, updates), state, optax.tree.norm(grad), count + 1

    params = {'kernel': jnp.zeros((x.shape[1], num_classes)), 'bias': jnp.zeros(num_classes)}
    params, *_ = jax.jit(
        lambda carry: jax.lax.while_loop(
            lambda carry: (carry[2] > PROBE_GRADIENT) & (carry[3] < PROBE_STEPS), step, carry
        )
    )((params, solver.init(params), jnp.inf, 0))
    return queries @ np.asarray(params['kernel'], np.float64) + np.asarray(params['bias'])


def _directions(x):
    """Rows of length 1, in float64; zeros stay."""
    x = np.asarray(x, np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
