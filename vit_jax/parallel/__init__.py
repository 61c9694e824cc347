"""One computation on many devices: the mesh, what lies where, and batches in parts.

In: sizes of the mesh, trees of arrays. Out: meshes, shardings, global arrays. Imports errors only.
"""
