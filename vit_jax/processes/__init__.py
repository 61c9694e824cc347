"""Many processes act as one: they start, decide and stop together, with public JAX functions only.

In: who this process is (flags or the launcher's environment), values of each process, errors.
Out: the same decision on all processes, and a last line that says why a process ended.
Imports errors, machine and JAX; never config, workdir, data or a command.
"""
