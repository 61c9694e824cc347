"""Image files of any source in; batches of pixels, in an order that the seed decides, out.

Pipelines take values and give NumPy arrays; training, evaluation and prediction share one decoder.
May import `errors` and `files`. TensorFlow stays in this room, and `images.py` works without it.
"""
