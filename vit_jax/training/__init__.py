"""The run: from a config, data and weights to updates of a state, on whatever devices there are.

In: a config and a workdir. Out: one immutable Run, pure steps, and the loop that applies them until
the run is complete or a signal comes. Imports errors, machine, models, config,
processes, data, workdir, weights and evaluators.
"""
