"""Evaluators: accuracies, losses, classifiers of frozen features, or a user's function.

In: a Context with a model, its data and the devices. Out: a SumEvaluator or an Evaluator, one value
with a Metric for each of its numbers. The training loop and the command evaluate run the same
evaluators. Imports errors, options, plugins, parallel and models.
"""
