"""How fast a config is on this machine, and other projects beside it.

In: a complete config. Out: seconds of its steps, in rounds that take turns, with the work and the
memory that they need. Imports errors, models, config, workdir and training, whose run.py brings
TensorFlow where the input is timed; PyTorch only in the process of a peer.
"""
