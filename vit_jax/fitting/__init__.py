"""From a folder of photos to a classifier that one can trust, in one command.

In: photos with labels, pre-trained weights, and the minutes that there are. Out: a directory with
the splits, the runs that were tried, the best model, what it gets wrong, and a page with all of it.
Imports errors, files, config, data, models, parallel, weights, workdir, evaluators, training,
measuring and reporting.
"""
