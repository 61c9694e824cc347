"""This project's own: a workdir or one of its checkpoints, and a single .safetensors file.

The file has our parameters as model.init names them, and everything else of Weights as JSON in its
metadata.
"""

import json
import logging
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.errors import UserError
from vit_jax.weights import files
from vit_jax.weights.model import Weights, with_defaults
from vit_jax.workdir import checkpoint

log = logging.getLogger(__name__)

MARK = r'blocks/.+|resnet/root_conv/kernel'
SUFFIXES = ('.safetensors',)
_KEY = 'vit_jax'


def load_file(metadata: dict[str, str], path: str) -> dict:
    """Fields of Weights that a .safetensors file has in its metadata.

    Raises UserError when it has none.
    """
    try:
        given = json.loads(metadata[_KEY])
        return dict(model=with_defaults(tuples(given['model'])), num_classes=given['num_classes'],
                    classes=given['classes'], preprocess=tuples(given['preprocess']))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f'{path} has the arrays of a vit_jax model but not its fields, which '
                        'stand in the metadata: write it again with weights.save.') from error


def metadata(weights: Weights) -> dict[str, str]:
    """The metadata of a .safetensors file."""
    return {_KEY: json.dumps({name: getattr(weights, name) for name in (
        'model', 'num_classes', 'classes', 'preprocess')})}


def tuples(value):
    """JSON's lists as the tuples they were."""
    if isinstance(value, dict):
        return {k: tuples(v) for k, v in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def find_workdir(path: str) -> tuple[str, int | None] | None:
    """The workdir that a path is or is a checkpoint of, and the checkpoint's step."""
    if os.path.isdir(os.path.join(path, 'checkpoints')):
        return path, None
    folder, step = os.path.split(os.path.abspath(path))
    if step.isdigit() and os.path.basename(folder) == 'checkpoints' and os.path.isdir(path):
        return os.path.dirname(folder), int(step)
    return None


def load_workdir(workdir: str, step: int | None) -> Weights:
    """Parameters of a checkpoint, the newest readable one unless named; averaged where they are.

    Raises:
      UserError: there is no readable checkpoint, config.json or classes.json.
    """
    config = files.read_json(os.path.join(workdir, 'config.json'))
    classes = files.read_json(os.path.join(workdir, 'classes.json'), list)
    folder = os.path.join(os.path.abspath(workdir), 'checkpoints')
    steps = [step] if step is not None else sorted(
        (int(name) for name in os.listdir(folder) if name.isdigit()), reverse=True)
    for candidate in steps:
        try:
            params = _restore(os.path.join(folder, str(candidate)))
            break
        except Exception as error:  # Orbax and TensorStore raise all kinds for a broken file
            log.warning('the checkpoint of step %d in %s cannot be read: %s', candidate, workdir,
                        str(error).partition('\n')[0])
    else:
        raise UserError(f'{workdir} has no checkpoint that can be read (tried: '
                        f'{", ".join(map(str, steps)) or "there is none"}).')
    preprocess = {'image_size': config['image_size'], **config['preprocess']}
    return Weights(params=params, model=with_defaults(tuples(config['model'])), classes=classes,
                   num_classes=config['dataset']['num_classes'], preprocess=tuples(preprocess),
                   layout='workdir', source=os.path.join(folder, str(candidate)))


def _restore(folder):
    """Reads the parameters alone and compares them with the fingerprint they were saved with."""
    state = epath.Path(folder) / 'state'
    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(state).tree
    name = 'ema_params' if tree.get('ema_params') else 'params'
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), {name: tree[name]})
    params = handler.restore(state, args=ocp.args.PyTreeRestore(
        item={name: tree[name]}, restore_args=args, partial_restore=True))[name]
    saved = ocp.JsonCheckpointHandler().restore(epath.Path(folder) / 'meta')['fingerprint']
    found = checkpoint.describe_fingerprint(params)
    if any(saved[f'.{name}{key}'] != value for key, value in found.items()):
        raise ValueError('arrays differ from what was saved')
    return params
