"""Released weights in, results out: parameters from and to the layouts of other programs.

In: a file, directory, workdir, address or name on the Hugging Face hub. Out: Weights (parameters
with the model that they belong to); files that the other programs read; programs that run without
vit_jax. Imports errors, files, fields, models, config, workdir, data.images and data.resizing;
PyTorch and the hub only when they are needed.

    from vit_jax import weights
    w = weights.load('hf:google/vit-base-patch16-224')
    features, probabilities = weights.predictor(w)(weights.prepare(w, ['cat.jpg']))
    weights.save(w, 'b16.npz', 'google')
"""

from vit_jax.weights.apply import predictor, prepare
from vit_jax.weights.description import described
from vit_jax.weights.layouts import LAYOUTS
from vit_jax.weights.loaded import Loaded, build, fastest_model
from vit_jax.weights.model import Weights
from vit_jax.weights.read import kind_of, load
from vit_jax.weights.write import approximate, misfits, save

__all__ = [
    'LAYOUTS',
    'Loaded',
    'Weights',
    'approximate',
    'build',
    'described',
    'fastest_model',
    'kind_of',
    'load',
    'misfits',
    'predictor',
    'prepare',
    'save',
]
