"""Confidence intervals of accuracies."""

import math


def wilson(correct: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a proportion.

    Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the
    American Statistical Association 22 (1927). Unlike p +- z sqrt(p (1 - p) / n) it stays between
    0 and 1, and it has a width where all examples are correct.

    Args:
      correct: the number of correct examples.
      total: the number of examples, at least 1.
      z: the quantile of the normal distribution; 1.96 is for 95 %.

    Returns:
      The lower and the upper end, from 0 to 1.
    """
    proportion = correct / total
    spread = z**2 / total
    centre = (proportion + spread / 2) / (1 + spread)
    half_width = z / (1 + spread)
    half_width *= math.sqrt(proportion * (1 - proportion) / total + spread / (4 * total))
    return max(0.0, centre - half_width), min(1.0, centre + half_width)
