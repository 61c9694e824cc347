"""requirements.lock has the versions of requirements.txt, each with hashes."""

import re

from tests.support.runs import ROOT


def versions(name):
    text = (ROOT / name).read_text()
    return {match[1].lower().replace('_', '-'): match[2]
            for match in re.finditer(r'^([\w.-]+)==([^\s;\\]+)', text, re.MULTILINE)}


def test_lock_has_every_version_with_hashes():
    text = (ROOT / 'requirements.lock').read_text()
    assert versions('requirements.lock') == versions('requirements.txt')
    assert all('--hash=sha256:' in entry for entry in re.split(r'\n(?=[\w.-]+==)', text)[1:])
