"""The commands of the README are possible as they stand."""

import re

import pytest

from tests.support.runs import ROOT
from vit_jax import cli
from vit_jax import config as config_lib

README = (ROOT / 'README.md').read_text()
OPTIONS = re.findall(r'`(--config=[^`]+)`', README)


def test_there_are_commands():
    assert len(OPTIONS) >= 6


@pytest.mark.parametrize('options', OPTIONS)
def test_command(options, monkeypatch):
    monkeypatch.chdir(ROOT)
    config_lib.checked(cli.read_config(options.split()))


@pytest.mark.parametrize('target', re.findall(r'\]\(([\w./]+)\)', README))
def test_link(target):
    assert (ROOT / target).exists()
