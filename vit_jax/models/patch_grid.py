"""How many whole patches an image has."""

from vit_jax.errors import UserError


def as_pair(size, field: str = 'size') -> tuple[int, int]:
    """Returns (height, width) for a number, a pair, or a tuple of one number.

    Raises:
      UserError: `size`, the value of `field`, is not one or two positive integers.
    """
    sides = (size,) if isinstance(size, int) else tuple(size)
    are_positive = all(isinstance(side, int) and side > 0 for side in sides)
    if len(sides) not in (1, 2) or not are_positive:
        raise UserError(
            f'{field} is {size!r}: expected one positive integer, or height and width, as in 224 '
            'or 224,160.',
            kind='value',
            field=field,
            value=size,
        )
    return (sides[0], sides[-1])


def whole_patches(
    image_size: tuple[int, int],
    patch_size: tuple[int, int],
    stride: int = 1,
    drop_partial: bool = False,
) -> tuple[int, int]:
    """Returns the (rows, columns) of patches of an image.

    Args:
      image_size: (height, width) in pixels.
      patch_size: (height, width) of a patch, in points of the feature map.
      stride: pixels per point of the feature map; 1 if the patches are cut from the image.
      drop_partial: ignore the points on the right and at the bottom that do not fill a patch.

    Raises:
      UserError: the patches do not tile the image, or the image is smaller than a patch. The
        message names the nearest sizes that fit.
    """
    height = -(-image_size[0] // stride)
    width = -(-image_size[1] // stride)
    rows, rest_of_height = divmod(height, patch_size[0])
    columns, rest_of_width = divmod(width, patch_size[1])
    is_smaller_than_a_patch = rows == 0 or columns == 0
    has_partial_patches = rest_of_height > 0 or rest_of_width > 0
    if is_smaller_than_a_patch or (has_partial_patches and not drop_partial):
        raise UserError(
            _message((height, width), patch_size, stride, can_drop=not is_smaller_than_a_patch),
            kind='value',
            field='image_size',
            value=image_size,
        )
    return rows, columns


def _message(size, patch_size, stride, can_drop):
    smaller = []
    larger = []
    for side, patch in zip(size, patch_size, strict=True):
        smaller.append(max(1, side // patch) * patch * stride)
        larger.append(max(1, -(-side // patch)) * patch * stride)
    nearest = f'The nearest image size is {smaller[0]}x{smaller[1]}'
    if larger != smaller:
        nearest = (
            f'The nearest image sizes are {smaller[0]}x{smaller[1]} and {larger[0]}x{larger[1]}'
        )
    subject = 'image_size'
    if stride > 1:
        subject = f'the size of the feature map (one point for {stride} pixels)'
    message = (
        f'{subject} {size[0]}x{size[1]} is not divisible by patch_size '
        f'{patch_size[0]}x{patch_size[1]}. {nearest}'
    )
    if can_drop:
        return f'{message}; model.partial_patches=drop ignores the rest of the image.'
    return f'{message}.'
