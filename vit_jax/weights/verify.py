"""Compares a written file with its source, in the program that the file is for."""

import dataclasses
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

LARGEST_DIFFERENCE = 1e-4  # largest difference of logits, or of probabilities
# The same for programs that compute in float16, as a part of the largest logit or probability.
LARGEST_HALF_DIFFERENCE = 1e-2
# (height, width) of the photos for programs that prepare them: wide, tall and small.
PHOTO_SIZES = ((301, 403), (500, 141), (21, 17))

Images = Float[np.ndarray, 'batch height width channels']
Logits = Float[np.ndarray, 'batch classes']


class CannotRunError(Exception):
    """The other program is not installed, or has no such model."""


def verify(loaded: Weights, written: Weights, path: str, to: str) -> None:
    """Compares the file with `written`, and `written` with `loaded`, on random images.

    Args:
      loaded: the weights of the source.
      written: `loaded` with the dtype and formulas of the file.
      path: the file.
      to: a layout, or one of export.FORMATS.

    Raises:
      UserError: logits of the file and of `written` differ by more than LARGEST_DIFFERENCE, or
        LARGEST_HALF_DIFFERENCE.
    """
    shape = (2, *written.image_size(), written.channels())
    batch = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    expected = logits(written, batch)
    actual, program = _logits_of_file(written, path, to, batch)
    if actual.shape != expected.shape:
        raise UserError(
            f'{path} gives logits of shape {actual.shape}: expected {expected.shape}.',
            kind='content',
            file=path,
        )
    difference = np.abs(actual - expected).max()
    log.info(
        'Verified %s by %s: largest difference of logits %.2g, largest logit %.2g',
        path,
        program,
        difference,
        np.abs(expected).max(),
    )
    if written is not loaded:
        is_same_model = written.model == loaded.model
        log.info(
            '%s changed logits by up to %.2g',
            '--dtype' if is_same_model else '--inexact, with --dtype if given,',
            np.abs(expected - logits(loaded, batch)).max(),
        )
    _check_difference(difference, _allowed(written, to, expected), loaded, path, 'logits')
    has_processor = os.path.isfile(os.path.join(path, 'preprocessor_config.json'))
    if has_processor and written.num_classes and written.channels() == 3:
        try:
            _verify_photo(written, path)
        except (ImportError, CannotRunError) as reason:
            log.info('Did not verify %s on a photo, because %s', path, reason)


def verify_on_photos(loaded: Weights, written: Weights, path: str) -> None:
    """Compares an ONNX file that prepares photos with `predict`, on drawn photos.

    Args:
      loaded: the weights of the source.
      written: `loaded` with the dtype and description of the file.
      path: the file, from embedded.with_preparation.

    Raises:
      UserError: probabilities differ by more than LARGEST_DIFFERENCE, or LARGEST_HALF_DIFFERENCE.
    """
    rng = np.random.default_rng(0)
    photos = [rng.integers(0, 256, (*size, 3), np.uint8) for size in PHOTO_SIZES]
    preprocess = _complete(written)
    prepared = [images.prepared(photo, written.image_size(), preprocess) for photo in photos]
    activation = jax.nn.sigmoid if written.loss == 'sigmoid' else jax.nn.softmax
    expected = np.asarray(activation(logits(written, np.stack(prepared))))
    rows = [export.run_on_photo(path, photo) for photo in photos]
    difference = max(
        np.abs(actual - row).max() for (actual, _), row in zip(rows, expected, strict=True)
    )
    log.info(
        'Verified %s by %s on %d photos: largest difference of probabilities %.2g, largest '
        'probability %.2g',
        path,
        rows[0][1],
        len(photos),
        difference,
        expected.max(),
    )
    allowed = _allowed(written, 'onnx', expected)
    _check_difference(difference, allowed, loaded, path, 'probabilities')


def _allowed(written, to, expected):
    """The largest difference from the expected outputs of a file in format `to`."""
    has_float16 = any(x.dtype == np.float16 for x in jax.tree.leaves(written.params))
    if to == 'onnx' and has_float16:  # the file computes in float16
        return LARGEST_HALF_DIFFERENCE * np.abs(expected).max()
    return LARGEST_DIFFERENCE


def _check_difference(difference, allowed, loaded, path, outputs):
    """Raises UserError for a difference of outputs, such as 'logits', above the allowed one."""
    if not difference <= allowed:
        raise UserError(
            f'{path} gives other {outputs} than {loaded.source}: they differ by up to '
            f'{difference:.2g}, expected at most {allowed:.2g}.',
            kind='content',
            file=path,
            value=float(difference),
        )


def _logits_of_file(written, path, to, batch):
    """(logits of the file, the program that computed them)."""
    try:
        if to in export.FORMATS:
            return export.run(path, to, batch)
        return other_logits(written, path, to, batch)
    except CannotRunError as reason:
        read_again = load(path, allow_nonfinite=True)
        return logits(read_again, batch), f'reading it again, because {reason}'


def _verify_photo(written, path):
    """Compares the preparation of a photo by transformers with ours, and the logits.

    `_possible_in_transformers` describes what a processor of transformers can do. Its pixels must
    equal the processor's pixels. Where `written` differs from it, for example in the rounding of
    the crop, the log reports the difference.
    """
    import transformers
    from sklearn import datasets

    photo = datasets.load_sample_images().filenames[0]  # 640 x 427
    # transformers has two backends of image processors; every installation has Pillow.
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend='pil')
    with Image.open(photo) as image:
        theirs = processor(image, return_tensors='np')['pixel_values'].transpose(0, 2, 3, 1)
    possible = _possible_in_transformers(written)
    ours = _prepared(possible, photo)
    if theirs.shape != ours.shape:
        raise UserError(
            f'transformers prepares photos for {path} in shape {theirs.shape}: '
            f'expected {ours.shape}.',
            kind='content',
            file=path,
            value=theirs.shape,
        )
    different = _percent_of_different_pixels(ours, theirs, possible)
    actual, _ = other_logits(written, path, 'huggingface', theirs)
    log.info(
        'On a photo prepared by transformers %.2g %% of the pixels differ by more than 1 of 255 '
        'from ours; largest difference of logits %.2g',
        different,
        np.abs(logits(written, ours) - actual).max(),
    )
    if different:
        raise UserError(
            f'transformers prepares photos for {path} in another way than {written.source} '
            f'requires: {different:.2g} % of the pixels differ by more than 1 of 255.',
            kind='content',
            file=path,
            value=float(different),
        )
    source = _prepared(written, photo)
    if not np.array_equal(source, ours):
        log.info(
            'The source prepares that photo differently: %.2g %% of the pixels differ by more than '
            '1 of 255, and logits by up to %.2g. transformers has no processor for %s',
            _percent_of_different_pixels(ours, source, possible),
            np.abs(logits(written, source) - actual).max(),
            published.words(written.preprocess or {}),
        )


def _possible_in_transformers(weights):
    """The weights with the closest preprocessing that transformers can do."""
    preprocess = _complete(weights)
    if preprocess['resize'] not in resizing.RESAMPLING:
        raise CannotRunError(f'transformers has no filter {preprocess["resize"]}')
    changes = {'antialias': True, 'uint8_resize': True}
    if preprocess['fit'] != 'squash':
        size = weights.image_size()
        target = resizing.target_size(size, preprocess)
        changes |= {'fit': 'transformers', 'crop_ratio': size[0] / target[0]}
    return dataclasses.replace(weights, preprocess=preprocess | changes)


def _complete(weights):
    return dict(config.base().preprocess) | (weights.preprocess or {})


def _prepared(weights, photo):
    return images.load(photo, weights.image_size(), _complete(weights))[None]


def _percent_of_different_pixels(ours, theirs, weights):
    grey_levels = 255 * np.abs(ours - theirs) * np.asarray(weights.preprocess['std'])
    return 100 * np.mean(grey_levels > 1)


def logits(weights: Weights, batch: Images) -> Logits:
    """Logits of our model, computed in float32."""
    model = models.build(weights.model, weights.num_classes, dtype='float32')
    with jax.default_matmul_precision('highest'):
        return np.asarray(jax.jit(model.apply)({'params': weights.params}, batch))


def other_logits(weights: Weights, path: str, layout: str, batch: Images) -> tuple[Logits, str]:
    """The logits of a file in its own program, in float32, and the program with its version.

    `weights` are the weights that were written to `path`. Raises CannotRunError with a reason if
    the program cannot run the file.
    """
    if layout not in PROGRAMS:
        raise CannotRunError(f'{layout} is a layout of vit_jax')
    try:
        import torch

        model, version = PROGRAMS[layout](weights, path)
    except ImportError as error:
        raise CannotRunError(
            f'a program that reads {layout} cannot be imported: {error}'
        ) from error
    with torch.inference_mode():
        out = model.float().eval()(torch.from_numpy(batch).permute(0, 3, 1, 2))
    # transformers returns an object: with logits if the model has a head, else with pooled tokens.
    out = getattr(out, 'logits', out)
    return getattr(out, 'pooler_output', out).numpy(), version


def _timm(weights, path):
    import timm as package

    if array_files.is_directory(path):
        model = package.create_model(f'local-dir:{path}', pretrained=True)
    else:
        model = _with_tensors(_new_timm_model(package, weights), path)
    return model, f'timm {package.__version__}'


def _npz_in_timm(weights, path):
    """Reads a file of Google's in timm, if timm's arguments can express the model's formulas."""
    import timm as package

    fields = weights.model
    if 'hidden_size' not in fields or fields['resnet'] or fields['representation_size']:
        raise CannotRunError("timm computes this model by other formulas than Google's code")
    with np.load(path) as file:
        if any(file[name].dtype.kind == 'V' for name in file):  # NumPy's files have no bfloat16
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

    if weights.num_classes:
        model_class = transformers.AutoModelForImageClassification
    elif weights.model['representation_size']:
        model_class = transformers.AutoModel
    else:
        raise CannotRunError('without a head or hidden layer transformers gives tokens')
    model = model_class.from_pretrained(path, dtype=torch.float32)
    return model, f'transformers {transformers.__version__}'


def _torchvision(weights, path):
    import torchvision

    if not weights.num_classes:
        raise CannotRunError('torchvision builds models with a head only')
    fields = weights.model
    model = torchvision.models.VisionTransformer(
        image_size=weights.image_size()[0],
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
    """The PyTorch model with the tensors of a file."""
    import safetensors.torch
    import torch

    if path.endswith('.safetensors'):
        tensors = safetensors.torch.load_file(path)
    else:
        tensors = torch.load(path, weights_only=True)
    model.load_state_dict(tensors, strict=True)
    return model


# By layout: (weights, path) -> (the PyTorch model with these weights, the program and its version).
PROGRAMS: dict[str, Callable] = {
    'timm': _timm,
    'google': _npz_in_timm,
    'big_vision': _npz_in_timm,
    'huggingface': _huggingface,
    'torchvision': _torchvision,
}
