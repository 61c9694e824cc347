"""Implementations of the layers of a transformer for CPUs, GPUs and all platforms.

In: the fields attention_kernel and linear_kernel of `config.model`. Out: a Backend, the value that
model code calls (registry.get). A backend imports the plain layers of models/ that it replaces, and
xla, but no other backend.
"""
