"""Campaigns: commands that train several runs in one directory and compare them.

In: the config of every run, by directory. Out: the runs, their scores on the test splits as a table
in the log and as a JSON file, and one page that compares the runs. A stopped campaign resumes with
the same call. Imports errors, files, config, data, workdir, training and reporting.
"""
