"""A small model of every family learns digits with the command."""

import pytest

from vit_jax.models.position import PLACES
from vit_jax.workdir import metrics

RUN = {
    'batch_size': 64,
    'num_steps': 300,
    'optimizer.warmup_steps': 40,
    'eval_every': 300,
    'checkpoint_every': 300,
}
POSITIONS = [(kind, place) for kind, places in PLACES.items() for place in places]
POSITIONS.remove(('learned_1d', 'stem'))  # the family vit


def accuracy(run_main, workdir, family, fields):
    result = run_main(
        workdir, config=f'configs/quickstart.py:{family}', fields=RUN | fields, optimized=True
    )
    assert result.returncode == 0, result.stderr
    return metrics.read(workdir)[-1]['eval/accuracy']


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize('family', ['hybrid', 'axial', 'vit', 'resnet', 'axial_resnet'])
def test_a_model_of_each_family_learns(family, run_main, tmp_path):
    assert accuracy(run_main, tmp_path / 'run', family, {}) >= 0.8


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(('kind', 'place'), POSITIONS)
def test_a_model_with_each_position_embedding_learns(kind, place, run_main, tmp_path):
    fields = {'model.position': kind, 'model.position_at': place, 'model.unroll': 4}
    # A model without positions learns from a set of patches, which is slower.
    expected = 0.65 if kind == 'none' else 0.8
    assert accuracy(run_main, tmp_path / 'run', 'vit', fields) >= expected


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    'fields',
    [
        {
            'model.pool': 'gap',
            'model.layer_scale_init': 0.1,
            'model.stochastic_depth_rate': 0.1,
            'model.position': 'relative',
            'model.position_at': 'shared',
            'model.unroll': 4,
        },
        {'model.pool': 'map', 'model.remat_policy': 'nothing_saveable'},
    ],
    ids=str,
)
def test_models_with_other_pools_and_regularisation_learn(fields, run_main, tmp_path):
    assert accuracy(run_main, tmp_path / 'run', 'vit', fields) >= 0.8
