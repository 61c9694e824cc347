"""A short recipe certificate (benchmarks/certificate.py, docs/recipes.md)."""

import pytest

from benchmarks import certificate


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ('augreg', 'vit21k') else ())
        for name in certificate.RECIPES
    ],
)
def test_ten_steps_are_those_of_the_source(name):
    loss, params = certificate.compare(name, 10, 'float32', ['float32'])['float32']
    assert loss < 1e-5
    assert params < 1e-5


@pytest.mark.parametrize('name', certificate.RECIPES)
def test_learning_rates_of_the_whole_run(name):
    steps, difference = certificate.schedule_difference(name, every=1000)
    assert steps == certificate.RECIPES[name].steps
    assert difference < 1e-6
