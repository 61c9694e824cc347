"""Writes docs/reference/commands.md from the parsers of the commands.

    python docs/generate.py

Run it after a change of an option or of a command's documentation. tests/commands_docs_test.py
fails while the file is out of date.
"""

import argparse
import contextlib
import importlib
import pathlib
import re
import textwrap
from unittest import mock

from vit_jax import cli

FILE = pathlib.Path(__file__).parent / 'reference' / 'commands.md'
# In the order in which a reader meets them.
COMMANDS = (
    'main',
    'fit',
    'sweep',
    'vtab',
    'evaluate',
    'predict',
    'convert',
    'report',
    'figures',
    'benchmark',
    'plan',
)
# A title, a sentence, and the function that adds the options to a parser.
SHARED = (
    (
        'Options about weights',
        'These options name weights and describe them where the file does not.',
        cli.add_weights_options,
    ),
    (
        'Options about processes',
        'These options connect several processes into one run.',
        cli.add_process_options,
    ),
)
HEAD = """# Commands

This page lists every command and option for users who know which command they need.
`python docs/generate.py` writes it from the parsers, so it says the same as `--help`.

Commands that train or plan also take `--config.FIELD=VALUE` for every field of
[the config](config.md). An option is given once unless its text allows more.
"""


def parser_of(command: str) -> cli.Parser:
    """The parser that a command makes for its options."""
    main = importlib.import_module(f'vit_jax.{command}').main
    parsers = []

    def keep(parser, file=None):
        parsers.append(parser)

    with mock.patch.object(cli.Parser, 'print_help', keep), contextlib.suppress(SystemExit):
        main.__wrapped__(['--help'])
    return parsers[0]


def options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """One line of Markdown for each option, by its name, in the order of --help."""
    lines = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        lines[_name(action)] = _line(action)
    return lines


def _name(action):
    """The name that the docs use; a second spelling with hyphens is left out."""
    names = [name for name in action.option_strings if '-' not in name.lstrip('-')]
    return (names or action.option_strings or [action.metavar or action.dest.upper()])[0]


def _line(action):
    name = _name(action)
    metavar = action.metavar or action.dest.upper()
    if action.choices:
        metavar = '|'.join(map(str, action.choices))
    if not action.option_strings:
        usage = name
    elif isinstance(action, argparse.BooleanOptionalAction):
        usage = ', '.join(action.option_strings)
    elif action.nargs == 0:
        usage = name
    else:
        usage = f'{name} {metavar}' if '=' in metavar else f'{name}={metavar}'
    text = f'- `{usage}`' + (f': {_escaped(_help(action))}' if _help(action) else '')
    return textwrap.fill(text, 100, subsequent_indent='  ', break_long_words=False)


def _help(action):
    """The help, with the default where the help does not state it."""
    text = (action.help or '') % {**vars(action), 'prog': ''}
    default = action.default
    has_default = isinstance(default, str | int | float) and not isinstance(default, bool)
    if has_default and default != argparse.SUPPRESS and str(default) not in text:
        text = f'{text} (default: {default})'.strip()
    return text


def _escaped(text):
    """Text as Markdown shows it: without HTML and emphasis."""
    return re.sub(r'([<*])', r'\\\1', ' '.join(text.split()))


def described(documentation: str) -> str:
    """The documentation of a module as Markdown: indented examples are fenced."""
    blocks = []
    for block in re.split(r'\n\s*\n', documentation.strip()):
        if block.startswith(('    ', 'python -m ')):
            language = 'sh' if 'python -m ' in block else 'text'
            blocks.append(f'```{language}\n{textwrap.dedent(block)}\n```')
        else:
            blocks.append(textwrap.fill(_escaped(block), 100))
    return '\n\n'.join(blocks)


def shared_sections() -> list[tuple[str, str, dict[str, str]]]:
    """Title, sentence and options of the sections that several commands refer to."""
    sections = []
    for title, sentence, add_options in SHARED:
        parser = cli.Parser(add_help=False)
        add_options(parser)
        sections.append((title, sentence, options_of(parser)))
    return sections


def section_of(command: str, shared: list[tuple[str, str, dict[str, str]]]) -> str:
    """The section of one command."""
    parser = parser_of(command)
    options = options_of(parser)
    lines = [f'## {command}', '', described(parser.description), '']
    also = []
    for title, _, common in shared:
        same = [name for name in common if options.get(name) == common[name]]
        if len(same) > 1:
            for name in same:
                del options[name]
            names = ', '.join(f'`{name}`' for name in same)
            anchor = title.lower().replace(' ', '-')
            also.append(f'[{title}](#{anchor}): {names}.')
    lines += options.values()
    for sentence in also:
        lines += ['', sentence]
    return '\n'.join(lines).strip() + '\n'


def markdown() -> str:
    """The whole page."""
    shared = shared_sections()
    sections = [section_of(command, shared) for command in COMMANDS]
    for title, sentence, options in shared:
        sections.append('\n'.join([f'## {title}', '', sentence, '', *options.values()]) + '\n')
    return '\n'.join([HEAD, *sections])


if __name__ == '__main__':
    FILE.write_text(markdown())
