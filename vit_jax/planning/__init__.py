"""What a run needs, before there is a machine for it.

In: a complete config and the chips to compile for, which need not exist. Out: memory, work and time
of a training step, the largest batch, and what to change when a step does not fit.
Imports errors, models, config, workdir and training.
"""
