"""From a folder of photos to a classifier that one can trust, in one command.

In: photos with labels, pre-trained weights, and the minutes that there are. Out: a directory with
the splits, the runs that were tried, the best model, and what it gets wrong. Imports errors, files,
config, data, models, weights, evaluators, training, campaigns and reporting.
"""
