"""The lists of packages agree with one another, and are whole."""

import importlib.metadata
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.runs import ROOT


def versions(path):
    """{canonical name: version} of the lines NAME==VERSION."""
    found = re.findall(r'^([\w.-]+)==([\w.]+)', (ROOT / path).read_text(), re.M)
    return {canonicalize_name(name): version for name, version in found}


def test_hashes_are_of_the_versions_that_were_tested():
    assert versions('requirements.lock') == versions('requirements.txt')


def test_nothing_that_a_package_needs_is_missing():
    """Or pip install --require-hashes stops."""
    pinned = versions('requirements.txt')
    missing = {}
    for name in pinned:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        for need in map(Requirement, needs):
            if (not need.marker or need.marker.evaluate({'extra': ''})) and (
                    canonicalize_name(need.name) not in pinned):
                missing.setdefault(need.name, []).append(name)
    assert not missing
