"""How fast a config is on this machine, and other projects beside it.

In: a complete config. Out: seconds of its steps, in rounds that take turns, with the work and the
memory that they need. Imports training and the rooms below it; data only for workloads that read
it, PyTorch only in the process of a peer.
"""
