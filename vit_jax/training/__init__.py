"""Training: from a config, data and weights to updates of a state, on any devices.

In: a config and a workdir. Out: an immutable Run, pure steps, and the loop that applies the steps
until the run is complete or receives a signal. Imports errors, files, machine, options, parallel,
models, config, processes, data, workdir, weights, evaluators and objectives.
"""
