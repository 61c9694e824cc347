"""A wheel installs the package with its recipes: they train from an empty folder."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.support.runs import ROOT, environment
from vit_jax import cli, recipes


def test_every_recipe_has_a_name():
    files = {path.stem for path in (ROOT / 'configs').glob('*.py')}
    assert set(recipes.names()) == files
    for name in files:
        assert recipes.path_of(name) == str(ROOT / 'configs' / f'{name}.py')
    assert recipes.path_of('no_recipe') is None


def test_a_name_means_the_recipe_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = cli.read_config_file('vit:s16')
    by_path = cli.read_config_file(f'{ROOT}/configs/vit.py:s16')
    assert by_name.to_dict() == by_path.to_dict()
    (tmp_path / 'vit').write_text((ROOT / 'configs/vit.py').read_text().replace('3e-3', '4e-3'))
    assert cli.config_path('vit:s16') == 'vit'


@pytest.mark.slow
def test_an_installed_wheel_trains_the_quick_start(tmp_path):
    subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation']
        + ['--wheel-dir', str(tmp_path / 'dist'), str(_copy_of_the_tree(tmp_path))],
        check=True,
    )
    (wheel,) = (tmp_path / 'dist').glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        contained = set(archive.namelist())
        archive.extractall(tmp_path / 'site')
    assert {f'vit_jax/configs/{name}.py' for name in recipes.names()} <= contained
    (tmp_path / 'empty').mkdir()
    code = (
        f'import vit_jax; assert vit_jax.__file__.startswith({str(tmp_path / "site")!r});'
        'from vit_jax.main import run; run()'
    )
    options = ['--config=quickstart', '--config.num_epochs=0', '--config.num_steps=4']
    options += ['--config.optimizer.warmup_steps=1', '--config.report=False']
    result = subprocess.run(
        [sys.executable, '-c', code, *options],
        cwd=tmp_path / 'empty',
        env=environment() | {'PYTHONPATH': str(tmp_path / 'site')},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / 'empty/runs/quickstart/checkpoints/4').is_dir()


def _copy_of_the_tree(tmp_path):
    """The files that a wheel is built from, so that no build folder is left in the clone."""
    listed = subprocess.run(
        ['git', 'ls-files', 'setup.py', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'vit_jax']
        + ['configs'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in listed:
        target = tmp_path / 'tree' / name
        os.makedirs(target.parent, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return tmp_path / 'tree'
