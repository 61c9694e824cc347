"""Pictures of the arrays of figures (ViT figures 4 to 14).

In: the arrays of a figure by name, and its title. Out: a Matplotlib Figure, 900 pixels wide at 100
to the inch. Imports errors, and Matplotlib only when something is drawn.
"""
