"""The files of a run; the only package that knows their paths and formats.

In: config, class names, state, metrics. Out: files that survive a crash, and the same values when
they are read again. Imports errors, files, config, processes and evaluators (for the descriptions
of metrics). Only this package uses Orbax.
"""
