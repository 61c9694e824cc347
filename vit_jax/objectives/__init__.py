"""Training objectives: labels, distillation, masked patches, or a user's function.

In: a complete config and a model. Out: an Objective, the one value that the training step, the
evaluation and the export of parameters read. No other code depends on the kind of the objective.
Imports errors, plugins, options, models, config, processes, weights and evaluators.
"""
