"""Scores of weights on a split, for the command vit_jax.evaluate: data, results and tables.

In: weights with their model, and the name of a split. Out: a dict of numbers, and a table of these
numbers. Imports every package except planning. Only the commands import this package.
"""
