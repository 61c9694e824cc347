"""ONNX programs that take one photo of any size and return probabilities.

The graph prepares the photo as data/resizing.py does and is written in the text format of ONNX.
Each side is resized by a product with a matrix [new, old] of weights, which the graph computes from
the size of the photo. The operator Resize of onnxruntime 1.31 cannot replace this: it has no
Lanczos filter, it cannot shrink by a bicubic filter without antialiasing, and some of its rounded
pixels differ from Pillow's by one grey level.
"""

import string
from collections.abc import Mapping
from typing import Any

from vit_jax.data import resizing
from vit_jax.weights import description
from vit_jax.weights.model import Weights

PHOTO = 'photo'
PROBABILITIES = 'probabilities'

# photo: [rows, columns, 3]; new_rows and new_columns: the size before the central crop;
# planes: [3, rows, columns]; resized: [3, height, width].
_PREPARATION = string.Template("""
<ir_version: $ir_version, opset_import: ["": $opset, "vit_jax": 1]>
prepare (uint8[rows, columns, 3] photo) => (float[1, $height, $width, 3] images)
<int64 height = {$height}, int64 width = {$width},
 int64 target_height = {$target_height}, int64 target_width = {$target_width},
 int64 first = {0}, int64 second = {1}, int64[1] batch_axis = {0},
 float[3] mean = {$mean}, float[3] std = {$std}, float white = {255}>
{
  size = Shape (photo)
  old_rows = Gather (size, first)
  old_columns = Gather (size, second)
  $new_size
  row_weights = vit_jax.weights_of (old_rows, new_rows, height)
  transposed_weights = vit_jax.weights_of (old_columns, new_columns, width)
  column_weights = Transpose <perm = [1, 0]> (transposed_weights)
  byte_planes = Transpose <perm = [2, 0, 1]> (photo)
  $resizing
  pixels = Transpose <perm = [1, 2, 0]> (resized)
  fractions = Div (pixels, white)
  centred = Sub (fractions, mean)
  normalised = Div (centred, std)
  images = Unsqueeze (normalised, batch_axis)
}

<domain: "vit_jax", opset_import: ["": $opset]>
fitted (old, other_old, least, other_target) => (new)
{
  one = Constant <value_int = 1> ()
  two = Constant <value_int = 2> ()
  rounds_to_nearest = Constant <value_int = $rounds_to_nearest> ()
  half = Mul (rounds_to_nearest, other_old)
  doubled = Mul (two, old)
  product = Mul (doubled, other_target)
  rounded_product = Add (product, half)
  doubled_other = Mul (two, other_old)
  scaled = Div (rounded_product, doubled_other)
  new = Max (scaled, least)
}

<domain: "vit_jax", opset_import: ["": $opset]>
crop_offset (difference) => (offset)
{
  two = Constant <value_int = 2> ()
  $offset
}

<domain: "vit_jax", opset_import: ["": $opset, "vit_jax": 1]>
weights_of (old, new, length) => (weights)
{
  zero_length = Constant <value_int = 0> ()
  one_length = Constant <value_int = 1> ()
  last_axis = Constant <value_ints = [1]> ()
  zero = Constant <value = double {0}> ()
  half = Constant <value = double {0.5}> ()
  one = Constant <value = double {1}> ()
  difference = Sub (new, length)
  begin = vit_jax.crop_offset (difference)
  end = Add (begin, length)
  new_numbers = Range (begin, end, one_length)
  new_row = Cast <to = 11> (new_numbers)
  new_pixels = Unsqueeze (new_row, last_axis)
  old_numbers = Range (zero_length, old, one_length)
  old_pixels = Cast <to = 11> (old_numbers)
  exact_old = Cast <to = 11> (old)
  exact_new = Cast <to = 11> (new)
  scale = Div (exact_old, exact_new)
  $weights
  sums = ReduceSum (unscaled, last_axis)
  exact_weights = Div (unscaled, sums)
  $precision
}

<domain: "vit_jax", opset_import: ["": $opset]>
sinc (x) => (y)
{
  zero = Constant <value = double {0}> ()
  one = Constant <value = double {1}> ()
  pi = Constant <value = double {3.141592653589793}> ()
  is_zero = Equal (x, zero)
  angle = Mul (x, pi)
  safe_angle = Where (is_zero, one, angle)
  sine = Sin (safe_angle)
  ratio = Div (sine, safe_angle)
  y = Where (is_zero, one, ratio)
}

<domain: "vit_jax", opset_import: ["": $opset]>
rounded (fractions) => (levels)
{
  half = Constant <value = double {0.5}> ()
  black = Constant <value = double {0}> ()
  white = Constant <value = double {255}> ()
  raised = Add (fractions, half)
  whole = Floor (raised)
  levels = Clip (whole, black, white)
}
""")

_SQUASHED = """
  new_rows = Identity (target_height)
  new_columns = Identity (target_width)
"""
_FITTED = """
  new_rows = vit_jax.fitted (old_rows, old_columns, target_height, target_width)
  new_columns = vit_jax.fitted (old_columns, old_rows, target_width, target_height)
"""

_OFFSET = '  offset = Div (difference, two)'
# Rounds half a pixel to an even number, see resizing.crop_offset.
_OFFSET_TO_EVEN = """
  rounded_down = Div (difference, two)
  is_odd = Mod (rounded_down, two)
  raised = Add (difference, is_odd)
  offset = Div (raised, two)
"""

# With fractions, in float32.
_FRACTIONS = """
  planes = Cast <to = 1> (byte_planes)
  narrow = MatMul (planes, column_weights)
  resized = MatMul (row_weights, narrow)
"""
_FRACTION_WEIGHTS = '  weights = Cast <to = 1> (exact_weights)'
# With Pillow's rounding: weights are multiples of 2**-22, and each result is a whole number.
# Sums are exact in double, so that the pixels equal Pillow's.
_WIDTH_FIRST = """
  planes = Cast <to = 11> (byte_planes)
  narrow = MatMul (planes, column_weights)
  narrow_levels = vit_jax.rounded (narrow)
  exact_levels = MatMul (row_weights, narrow_levels)
  levels = vit_jax.rounded (exact_levels)
  resized = Cast <to = 1> (levels)
"""
# Pillow resizes the height of tall images first, see resizing.is_height_first.
_TALL_HEIGHT_FIRST = string.Template("""
  planes = Cast <to = 11> (byte_planes)
  removed_rows = Sub (old_rows, new_rows)
  removed_columns = Sub (old_columns, new_columns)
  doubled_columns = Add (removed_columns, removed_columns)
  is_shrunk = Greater (removed_rows, first)
  is_slim = Greater (removed_rows, doubled_columns)
  is_tall = And (is_shrunk, is_slim)
  exact_levels = If (is_tall) <
    then_branch = height_first () => (double[3, $height, $width] tall_levels) {
      low = MatMul (row_weights, planes)
      low_levels = vit_jax.rounded (low)
      tall_levels = MatMul (low_levels, column_weights)
    },
    else_branch = width_first () => (double[3, $height, $width] wide_levels) {
      narrow = MatMul (planes, column_weights)
      narrow_levels = vit_jax.rounded (narrow)
      wide_levels = MatMul (row_weights, narrow_levels)
    }
  >
  levels = vit_jax.rounded (exact_levels)
  resized = Cast <to = 1> (levels)
""")
_PILLOW_WEIGHTS = """
  units = Constant <value = double {4194304}> ()
  exact_units = Mul (exact_weights, units)
  raised_units = Add (exact_units, half)
  whole_units = Floor (raised_units)
  weights = Div (whole_units, units)
"""

# Old pixels within the area of a new pixel, [length, old].
_AREA = """
  left = Mul (new_pixels, scale)
  right = Add (left, scale)
  old_right = Add (old_pixels, one)
  overlap_left = Max (left, old_pixels)
  overlap_right = Min (right, old_right)
  overlap = Sub (overlap_right, overlap_left)
  unscaled = Max (overlap, zero)
"""
# Distances of old pixels from the middle of a new pixel, [length, old].
_DISTANCES = string.Template("""
  new_middles = Add (new_pixels, half)
  middles = Mul (new_middles, scale)
  old_middles = Add (old_pixels, half)
  differences = Sub (old_middles, middles)
  distances = Abs (differences)
  stretch = $stretch
  x = Div (distances, stretch)
""")
# The weight of an old pixel by its distance x, as in data/resizing.py.
_KERNELS = {
    'bilinear': """
  falling = Sub (one, x)
  unscaled = Max (falling, zero)
""",
    'bicubic': """
  two = Constant <value = double {2}> ()
  near_2 = Constant <value = double {-2.5}> ()
  near_3 = Constant <value = double {1.5}> ()
  far_1 = Constant <value = double {-4}> ()
  far_2 = Constant <value = double {2.5}> ()
  far_3 = Constant <value = double {-0.5}> ()
  near_a = Mul (near_3, x)
  near_b = Add (near_a, near_2)
  near_c = Mul (near_b, x)
  near_d = Mul (near_c, x)
  near = Add (near_d, one)
  far_a = Mul (far_3, x)
  far_b = Add (far_a, far_2)
  far_c = Mul (far_b, x)
  far_d = Add (far_c, far_1)
  far_e = Mul (far_d, x)
  far = Add (far_e, two)
  is_near = Less (x, one)
  is_far = Less (x, two)
  far_or_zero = Where (is_far, far, zero)
  unscaled = Where (is_near, near, far_or_zero)
""",
    'lanczos3': """
  three = Constant <value = double {3}> ()
  third = Div (x, three)
  wave = vit_jax.sinc (x)
  window = vit_jax.sinc (third)
  product = Mul (wave, window)
  is_inside = Less (x, three)
  unscaled = Where (is_inside, product, zero)
""",
}

_ACTIVATION = string.Template("""
activate (float[1, $classes] logits) => (float[1, $classes] probabilities)
{
  probabilities = $activation (logits)
}
""")


def with_preparation(program: Any, weights: Weights) -> Any:
    """The ONNX program with the preparation of a photo before it and the activation after it.

    Args:
      program: an onnx.ModelProto from `images` to `logits`, see export.onnx_program.
      weights: the weights of the program, for RGB images and with classes.

    Returns:
      An onnx.ModelProto from `photo`, uint8 [height, width, 3], to `probabilities`, float32
      [1, classes].
    """
    import onnx

    opsets = {entry.domain: entry.version for entry in program.opset_import}
    preparation = onnx.parser.parse_model(preparation_text(weights, program.ir_version, opsets['']))
    activation = onnx.parser.parse_graph(_activation_text(weights))
    graph = onnx.compose.merge_graphs(preparation.graph, program.graph, [('images', 'images')])
    graph = onnx.compose.merge_graphs(graph, activation, [('logits', 'logits')], name='vit_jax')
    opsets['vit_jax'] = 1
    return onnx.helper.make_model(
        graph,
        ir_version=program.ir_version,
        opset_imports=[onnx.helper.make_opsetid(*entry) for entry in opsets.items()],
        functions=preparation.functions,
    )


def preparation_text(weights: Weights, ir_version: int, opset: int) -> str:
    """A model in the text format of ONNX from `photo` to `images`, float32 [1, height, width, 3].

    Args:
      weights: the weights; they describe the preparation.
      ir_version: the version of the ONNX format.
      opset: the version of ONNX's operators.
    """
    preprocess = description.complete_preprocess(weights)
    height, width = weights.image_size()
    target_height, target_width = resizing.target_size((height, width), preprocess)
    fit = preprocess['fit']
    has_pillow = resizing.is_uint8_resize(preprocess)
    return _PREPARATION.substitute(
        ir_version=ir_version,
        opset=opset,
        height=height,
        width=width,
        target_height=target_height,
        target_width=target_width,
        mean=_numbers(preprocess['mean']),
        std=_numbers(preprocess['std']),
        new_size=_SQUASHED if fit == 'squash' else _FITTED,
        rounds_to_nearest=int(fit == 'cover'),
        offset=_OFFSET_TO_EVEN if fit in ('torchvision', 'squash') else _OFFSET,
        weights=_weights_text(preprocess),
        precision=_PILLOW_WEIGHTS if has_pillow else _FRACTION_WEIGHTS,
        resizing=_resizing_text(has_pillow, height, width),
    )


def _weights_text(preprocess: Mapping) -> str:
    """The lines that compute `unscaled` from `old_pixels`, `new_pixels` and `scale`."""
    if preprocess['resize'] == 'area':
        return _AREA
    stretch = 'Identity (one)'
    if preprocess['antialias']:
        stretch = 'Max (scale, one)'
    return _DISTANCES.substitute(stretch=stretch) + _KERNELS[preprocess['resize']]


def _resizing_text(has_pillow, height, width):
    """The lines that compute `resized` from `byte_planes` and the two matrices of weights."""
    if not has_pillow:
        return _FRACTIONS
    if not resizing.RESIZES_TALL_IMAGES_DOWNWARDS_FIRST:
        return _WIDTH_FIRST
    return _TALL_HEIGHT_FIRST.substitute(height=height, width=width)


def _activation_text(weights):
    activation = 'Softmax <axis = -1>'
    if weights.loss == 'sigmoid':
        activation = 'Sigmoid'
    return _ACTIVATION.substitute(classes=weights.num_classes, activation=activation)


def _numbers(values):
    return ', '.join(str(float(x)) for x in values)
