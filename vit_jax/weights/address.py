"""Weights at a web address, such as Google's in a public bucket: downloaded once, then cached."""

import hashlib
import http.client
import logging
import os
import shutil
import urllib.parse
import urllib.request

from vit_jax.errors import UserError
from vit_jax.files import cache_folder, named
from vit_jax.weights import array_files

log = logging.getLogger(__name__)

BUCKETS = 'https://storage.googleapis.com/'  # gs://BUCKET/FILE is at BUCKETS + BUCKET/FILE
SECONDS = 60  # a download fails after so many seconds without a byte


def fetch(source: str) -> str:
    """The local path of 'gs://BUCKET/FILE', 'https://HOST/FILE' or 'http://HOST/FILE'.

    Other sources are returned unchanged. Files are cached in vit_jax/weights of $XDG_CACHE_HOME, by
    default of ~/.cache; the user may delete them at any time. Raises UserError if the file cannot
    be downloaded or cached.
    """
    if not source.startswith(('gs://', 'https://', 'http://')):
        return source
    scheme, _, rest = source.partition('://')
    url = source
    if scheme == 'gs':
        url = BUCKETS + urllib.parse.quote(rest)
    # After unquoting, %2F is a slash that basename removes: the file stays in the cache.
    name = os.path.basename(urllib.parse.unquote(url.partition('?')[0]))
    if not (name.endswith(array_files.WEIGHT_FILES) and name.isprintable()):
        raise UserError(
            f'{source}: expected the address of a file that ends in '
            f'{", ".join(array_files.WEIGHT_FILES)}.',
            kind='value',
            file=source,
            value=name,
        )
    path = str(cache_folder('weights', hashlib.sha256(url.encode()).hexdigest()[:16], name))
    if not os.path.exists(path):
        with named(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with array_files.replacing(path) as temporary:
            _download(url, source, temporary)
    return path


def _download(url, source, path):
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as response, open(path, 'wb') as file:
            size = int(response.headers.get('Content-Length') or 0)
            log.info('Downloading %s (%s) to the cache', source, _size_in_words(size))
            shutil.copyfileobj(response, file)
            if file.tell() < size:
                raise ConnectionError(f'only {file.tell()} of {size} bytes arrived')
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: odd addresses
        raise UserError(
            f'{source} cannot be downloaded to {os.path.dirname(path)} ({error}): '
            'check the address, try again with a network, or download it elsewhere '
            'and name the file.',
            kind='unreadable',
            file=source,
        ) from error


def _size_in_words(size):
    if not size:
        return 'of unknown size'
    return f'{size / 1e6:.0f} MB'
