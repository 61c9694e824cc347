"""A folder that classifies photos in a browser, from any static server, on the user's device.

In: weights with classes. Out: a folder with the model as ONNX, onnxruntime-web and a page. The page
prepares photos like vit_jax.predict and requests only the other files of the folder. Imports
errors, files, data, workdir, weights, and reporting, whose style sheet it uses. No other package
runs npm.
"""

from vit_jax.web.folder import FILES, MODEL, save

__all__ = ['FILES', 'MODEL', 'save']
