"""What a run writes and reads back; the only room that knows its paths and formats.

In: config, class names, state, metrics. Out: files that survive a crash, and the same values when
they are read again. Imports errors, files, config, processes and evaluators (what metrics are);
only this room uses Orbax.
"""
