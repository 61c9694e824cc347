"""Campaigns: commands that train several runs in one directory and compare them.

In: the config of every run, by directory. Out: the runs, their accuracies on the test splits as a
table in the log and as a JSON file, and one page that shows the runs side by side. A campaign that
was stopped continues with the same call. Imports errors, config, data, workdir, training and
reporting.
"""
