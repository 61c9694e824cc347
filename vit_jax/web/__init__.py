"""A folder that classifies photos in a browser, from any static server and on the user's device.

In: weights with classes. Out: a folder with the model as ONNX, onnxruntime-web and a page, which
prepares photos as prediction does and asks for nothing but the files beside it. Imports errors,
files, data, workdir, weights, and reporting, whose style it has; only this room uses npm.
"""

from vit_jax.web.folder import FILES, MODEL, save

__all__ = ['FILES', 'MODEL', 'save']
