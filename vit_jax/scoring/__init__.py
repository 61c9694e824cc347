"""What the command vit_jax.evaluate adds to evaluators: which images, and reports of the numbers.

In: weights, their model and parameters, the name of a split. Out: a dict of numbers, and a table of
them. Imports every room but planning; the command vit_jax.evaluate calls it.
"""
