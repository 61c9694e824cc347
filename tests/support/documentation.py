"""The pages of the documentation: their commands, tables, links and headings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.support.runs import ROOT

GENERATED = 'commands.md', 'config.md'
ARCHIVE = ROOT / 'docs/lab-notes'
PAGES = [
    *(ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'SECURITY.md')),
    *sorted((ROOT / 'docs').rglob('*.md')),
]
# Pages that are written by hand and current. The archive keeps commands of earlier versions.
WRITTEN = [page for page in PAGES if page.name not in GENERATED and ARCHIVE not in page.parents]

_FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r'vit_jax\.\w+')


def name_of(page: Path) -> str:
    """The path of a page from the root of the repository."""
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return [code for fence, code in _FENCE.findall(text) if fence == language]


def prose(text: str) -> str:
    """The text without fenced code blocks."""
    return _FENCE.sub('', text)


def inline_code(text: str) -> list[str]:
    """The code between single backticks, outside of fenced blocks."""
    return re.findall(r'`([^`\n]+)`', prose(text))


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (module, arguments) of every vit_jax command in shell blocks and in tables."""
    lines = '\n'.join(blocks(text, 'sh')).replace('\\\n', ' ').splitlines()
    in_tables = (cell.strip('`') for row in tables(text) for cell in row)
    lines += [cell for cell in in_tables if cell.startswith('python -m ')]
    for line in lines:
        words = shlex.split(line, comments=True)
        for end, word in enumerate(words):
            if word in ('|', '>', '&&'):
                words = words[:end]
                break
        module, arguments = _module_of(words)
        if module:
            yield module, arguments


def _module_of(words):
    """(vit_jax.X, arguments) of the words of a command; (None, []) for other commands."""
    for position, word in enumerate(words):
        if word == '-m' and position and 'python' in words[position - 1]:
            module = words[position + 1]
            return (module if _MODULE.fullmatch(module) else None), words[position + 2 :]
        if word.startswith('launch/'):
            arguments = words[position + 1 :]
            if word == 'launch/local.sh':
                arguments = arguments[1:]  # the number of processes
            chosen = [each.partition('=')[2] for each in words if each.startswith('MODULE=')]
            module = chosen[0] if chosen else 'vit_jax.main'
            return (module, arguments) if arguments else (None, [])
    return None, []


def tables(text: str) -> Iterator[list[str]]:
    """Yields the cells of each row of each table."""
    for line in prose(text).splitlines():
        if line.startswith('|') and not re.fullmatch(r'[|\s:-]+', line):
            yield [cell.strip() for cell in re.split(r'(?<!\\)\|', line)[1:-1]]


def links(text: str) -> list[str]:
    """The relative targets of links and images."""
    targets = re.findall(r'\]\(([^)\s]+)\)', prose(text))
    return [target for target in targets if not re.match(r'[a-z]+:', target)]


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as MkDocs and code hosts make them."""
    headings = re.findall(r'^#+ (.+)$', prose(page.read_text()), re.MULTILINE)
    plain = [re.sub(r'[^\w\s-]', '', heading).strip().lower() for heading in headings]
    return {re.sub(r'[-\s]+', '-', heading) for heading in plain}
