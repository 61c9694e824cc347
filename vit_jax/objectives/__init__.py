"""What is minimised: labels, distillation, masked patches, or a function of the user's own.

In: a complete config and a model. Out: an Objective, one value, from which the training step, the
evaluation and the export of parameters take what they need. Nobody else asks which objective it
is. Imports errors, models, processes, weights and evaluators.
"""
