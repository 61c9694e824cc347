"""From a folder of photos to a classifier that one can trust, in one command.

A fit gets photos with labels, pre-trained weights and some minutes. It writes a directory with the
splits, all runs, the best model, its mistakes, and a page about them.
Imports errors, files, config, data, models, parallel, weights, workdir, evaluators, training,
measuring and reporting.
"""
