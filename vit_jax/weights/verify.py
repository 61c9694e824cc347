"""Compares what was written with what it was written from, in the program it was written for."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float
from PIL import Image

from vit_jax import config, models
from vit_jax.data import images, resizing
from vit_jax.errors import UserError
from vit_jax.weights import array_files, export, published
from vit_jax.weights.layouts import timm
from vit_jax.weights.model import Weights
from vit_jax.weights.read import load

log = logging.getLogger(__name__)

LARGEST_DIFFERENCE = 1e-4  # of logits

Images = Float[np.ndarray, 'batch height width channels']
Logits = Float[np.ndarray, 'batch classes']


class CannotRunError(Exception):
    """The program is not installed, or has no such model."""


def verify(loaded: Weights, written: Weights, path: str, to: str) -> None:
    """Compares the file at `path` with `written`, and that with `loaded`, on random images.

    `written` is `loaded` with the dtype and formulas of the file; `to` is a layout, or one of
    export.FORMATS. Raises UserError if logits differ by more than LARGEST_DIFFERENCE.
    """
    shape = (2, *written.image_size(), written.channels())
    batch = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    expected = logits(written, batch)
    try:
        found, how = (
            export.run(path, to, batch)
            if to in export.FORMATS
            else other_logits(written, path, to, batch)
        )
    except CannotRunError as reason:
        found = logits(load(path, allow_nonfinite=True), batch)
        how = f'reading back, because {reason}'
    if found.shape != expected.shape:
        raise UserError(f'{path} gives logits of shape {found.shape}, expected {expected.shape}.')
    difference = np.abs(found - expected).max()
    log.info(
        'verified by %s: largest difference of logits %.2g, largest logit %.2g',
        how,
        difference,
        np.abs(expected).max(),
    )
    if written is not loaded:
        change = np.abs(expected - logits(loaded, batch)).max()
        log.info(
            '%s changed logits by up to %.2g',
            '--dtype' if written.model == loaded.model else '--inexact, with --dtype if given,',
            change,
        )
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(
            f'{path} gives other logits than {loaded.source}: they differ by up to '
            f'{difference:.2g}, at most {LARGEST_DIFFERENCE:g} was expected.'
        )
    processor = os.path.isfile(os.path.join(path, 'preprocessor_config.json'))
    if processor and written.num_classes and written.channels() == 3:
        try:
            _verify_photo(written, path)
        except (ImportError, CannotRunError) as reason:
            log.info('not verified on a photo, because %s', reason)


def _verify_photo(written, path):
    """Compares a photo that transformers prepares with the same from ours, end to end.

    A processor of transformers must give the pixels that it can give for what `written` says.
    Where that is less than `written` says, such as another rounding of the crop, the log tells what
    it changes.
    """
    import transformers
    from sklearn import datasets

    photo = datasets.load_sample_images().filenames[0]  # 640 x 427
    # Of the two backends of transformers, the one that every installation has.
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend='pil')
    with Image.open(photo) as image:
        theirs = processor(image, return_tensors='np')['pixel_values'].transpose(0, 2, 3, 1)
    possible = _as_transformers_can(written)
    ours = _prepared(possible, photo)
    if theirs.shape != ours.shape:
        raise UserError(
            f'transformers prepares photos for {path} in shape {theirs.shape}, '
            f'expected {ours.shape}.'
        )
    others = _percent_of_other_pixels(ours, theirs, possible)
    found, _ = other_logits(written, path, 'huggingface', theirs)
    change = np.abs(logits(written, ours) - found).max()
    log.info(
        'on a photo, which transformers prepared: %.2g %% of the pixels differ by more than '
        '1 of 255 from ours; largest difference of logits %.2g',
        others,
        change,
    )
    if others:
        raise UserError(
            f'transformers prepares photos for {path} in another way than '
            f'{written.source} asks for: {others:.2g} % of the pixels of one differ by more than 1 '
            'of 255.'
        )
    source = _prepared(written, photo)
    if not np.array_equal(source, ours):
        log.info(
            'as the source prepares that photo, %.2g %% of the pixels differ by more than 1 of '
            '255, and logits by up to %.2g: transformers has no processor for %s',
            _percent_of_other_pixels(ours, source, possible),
            np.abs(logits(written, source) - found).max(),
            published.words(written.preprocess or {}),
        )


def _as_transformers_can(weights):
    """The weights with the preprocessing that comes nearest to theirs in transformers."""
    given = _complete(weights)
    if given['resize'] not in resizing.RESAMPLING:
        raise CannotRunError(f'transformers has no filter {given["resize"]}')
    changes = {'antialias': True, 'uint8_resize': True}
    if given['fit'] != 'squash':
        side = weights.image_size()[0]
        target = resizing.target_size(weights.image_size(), given)[0]
        changes |= {'fit': 'transformers', 'crop_ratio': side / target}
    return dataclasses.replace(weights, preprocess=given | changes)


def _complete(weights):
    return dict(config.base().preprocess) | (weights.preprocess or {})


def _prepared(weights, photo):
    return images.load(photo, weights.image_size(), _complete(weights))[None]


def _percent_of_other_pixels(ours, theirs, weights):
    grey_levels = 255 * np.abs(ours - theirs) * np.asarray(weights.preprocess['std'])
    return 100 * np.mean(grey_levels > 1)


def logits(weights: Weights, batch: Images) -> Logits:
    """What our model gives, in float32."""
    model = models.build(weights.model, weights.num_classes, dtype='float32')
    with jax.default_matmul_precision('highest'):
        return np.asarray(jax.jit(model.apply)({'params': weights.params}, batch))


def other_logits(weights: Weights, path: str, layout: str, batch: Images) -> tuple[Logits, str]:
    """What the file at `path` gives in its own program, in float32, and that program's version.

    `weights` is what was written there. Raises CannotRunError, which says why.
    """
    if layout not in PROGRAMS:
        raise CannotRunError(f"layout {layout} is this project's own")
    try:
        import torch

        model, version = PROGRAMS[layout](weights, path)
    except ImportError as error:
        raise CannotRunError(
            f'a program that reads {layout} cannot be imported: {error}'
        ) from error
    with torch.inference_mode():
        out = model.float().eval()(torch.from_numpy(batch).permute(0, 3, 1, 2))
    out = getattr(out, 'logits', out)
    return getattr(out, 'pooler_output', out).numpy(), version


def _timm(weights, path):
    import timm as package

    model = (
        package.create_model(f'local-dir:{path}', pretrained=True)
        if array_files.is_directory(path)
        else _with_tensors(_new_timm_model(package, weights), path)
    )
    return model, f'timm {package.__version__}'


def _npz_in_timm(weights, path):
    """timm reads Google's files of models whose formulas its arguments can express."""
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
    return model, f'the .npz reader of timm {package.__version__}'


def _new_timm_model(package, weights):
    name = timm.architecture(weights.model)
    if name is None:
        raise CannotRunError('timm has no named ResNet of these sizes')
    return package.create_model(
        name, num_classes=weights.num_classes, **timm.model_arguments(weights)
    )


def _huggingface(weights, path):
    import torch
    import transformers

    if not (weights.num_classes or weights.model['representation_size']):
        raise CannotRunError('without a head or hidden layer transformers gives tokens')
    kind = (
        transformers.AutoModelForImageClassification
        if weights.num_classes
        else transformers.AutoModel
    )
    model = kind.from_pretrained(path, dtype=torch.float32)
    return model, f'transformers {transformers.__version__}'


def _torchvision(weights, path):
    import torchvision

    fields, (height, _) = weights.model, weights.image_size()
    if not weights.num_classes:
        raise CannotRunError('torchvision builds models with a head only')
    model = torchvision.models.VisionTransformer(
        image_size=height,
        patch_size=fields['patch_size'][0],
        num_layers=fields['num_layers'],
        num_heads=fields['num_heads'],
        hidden_dim=fields['hidden_size'],
        mlp_dim=fields['mlp_dim'],
        num_classes=weights.num_classes,
        representation_size=fields['representation_size'] or None,
    )
    return _with_tensors(model, path), f'torchvision {torchvision.__version__}'


def _with_tensors(model, path):
    import safetensors.torch
    import torch

    load = (
        safetensors.torch.load_file
        if path.endswith('.safetensors')
        else functools.partial(torch.load, weights_only=True)
    )
    model.load_state_dict(load(path), strict=True)
    return model


# By layout: (weights, path) -> the PyTorch model that holds them, and the program that made it.
PROGRAMS: dict[str, Callable] = {
    'timm': _timm,
    'google': _npz_in_timm,
    'big_vision': _npz_in_timm,
    'huggingface': _huggingface,
    'torchvision': _torchvision,
}
