"""The commands and links of the README are valid."""

import re

import pytest

from tests.support.runs import ROOT
from vit_jax import cli
from vit_jax import config as config_lib

README = (ROOT / 'README.md').read_text()
OPTIONS = re.findall(r'`(--config=[^`]+)`', README)


def test_readme_has_commands():
    assert len(OPTIONS) >= 6


@pytest.mark.parametrize('options', OPTIONS)
def test_command_of_the_readme_is_possible(options, monkeypatch):
    monkeypatch.chdir(ROOT)
    config_lib.checked(cli.read_config(options.split()))


@pytest.mark.parametrize('target', re.findall(r'\]\(([\w./]+)\)', README))
def test_link_of_the_readme_exists(target):
    assert (ROOT / target).exists()
