"""The lists of required packages agree and are complete."""

import importlib.metadata
import pathlib
import re
import runpy

import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.runs import ROOT


def test_data_files_of_the_package_are_installed(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, 'setup', lambda **arguments: given.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path('setup.py')
    listed = {
        path
        for package, names in given['package_data'].items()
        for name in names
        for path in pathlib.Path(*package.split('.')).glob(name)
    }
    found = {
        path
        for path in pathlib.Path('vit_jax').rglob('*')
        if path.is_file() and path.suffix not in ('.py', '.pyc')
    }
    assert listed == found
    assert {'.'.join(path.parent.parts) for path in pathlib.Path('vit_jax').rglob('*.py')} == set(
        given['packages']
    )


def versions(path):
    """Returns {canonical name: version} from the lines NAME==VERSION."""
    found = re.findall(r'^([\w.-]+)==([\w.]+)', (ROOT / path).read_text(), re.M)
    return {canonicalize_name(name): version for name, version in found}


def test_hashes_are_of_the_tested_versions():
    assert versions('requirements.lock') == versions('requirements.txt')


def test_no_required_package_is_missing():
    """pip install --require-hashes needs every package."""
    pinned = versions('requirements.txt')
    missing = {}
    for name in pinned:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a package of another platform
        for need in map(Requirement, needs):
            if (not need.marker or need.marker.evaluate({'extra': ''})) and (
                canonicalize_name(need.name) not in pinned
            ):
                missing.setdefault(need.name, []).append(name)
    assert not missing
