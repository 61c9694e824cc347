"""HEIC photos, the format of many phones: their endings, their first bytes, and their decoder.

The decoder is pillow-heif, which the extra `photos` installs. Nothing else needs it.
"""

import importlib.util
import io
from typing import Any

SUFFIXES = ('.heic', '.heif', '.hif')
HOW_TO_INSTALL = "Install it with: pip install -e '.[photos]'"
# Brands of images and sequences that HEVC encodes (ISO/IEC 23008-12, annex B).
_BRANDS = {b'heic', b'heix', b'heim', b'heis', b'hevc', b'hevx', b'hevm', b'hevs'}
_LONGEST_BOX = 1024  # bytes; the first box of a photo has about 40


def has_suffix(name: str) -> bool:
    """Whether a file has the ending of a HEIC photo."""
    return name.lower().endswith(SUFFIXES)


def is_heic(encoded: bytes) -> bool:
    """Whether a file begins as a HEIC photo does, whatever its ending."""
    if encoded[4:8] != b'ftyp':
        return False
    # Length and name of the box, major brand, version, compatible brands; four bytes each.
    length = min(int.from_bytes(encoded[:4], 'big'), _LONGEST_BOX)
    brands = {encoded[8:12]}
    for start in range(16, length, 4):
        brands.add(encoded[start : start + 4])
    return bool(brands & _BRANDS)


def is_installed() -> bool:
    """Whether the decoder is installed."""
    return importlib.util.find_spec('pillow_heif') is not None


def read(encoded: bytes) -> Any:
    """Reads the header of a HEIC photo.

    Returns:
      A pillow_heif.HeifFile. Its `size` is (width, height), and its `to_pillow()` decodes the main
      image. This image is upright: the format has its own rotation, and the EXIF orientation does
      not apply. More than 8 bits a channel are reduced to 8, except for grey images.

    Raises:
      ValueError: if the decoder is not installed.
      Exception: of any other class, if the file is damaged.
    """
    if not is_installed():
        raise ValueError(f'a HEIC photo needs the package pillow-heif. {HOW_TO_INSTALL}')
    import pillow_heif  # optional

    return pillow_heif.open_heif(io.BytesIO(encoded))
