"""A case of the campaign, what may come of it, and how a failing one is kept.

A kind of faults is a module of this package with

    SECONDS, GIGABYTES      what a case may take
    KEEP_BYTES              optional: whether a kept case has the bytes of its input
    QUOTA                   cases that a campaign of 60 minutes must have
    prepare(bases)          writes the intact inputs below a directory, once
    draw(rng, bases)        (name of the intact input, changes) of a new case
    make(case, bases)       writes the damaged input into the working directory
    check(case, bases)      uses it: a word for what came of it, 'equal', 'loaded' ...

`check` raises UserError where the program refuses the input, and Failure where it does what it must
not. Any other exception is a failure, too, and so are the end of the process, more time or memory
than the kind allows, a file `executed` in the working directory, and lines that libraries or the
interpreter print beside the messages (`noise`).
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
MARK = 'executed'  # the file that malicious inputs try to make
_LONGEST_MESSAGE = 4000  # characters
# What the interpreter, libraries and the C++ code below them print. No message of the project looks
# like these.
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
# XLA writes this of every program that it reads from the compilation cache of the campaign. A user
# has another cache, with which machine.keep_compiled mutes it.
_OF_THE_CAMPAIGN = re.compile(r'^.*(?:cpu_aot_loader|cpu_aot_compilation).*\n?', re.MULTILINE)


class Failure(Exception):
    """What must not come of a case: (a word, what happened)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An input: an intact one and what is changed in it. Equal cases have equal bytes."""

    kind: str
    base: str
    changes: tuple  # of tuples (operation, its parameters ...), as JSON has them

    @property
    def module(self):
        return importlib.import_module(f'tests.campaign.{self.kind}')

    def describe(self):
        return f'{self.kind} {self.base} {json.dumps(self.changes)}'


@dataclasses.dataclass
class Outcome:
    """What came of a case."""

    word: str  # 'equal', 'refused' ..., or of a failure 'traceback', 'abort', 'hang' ...
    failed: bool = False
    detail: str = ''  # the message, or the end of the traceback
    where: str = ''  # of a traceback: the kind of error and the function of vit_jax
    seconds: float = 0.0  # of computing
    gigabytes: float = 0.0

    def signature(self, case):
        """Equal for failures that look like the same mistake."""
        where = self.where
        if self.word in ('hang', 'memory', 'abort', MARK) and not where.count('.'):
            where = f'{where}-{case.base}-{case.changes[0][0] if case.changes else ""}'
        return f'{case.kind}-{self.word}-{where}'.rstrip('-')


def of_commands(printed):
    """What was printed without the lines that only the cache of the campaign brings about."""
    return _OF_THE_CAMPAIGN.sub('', printed)


def noise(printed):
    """A Failure for what a library or the interpreter has printed; None where there is nothing."""
    printed = of_commands(printed)
    found = _NOISE.search(printed)
    if found is None:
        return None
    part = printed[max(found.start() - 200, 0) : found.start() + 1000]
    word = 'traceback' if 'Traceback' in found[0] else 'noise'
    return Failure(word, f'{found[0].strip()} was printed: {part}')


def require_no_noise(printed):
    """Raises Failure for what a library or the interpreter has printed."""
    if failure := noise(printed):
        raise failure


def refused(error):
    """The outcome of an error that a user can mend."""
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
    ours = [f for f in frames if '/vit_jax/' in f.filename] or frames
    at = f'{pathlib.Path(ours[-1].filename).stem}.{ours[-1].name}' if ours else ''
    word = 'memory' if isinstance(error, MemoryError) else 'traceback'
    return Outcome(
        word,
        True,
        f'{type(error).__name__}: {str(error)[:300]} in {at}',
        f'{type(error).__name__}-{at}',
    )


def keep(case, outcome, corpus, folder, about):
    """Writes a failing case: its recipe, and its bytes where they are few."""
    name = re.sub(r'[^\w.-]+', '_', outcome.signature(case))[:100]
    target = pathlib.Path(corpus) / name
    target.mkdir(parents=True, exist_ok=True)
    found = (
        []
        if not hasattr(case.module, 'KEEP_BYTES')
        else [p for p in sorted(folder.rglob('*')) if not p.is_dir() or not any(p.iterdir())]
    )
    plain = all(p.is_file() and not p.is_symlink() for p in found)  # a zip file has only these
    if found and plain and sum(p.stat().st_size for p in found) < 1 << 22:
        with zipfile.ZipFile(target / 'files.zip', 'w') as file:
            for path in found:
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
    given = json.loads((folder / 'case.json').read_text())
    return Case(given['kind'], given['base'], tuple(map(tuple, given['changes'])))


def unpack(entry, folder):
    """Writes the bytes of a kept case, if it has them, into a directory; False if it has none."""
    if not (entry / 'files.zip').exists():
        return False
    with zipfile.ZipFile(entry / 'files.zip') as file:
        file.extractall(folder)
    return True
