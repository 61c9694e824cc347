"""The speed of a config on this machine, compared with other projects.

In: a complete config. Out: seconds of its steps, measured in alternating rounds, with the work and
the memory that they need. Imports errors, models, config, workdir and training. Timing the input
imports TensorFlow, through training/run.py; only the process of a peer imports PyTorch.
"""
