"""From image files of any source to batches of pixels.

In: names of data sets, sections of a config as plain values, a seed and a step. Out: NumPy batches
whose order is a function of the seed and the step. Training, evaluation and prediction share one
decoder.

Imports `errors` and `files`. Only this package imports TensorFlow; `images.py`, `resizing.py` and
`table_cells.py` work without it.
"""
