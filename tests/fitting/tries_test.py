"""The runs of a fit are runs of vit_jax.main."""

import shlex

import pytest

from tests.support import small
from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.fitting import tries
from vit_jax.fitting.budget import Plan, Step
from vit_jax.fitting.tries import Score, Setup


def setup_of(multi_label=False, balanced=False):
    argument = 'ti16,directory'
    return Setup(
        cli.read_config_file(f'{tries.RECIPE}:{argument}'),
        argument,
        '/x/probe.safetensors',
        small.make('gap').model,
        '/x/photos.csv',
        multi_label,
        balanced,
        3,
    )


@pytest.mark.parametrize('multi_label', [False, True])
def test_the_command_by_hand_has_the_same_config(multi_label):
    setup = setup_of(multi_label, balanced=True)
    changes = tries.fields(setup, Step((16, 16), 8), 40, 0.003, 10, is_augmented=True)
    trained = config_lib.checked(config_lib.changed(setup.recipe, changes))
    words = shlex.split(tries.command(setup, changes, 'runs/x'))
    assert words[:3] == ['python', '-m', 'vit_jax.main']
    by_hand = cli.read_config([word for word in words[3:] if not word.startswith('--workdir')])
    assert config_lib.flatten(config_lib.checked(by_hand)) == config_lib.flatten(trained)
    assert trained.model.pool == 'gap'
    assert trained.loss.name == ('sigmoid' if multi_label else 'softmax')


def test_accuracy_decides_and_then_the_loss():
    scores = [Score(0.8, 0.5), Score(0.9, 0.7), Score(0.9, 0.6)]
    assert max(scores, key=Score.goodness) == Score(0.9, 0.6)


def test_the_augmented_try_follows_the_others_at_the_best_rate():
    plan = Plan((16, 16), 8, 1, 1.0, 10.0, 5, 20, (0.001, 0.01), True)
    assert [name for name, *_ in tries.plan_of_tries(plan, {})] == ['lr=0.001', 'lr=0.01']
    scores = {'lr=0.001': (0.7, 1.0), 'lr=0.01': (0.8, 1.0)}
    assert tries.plan_of_tries(plan, scores)[-1] == ('lr=0.01_augmented', 0.01, True)
