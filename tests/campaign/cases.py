"""Cases of the campaign, their outcomes, and the corpus of failing cases.

Each kind of fault is a module of this package with

    SECONDS, GIGABYTES      limits of a case
    KEEP_BYTES              optional: whether the corpus has the bytes of its inputs
    QUOTA                   number of cases in a campaign of 60 minutes
    prepare(bases)          writes the intact inputs into a directory, once
    draw(rng, bases)        (name of the intact input, changes) of a new case
    make(case, bases)       writes the damaged input into the working directory
    check(case, bases)      uses the input; returns a word, such as 'equal' or 'loaded'

`check` raises UserError if the program refuses the input, and Failure if the program does something
wrong. These are failures as well: any other exception, the end of the process, more time or memory
than the kind allows, a file `executed` in the working directory, and lines that libraries or the
interpreter print between the messages (`noise`).
"""

import dataclasses
import importlib
import json
import pathlib
import re
import traceback
import zipfile

KINDS = (
    'weights',
    'sidecars',
    'configs',
    'images',
    'workdirs',
    'kills',
    'limits',
    'numbers',
    'datasets',
    'signals',
    'outputs',
)
CORPUS = pathlib.Path(__file__).parent / 'corpus'
MARK = 'executed'  # the file that malicious inputs try to create
_LONGEST_MESSAGE = 4000  # characters
# Output of the interpreter, of libraries and of their C++ code. No message of the project matches.
_NOISE = re.compile(
    r'Traceback \(most recent call last\)'
    r'|[\w./-]+\.(?:cc|cpp|cu|h):\d+\] '  # a log line of TensorFlow, XLA, gRPC or Gloo
    r'|Begin stack trace|^\s+@ +0x[0-9a-f]+|PC: @ '
    r'|terminate called|libc\+\+abi|Fatal Python error|Segmentation fault|core dumped'
    r'|Exception ignored in|Task exception was never retrieved|--- Logging error ---'
    r'|\.py:\d+: \w*Warning: '
    r'|libpng (?:error|warning)|WARNING: All log messages',
    re.MULTILINE,
)
# XLA prints this for every program that it reads from the compilation cache of the campaign. For
# the cache of a user, machine.keep_compiled mutes XLA.
_OF_THE_CAMPAIGN = re.compile(r'^.*(?:cpu_aot_loader|cpu_aot_compilation).*\n?', re.MULTILINE)


class Failure(Exception):
    """A wrong behaviour of the program: (a word, a description)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An intact input and its changes. Equal cases have equal bytes."""

    kind: str
    base: str
    changes: tuple  # tuples (operation, parameters ...) of JSON values

    @property
    def module(self):
        return importlib.import_module(f'tests.campaign.{self.kind}')

    def describe(self):
        return f'{self.kind} {self.base} {json.dumps(self.changes)}'


@dataclasses.dataclass
class Outcome:
    """The outcome of a case."""

    word: str  # 'equal', 'refused' ..., or for a failure 'traceback', 'abort', 'hang' ...
    failed: bool = False
    detail: str = ''  # the message, or the end of the traceback
    where: str = ''  # for a traceback: the kind of error and the function of vit_jax
    seconds: float = 0.0  # processor time
    gigabytes: float = 0.0

    def signature(self, case):
        """A text that is equal for failures that look like the same mistake."""
        where = self.where
        if self.word in ('hang', 'memory', 'abort', MARK) and not where.count('.'):
            where = f'{where}-{case.base}-{case.changes[0][0] if case.changes else ""}'
        return f'{case.kind}-{self.word}-{where}'.rstrip('-')


def of_commands(printed):
    """The output without the lines that only the cache of the campaign causes."""
    return _OF_THE_CAMPAIGN.sub('', printed)


def noise(printed):
    """A Failure for output of a library or the interpreter; None if there is none."""
    printed = of_commands(printed)
    match = _NOISE.search(printed)
    if match is None:
        return None
    part = printed[max(match.start() - 200, 0) : match.start() + 1000]
    word = 'traceback' if 'Traceback' in match[0] else 'noise'
    return Failure(word, f'{match[0].strip()} was printed: {part}')


def require_no_noise(printed):
    """Raises Failure for output of a library or the interpreter."""
    failure = noise(printed)
    if failure:
        raise failure


def refused(error):
    """The outcome of an error that the user can fix."""
    message = str(error)
    if len(message) > _LONGEST_MESSAGE or noise(message) or not message.strip():
        return Outcome('no message', True, f'{len(message)} characters: {message[:300]}')
    return Outcome('refused', detail=message)


def failed(error):
    """The outcome of any other error."""
    if isinstance(error, Failure):
        word, detail = error.args
        return Outcome(word, True, detail, re.sub(r'\W+|\d+', ' ', detail)[:40].strip())
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [f for f in frames if '/vit_jax/' in f.filename] or frames
    at = ''
    if own_frames:
        at = f'{pathlib.Path(own_frames[-1].filename).stem}.{own_frames[-1].name}'
    word = 'memory' if isinstance(error, MemoryError) else 'traceback'
    return Outcome(
        word,
        True,
        f'{type(error).__name__}: {str(error)[:300]} in {at}',
        f'{type(error).__name__}-{at}',
    )


def keep(case, outcome, corpus, folder, about):
    """Writes a failing case to the corpus: its changes, and its bytes if they are few."""
    name = re.sub(r'[^\w.-]+', '_', outcome.signature(case))[:100]
    target = pathlib.Path(corpus) / name
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    if hasattr(case.module, 'KEEP_BYTES'):
        paths = [p for p in sorted(folder.rglob('*')) if not p.is_dir() or not any(p.iterdir())]
    # A zip file can contain only regular files.
    are_regular = all(p.is_file() and not p.is_symlink() for p in paths)
    if paths and are_regular and sum(p.stat().st_size for p in paths) < 1 << 22:
        with zipfile.ZipFile(target / 'files.zip', 'w') as file:
            for path in paths:
                info = zipfile.ZipInfo(str(path.relative_to(folder)))  # without a date
                file.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
        if (target / 'files.zip').stat().st_size > 1 << 16:
            (target / 'files.zip').unlink()
    text = json.dumps(
        dataclasses.asdict(case) | about | {'outcome': outcome.word, 'detail': outcome.detail},
        indent=1,
    )
    (target / 'case.json').write_text(text + '\n')


def kept(folder):
    """The case in a directory of the corpus."""
    fields = json.loads((folder / 'case.json').read_text())
    return Case(fields['kind'], fields['base'], tuple(map(tuple, fields['changes'])))


def unpack(entry, folder):
    """Writes the bytes of a case of the corpus into a directory; returns False if it has none."""
    if not (entry / 'files.zip').exists():
        return False
    with zipfile.ZipFile(entry / 'files.zip') as file:
        file.extractall(folder)
    return True
