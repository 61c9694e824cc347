"""Several processes act as one: they start, decide and stop together.

In: the number of this process (from flags or the launcher's environment), values, errors.
Out: the same decision on all processes, and a last line that explains why a process ended.
Imports errors, machine and the public functions of JAX.
"""
