"""What is measured: accuracies, losses, classifiers of frozen features, or a function of the user.

In: a Context with a model, its data and the devices. Out: a SumEvaluator or an Evaluator, one
value, and a Metric that describes each of its numbers. The loop of training and the command
evaluate run the same values. Imports errors, options, plugins, parallel and models.
"""
