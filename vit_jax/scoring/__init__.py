"""What weights are worth on a split, with numbers for every class, or of their frozen features.

In: weights, their model and parameters, the name of a split. Out: a dict of numbers, and a table of
them. Imports every room but planning; the command vit_jax.evaluate calls it.
"""
