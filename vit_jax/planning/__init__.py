"""The memory, work and time that a run needs, without the machine.

In: a complete config and the chips to compile for, which need not exist. Out: memory, work and time
of a training step, the largest batch, and changes that help if a step does not fit.
Imports errors, models, config, workdir and training.
"""
