"""Image files in memory, in every supported format and mode."""

import functools
import io
import struct

import numpy as np
import tensorflow as tf
from PIL import Image

from vit_jax.data.preprocess import eval_image, normalise


def picture(height, width, mode='RGB', seed=0):
    """A smooth picture with some noise, so that JPEG has all kinds of coefficients."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(9 * x + 5 * y * k + k) for k in (1, 2, 3, 4)]
    pixels = 127 + 90 * np.stack(waves, -1) + random.normal(0, 12, (height, width, 4))
    pixels = np.clip(pixels, 0, 255).astype(np.uint8)
    if mode == 'I;16':
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 256 + pixels[..., 1])
    if mode in ('RGBA', 'CMYK'):
        return Image.fromarray(pixels, mode)
    if mode == 'LA':
        return Image.fromarray(pixels[..., :2].copy(), 'LA')
    image = Image.fromarray(pixels[..., :3].copy())
    return image.quantize(50) if mode == 'P' else image.convert(mode)


def encode(image, kind, **options):
    """The bytes of an image file, written by Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def evaluated(encoded, image_size, preprocess):
    """The pixels of an image file after the evaluation pipeline."""
    image = _evaluation(tuple(image_size), tuple(dict(preprocess).items()))(tf.constant(encoded))
    return normalise(image, preprocess)


@functools.cache
def _evaluation(image_size, preprocess):
    # A graph, like the pipeline: in eager mode, Python functions receive other bytes.
    return tf.function(lambda file: eval_image(file, image_size, dict(preprocess)), autograph=False)


def oriented(orientation):
    """EXIF data with an orientation, 1..8."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def heic(image, **options):
    """The bytes of a HEIC photo with exactly the pixels of an image. Needs pillow-heif."""
    import pillow_heif

    buffer = io.BytesIO()
    file = pillow_heif.from_pillow(image)
    file.save(buffer, quality=-1, chroma=444, matrix_coefficients=0, **options)
    return buffer.getvalue()


def deep_tiff(pixels):
    """A TIFF file of 16 bits a channel, which Pillow reads but does not write.

    Args:
      pixels: uint16 [height, width, 3 or 4].
    """
    height, width, channels = pixels.shape
    data = pixels.astype('<u2').tobytes()
    depths = struct.pack(f'<{channels}H', *[16] * channels)
    tags = {256: width, 257: height, 259: 1, 262: 2, 277: channels, 278: height, 279: len(data)}
    if channels == 4:
        tags[338] = 2  # the fourth channel is alpha
    start = 8 + 2 + 12 * (len(tags) + 2) + 4  # of what follows the table of tags
    tags[258] = start
    tags[273] = start + len(depths)
    table = struct.pack('<H', len(tags))
    for tag, value in sorted(tags.items()):
        count = channels if tag == 258 else 1
        kind = 3 if tag == 258 else 4  # 16 bits or 32 bits
        table += struct.pack('<HHII', tag, kind, count, value)
    return b'II*\0' + struct.pack('<I', 8) + table + bytes(4) + depths + data


def _random_16_bits(channels):
    pixels = np.random.default_rng(channels).integers(0, 2**16, (45, 61, channels))
    return pixels.astype(np.uint16)


def _deep_png(channels):
    return tf.io.encode_png(_random_16_bits(channels)).numpy()


def _without_adobe_marker(jpeg):
    at = jpeg.index(b'\xff\xee')  # APP14: it inverts the inks of CMYK
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], 'big') :]


def _ycck(jpeg):
    at = jpeg.index(b'Adobe') + 11
    return jpeg[:at] + b'\x02' + jpeg[at + 1 :]


def files(size=(45, 61)):
    """(name, bytes) of small files in all FORMATS and their modes."""

    def of(mode):
        return picture(*size, mode)

    def two_pictures(**options):
        # Of its own: Pillow leaves options of JPEG in a picture that it appends.
        second = picture(*size, seed=7)
        return encode(of('RGB'), 'MPO', save_all=True, append_images=[second], **options)

    more = [picture(*size, seed=7)]
    cmyk = encode(of('CMYK'), 'JPEG')
    found = {
        f'png {mode}': encode(of(mode), 'PNG')
        for mode in ('1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'I;16')
    }
    found |= {
        f'png of {bits} bits with a palette': encode(of('RGB').quantize(2**bits), 'PNG', bits=bits)
        for bits in (1, 2, 4)
    }
    found |= {f'png of 16 bits, {n} channels': _deep_png(n) for n in (1, 2, 3, 4)}
    found |= {f'tiff of 16 bits, {n} channels': deep_tiff(_random_16_bits(n)) for n in (3, 4)}
    found |= {
        'png P, one transparent colour': encode(of('P'), 'PNG', transparency=3),
        'png P, colours half transparent': encode(of('P'), 'PNG', transparency=bytes(range(50))),
        'png L, one transparent colour': encode(of('L'), 'PNG', transparency=120),
        'png RGB, one transparent colour': encode(of('RGB'), 'PNG', transparency=(1, 2, 3)),
        'png animated': encode(of('RGB'), 'PNG', save_all=True, append_images=more),
        'png with exif': encode(of('RGB'), 'PNG', exif=oriented(6)),
        'jpeg progressive': encode(of('RGB'), 'JPEG', progressive=True),
        'jpeg quality 50': encode(of('RGB'), 'JPEG', quality=50, subsampling=2),
        'jpeg quality 100': encode(of('RGB'), 'JPEG', quality=100, subsampling=0),
        'jpeg with exif': encode(of('RGB'), 'JPEG', exif=oriented(6)),
        'jpeg of two pictures': two_pictures(),
        'jpeg of two pictures with exif': two_pictures(exif=oriented(6)),
        'jpeg L': encode(of('L'), 'JPEG'),
        'jpeg RGB': encode(of('RGB'), 'JPEG'),
        'jpeg CMYK': cmyk,
        'jpeg CMYK with exif': encode(of('CMYK'), 'JPEG', exif=oriented(8)),
        'jpeg CMYK, not of Adobe': _without_adobe_marker(cmyk),
        'jpeg YCCK': _ycck(cmyk),
        'gif': encode(of('P'), 'GIF'),
        'gif L': encode(of('L'), 'GIF'),
        'gif animated': encode(of('P'), 'GIF', save_all=True, append_images=more),
        'gif transparent': encode(of('P'), 'GIF', transparency=3),
        'webp lossless': encode(of('RGB'), 'WEBP', lossless=True),
        'webp animated': encode(of('RGB'), 'WEBP', save_all=True, append_images=more),
        'webp with exif': encode(of('RGB'), 'WEBP', exif=oriented(5)),
        'avif with exif': encode(of('RGB'), 'AVIF', exif=oriented(3)),
        'tiff with exif': encode(of('RGB'), 'TIFF', exif=oriented(7)),
        'tiff of pages': encode(of('RGB'), 'TIFF', save_all=True, append_images=more),
        'jpeg2000 codestream': encode(of('RGB'), 'JPEG2000', no_jp2=True),
    }
    found |= {
        f'{kind.lower()} {mode}': encode(of(mode), kind)
        for kind, modes in {
            'BMP': ('1', 'L', 'P', 'RGB', 'RGBA'),
            'WEBP': ('RGB', 'RGBA', 'L'),
            'AVIF': ('RGB', 'RGBA', 'L'),
            'JPEG2000': ('L', 'LA', 'RGB', 'RGBA', 'I;16'),
            'PPM': ('1', 'L', 'RGB', 'I;16'),
            'TIFF': ('1', 'L', 'LA', 'P', 'RGB', 'RGBA', 'CMYK', 'I;16'),
        }.items()
        for mode in modes
    }
    found |= {
        f'tiff {method}': encode(of('RGB'), 'TIFF', compression=method)
        for method in ('tiff_lzw', 'tiff_deflate', 'jpeg', 'packbits')
    }
    return sorted(found.items())
