"""Computation on many devices: the mesh, the shardings of arrays, and batches in parts.

In: sizes of the mesh, trees of arrays. Out: meshes, shardings, global arrays. Imports `errors`
only.
"""
