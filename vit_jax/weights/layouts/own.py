"""This project's own: the workdir of a run, and a single .safetensors file.

The file has our parameters as model.init names them, and everything else of Weights as JSON in its
metadata.
"""

import json
import os

from vit_jax.errors import UserError
from vit_jax.weights.layout import Layout, Reading
from vit_jax.weights.model import Weights, with_defaults
from vit_jax.workdir import checkpoint, record

_KEY = 'vit_jax'
_FIELDS = ('model', 'num_classes', 'classes', 'preprocess')


def from_run(workdir: str, step: int | None) -> Weights:
    """Parameters of a checkpoint, the newest readable one by default; averaged if the run averages.

    Raises UserError if no checkpoint can be read, or not the files that belong to it.
    """
    config, classes = record.read(workdir)
    params, step = checkpoint.load_params(workdir, step)
    preprocess = {'image_size': config['image_size'], **config['preprocess']}
    return Weights(params, with_defaults(_tuples(config['model'])),
                   config['dataset']['num_classes'], classes, _tuples(preprocess), 'workdir',
                   os.path.join(record.checkpoint_directory(workdir), str(step)))


def _read(contents):
    try:
        stated = json.loads(contents.metadata[_KEY])
        model, num_classes, classes, preprocess = (stated[name] for name in _FIELDS)
        return Reading(contents.arrays, with_defaults(_tuples(model)), (), num_classes, classes,
                       _tuples(preprocess))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError('the file has the arrays of a vit_jax model but not its fields, which '
                        'belong in the metadata: write it again with weights.save.') from error


def _tuples(value):
    """JSON's lists as the tuples they were."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


LAYOUT = Layout(mark=r'blocks/.+|resnet/root_conv/kernel', suffixes=('.safetensors',), read=_read,
                native=True, metadata=lambda weights: {
                    _KEY: json.dumps({name: getattr(weights, name) for name in _FIELDS})})
