"""docs/reference/commands.md agrees with the parsers of the commands."""

import runpy

import pytest

from tests.support.runs import ROOT

GENERATE = runpy.run_path(str(ROOT / 'docs/generate.py'))


def test_commands_page_is_up_to_date():
    """`python docs/generate.py` writes it."""
    assert (ROOT / 'docs/reference/commands.md').read_text() == GENERATE['markdown']()


def test_every_command_is_listed():
    """A command is a module of the package with a parser of its own."""
    commands = {
        path.stem for path in (ROOT / 'vit_jax').glob('*.py') if '@cli.command' in path.read_text()
    }
    assert commands == set(GENERATE['COMMANDS'])


@pytest.mark.parametrize('command', GENERATE['COMMANDS'])
def test_every_option_is_on_the_page(command):
    parser = GENERATE['parser_of'](command)
    page = (ROOT / 'docs/reference/commands.md').read_text()
    for name in GENERATE['options_of'](parser):
        assert f'`{name}' in page
