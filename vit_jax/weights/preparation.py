"""How programs without vit_jax prepare images for an exported model.

The instructions are a record in the metadata of ONNX files, and lines of Python that need only
Pillow and NumPy.
"""

import json
from collections.abc import Mapping

from vit_jax.data import resizing
from vit_jax.weights import description
from vit_jax.weights.model import Weights

# Keys of an ONNX file's metadata_props; docs/how-to/export.md describes the values.
PREPROCESS = 'vit_jax.preprocess'
CLASSES = 'vit_jax.classes'
LOSS = 'vit_jax.loss'

_PILLOW_NAMES = {'bilinear': 'BILINEAR', 'bicubic': 'BICUBIC', 'lanczos3': 'LANCZOS'}
# The weight of an old pixel by its distance x, in NumPy, as in data/resizing.py.
_KERNELS = {
    'bilinear': 'np.maximum(1 - x, 0)',
    'bicubic': 'np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, '
    'np.where(x < 2, ((2.5 - 0.5 * x) * x - 4) * x + 2, 0))',
    'lanczos3': 'np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)',
}


def metadata(weights: Weights) -> dict[str, str]:
    """The metadata of an ONNX file: the preparation of images, the class names, and the loss.

    A model for other images than RGB has no record of the preparation. A model without classes has
    no names and no loss. Defaults are logged as by description.complete_preprocess and class_names.
    """
    texts = {}
    if weights.channels() == 3:
        preprocess = description.complete_preprocess(weights)
        texts[PREPROCESS] = json.dumps({'image_size': weights.image_size(), **preprocess})
    if weights.num_classes:
        names = description.class_names(weights)
        texts[CLASSES] = json.dumps(names, ensure_ascii=False)
        texts[LOSS] = weights.loss or 'softmax'
    return texts


def python_lines(weights: Weights, path: str, to: str) -> str:
    """Python that prepares `photo.jpg` and runs the program at `path`, one of export.FORMATS.

    With `uint8_resize` its pixels equal the pixels of vit_jax.predict; otherwise they differ by
    rounding. Raises UserError for a model of other images than RGB.
    """
    description.check_rgb(weights)
    preprocess = description.complete_preprocess(weights)
    lines = [
        'import numpy as np',
        'from PIL import Image, ImageOps',
        "photo = ImageOps.exif_transpose(Image.open('photo.jpg')).convert('RGB')",
        *_resizing_lines(preprocess, weights.image_size()),
        f'images = ((pixels / 255 - np.float32({_numbers(preprocess["mean"])}))'
        f' / np.float32({_numbers(preprocess["std"])})).astype(np.float32)[None]',
        *_running_lines(path, to),
    ]
    if weights.num_classes and weights.loss == 'sigmoid':
        lines.append('probabilities = 1 / (1 + np.exp(-logits))')
    elif weights.num_classes:
        lines.append('exp = np.exp(logits - logits.max(-1, keepdims=True))')
        lines.append('probabilities = exp / exp.sum(-1, keepdims=True)')
    return '\n'.join(lines)


def python_lines_for_photo(path: str) -> str:
    """Python that opens `photo.jpg` and runs the ONNX program with preparation at `path`."""
    return '\n'.join(
        [
            'import numpy as np',
            'import onnxruntime',
            'from PIL import Image, ImageOps',
            "photo = ImageOps.exif_transpose(Image.open('photo.jpg')).convert('RGB')",
            f'session = onnxruntime.InferenceSession({path!r})',
            "(probabilities,) = session.run(['probabilities'], {'photo': np.asarray(photo)})",
        ]
    )


def _resizing_lines(preprocess: Mapping, image_size):
    """Lines that compute `pixels`, float [height, width, 3] from 0 to 255, from `photo`."""
    height, width = image_size
    is_uncropped = preprocess['fit'] == 'squash' and preprocess['crop_ratio'] == 1
    has_pillow = resizing.is_uint8_resize(preprocess)
    if is_uncropped and has_pillow:
        name = _PILLOW_NAMES[preprocess['resize']]
        return [
            f'photo = photo.resize(({width}, {height}), Image.Resampling.{name})',
            'pixels = np.asarray(photo, np.float32)',
        ]
    top = _crop_offset('new_height', height, preprocess['fit'])
    left = _crop_offset('new_width', width, preprocess['fit'])
    size = _size_lines(preprocess, image_size)
    if has_pillow:
        name = _PILLOW_NAMES[preprocess['resize']]
        return [
            *size,
            f'photo = photo.resize((new_width, new_height), Image.Resampling.{name})',
            f'top, left = {top}, {left}',
            f'pixels = np.asarray(photo, np.float32)[top : top + {height}, left : left + {width}]',
        ]
    return [
        *size,
        f'top, left = {top}, {left}',
        'def weights_of(old, new):  # [new, old]: which pixels a new one is made of',
        *_weights_lines(preprocess),
        '    return weights / weights.sum(1, keepdims=True)',
        'rows, columns = weights_of(photo.height, new_height), weights_of(photo.width, new_width)',
        f'rows, columns = rows[top : top + {height}], columns[left : left + {width}]',
        "pixels = np.einsum('yr,rcd,xc->yxd', rows, np.asarray(photo), columns, optimize=True)",
    ]


def _size_lines(preprocess, image_size):
    """Lines that compute `new_height` and `new_width` from `photo`; see resizing.fitted_size."""
    height, width = resizing.target_size(image_size, preprocess)
    if preprocess['fit'] == 'squash':
        return [f'new_height, new_width = {height}, {width}']
    if preprocess['fit'] == 'cover':  # rounds to the nearest
        new_height = f'(2 * {width} * photo.height + photo.width) // (2 * photo.width)'
        new_width = f'(2 * {height} * photo.width + photo.height) // (2 * photo.height)'
    else:
        new_height = f'{width} * photo.height // photo.width'
        new_width = f'{height} * photo.width // photo.height'
    return [
        f'new_height = max({new_height}, {height})',
        f'new_width = max({new_width}, {width})',
    ]


def _crop_offset(name, length, fit):
    """An expression for resizing.crop_offset; the difference is the variable `name` - `length`."""
    if fit in ('torchvision', 'squash'):  # rounds half a pixel to an even number
        return f'round(({name} - {length}) / 2)'
    return f'({name} - {length}) // 2'


def _weights_lines(preprocess):
    """Lines that compute `weights`, [new, old], from the lengths `old` and `new`."""
    if preprocess['resize'] == 'area':
        return [
            '    edges = np.arange(new + 1) * old / new',
            '    pixel = np.arange(old)',
            '    weights = np.minimum(edges[1:, None], pixel + 1) - np.maximum('
            'edges[:-1, None], pixel)',
            '    weights = np.maximum(weights, 0)',
        ]
    stretch = 'max(old / new, 1)' if preprocess['antialias'] else '1'
    return [
        '    middle = (np.arange(new) + 0.5) * old / new',
        f'    x = np.abs(np.arange(old) + 0.5 - middle[:, None]) / {stretch}',
        f'    weights = {_KERNELS[preprocess["resize"]]}',
    ]


def _running_lines(path, to):
    """Lines that compute `logits` from `images`."""
    if to == 'onnx':
        return [
            'import onnxruntime',
            f'session = onnxruntime.InferenceSession({path!r})',
            "logits = session.run(['logits'], {'images': images})[0]",
        ]
    return [
        'import jax',
        f"exported = jax.export.deserialize(bytearray(open({path!r}, 'rb').read()))",
        'logits = np.asarray(exported.call(images))',
    ]


def _numbers(values):
    return f'[{", ".join(str(float(x)) for x in values)}]'
