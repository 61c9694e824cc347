"""How platforms compute the layers of a transformer.

In: the fields attention_kernel and linear_kernel of `config.model`. Out: a Backend, one value that
model code calls (registry.get). A backend imports the plain layers of models/ that it replaces,
and no other backend but xla.
"""
