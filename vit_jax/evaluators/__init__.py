"""Evaluators.

In: a model, its parameters, a loss and batches. Out: sums over the examples of a batch, which are
added up, and the metrics of a whole split. Imports errors and models.
"""
