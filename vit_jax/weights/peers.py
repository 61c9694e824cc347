"""Runs files in the programs they are for, where those are installed."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import files
from vit_jax.weights.layouts import timm
from vit_jax.weights.model import Weights


class CannotRunError(Exception):
    """The program is not there, or has no such model."""


def logits(weights: Weights, path: str, layout: str, images: np.ndarray) -> tuple[np.ndarray, str]:
    """What the file at `path` gives in its own program, in float32, and that program's version.

    Args:
      weights: what was written there.
      images: float32 [batch, height, width, channels].

    Raises:
      CannotRunError: it is not installed, or has no such model; says why.
    """
    if layout not in _RUN:
        raise CannotRunError(f'layout {layout} is this project\'s own')
    try:
        import torch
        model, version = _RUN[layout](weights, path)
    except ImportError as error:
        raise CannotRunError(
            f'a program that reads {layout} cannot be imported: {error}') from error
    with torch.inference_mode():
        out = model.float().eval()(torch.from_numpy(images).permute(0, 3, 1, 2))
    out = getattr(out, 'logits', out)
    return getattr(out, 'pooler_output', out).numpy(), version


def _timm(weights, path):
    import timm as package
    version = f'timm {package.__version__}'
    if files.is_directory(path):
        return package.create_model(f'local-dir:{path}', pretrained=True), version
    model = _new_timm_model(package, weights)
    model.load_state_dict(_tensors(path), strict=True)
    return model, version


def _npz_in_timm(weights, path):
    """timm reads Google's files: those of the models whose formulas it can be told."""
    import timm as package
    fields = weights.model
    if 'hidden_size' not in fields or fields['resnet'] or fields['representation_size']:
        raise CannotRunError("timm computes this model by other formulas than Google's code")
    with np.load(path) as file:
        if any(file[name].dtype.kind == 'V' for name in file):  # NumPy's files know no bfloat16
            raise CannotRunError('timm reads no bfloat16 from an .npz file')
        if {'cls', 'pos_embedding'} <= set(file) or 'sincos_2d' in fields['position']:
            raise CannotRunError('timm has no such position embeddings')
    model = _new_timm_model(package, weights)
    model.load_pretrained(path)
    return model, f"the .npz reader of timm {package.__version__}"


def _new_timm_model(package, weights):
    try:
        config = timm.write_config(weights)
    except UserError as error:
        raise CannotRunError('timm has no named ResNet of these sizes') from error
    return package.create_model(config['architecture'], num_classes=weights.num_classes,
                                **config['model_args'])


def _huggingface(weights, path):
    import torch
    import transformers
    version = f'transformers {transformers.__version__}'
    if weights.num_classes:
        return transformers.AutoModelForImageClassification.from_pretrained(
            path, dtype=torch.float32), version
    if not weights.model['representation_size']:
        raise CannotRunError('without a head or hidden layer transformers gives tokens')
    return transformers.AutoModel.from_pretrained(path, dtype=torch.float32), version


def _torchvision(weights, path):
    import torchvision
    fields, (height, _) = weights.model, weights.image_size()
    if not weights.num_classes:
        raise CannotRunError('torchvision builds models with a head only')
    model = torchvision.models.VisionTransformer(
        image_size=height, patch_size=fields['patch_size'][0], num_layers=fields['num_layers'],
        num_heads=fields['num_heads'], hidden_dim=fields['hidden_size'],
        mlp_dim=fields['mlp_dim'], num_classes=weights.num_classes,
        representation_size=fields['representation_size'] or None)
    model.load_state_dict(_tensors(path), strict=True)
    return model, f'torchvision {torchvision.__version__}'


def _tensors(path):
    import torch
    if path.endswith('.safetensors'):
        from safetensors.torch import load_file
        return load_file(path)
    return torch.load(path, weights_only=True)


_RUN = {'timm': _timm, 'google': _npz_in_timm, 'big_vision': _npz_in_timm,
        'huggingface': _huggingface, 'torchvision': _torchvision}
