"""The commands of the README are possible as they stand."""

import re

import pytest
from absl import flags
from ml_collections import config_flags

from tests.support.runs import ROOT
from vit_jax import config as config_lib

README = (ROOT / 'README.md').read_text()
OPTIONS = re.findall(r'`(--config=[^`]+)`', README)


def test_there_are_commands():
    assert len(OPTIONS) >= 6


@pytest.mark.parametrize('options', OPTIONS)
def test_command(options, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr('sys.argv', ['main', *options.split()])  # ml_collections looks there
    values = flags.FlagValues()
    config = config_flags.DEFINE_config_file('config', flag_values=values)
    values(['main', *options.split()])
    config_lib.check(config.value)


@pytest.mark.parametrize('target', re.findall(r'\]\(([\w./]+)\)', README))
def test_link(target):
    assert (ROOT / target).exists()
