"""The learned properties of a model, as arrays (ViT section 4.5, appendices D.4, D.7 and D.8).

In: a model with its parameters and prepared images, or the workdirs of runs. Out: arrays, which
drawing/ turns into figures. Imports errors, files, models, workdir and weights; JAX and NumPy.
"""
