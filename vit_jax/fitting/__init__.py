"""From a folder of photos to a classifier that one can trust, in one command.

In: photos with labels, pre-trained weights, and a number of minutes. Out: a directory with the
splits, all runs, the best model, its mistakes, and a page about them.
Imports errors, files, config, data, models, parallel, weights, workdir, evaluators, training,
measuring and reporting.
"""
