"""Masked patch prediction from the command line: train, resume, few-shot, fine-tune, evaluate."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from tests.support.runs import TIMED, TINY
from vit_jax import evaluate, weights
from vit_jax.models import masked
from vit_jax.training.run import resolve
from vit_jax.workdir import metrics, record

pytestmark = pytest.mark.slow
FIELDS = TINY | {
    'num_steps': 200,
    'eval_every': 0,
    'checkpoint_every': 0,
    'masked.target': 'mean_color',
    'model.pool': 'gap',
    'evals.fewshot.shots': '5',
    'evals.fewshot.representation': 'patch_mean',
    'optimizer.learning_rate': 0.01,
}


@pytest.fixture(scope='module')
def pretrained(run_main, tmp_path_factory):
    """The workdir of a finished run."""
    workdir = tmp_path_factory.mktemp('masked')
    result = run_main(workdir, fields=FIELDS)
    assert result.returncode == 0, result.stderr
    return workdir


def rows(workdir):
    return [
        {name: x for name, x in row.items() if name not in TIMED} for row in metrics.read(workdir)
    ]


def test_it_learns_and_few_shot_reads_its_encoder(pretrained):
    losses = [row['train/loss'] for row in rows(pretrained) if 'train/loss' in row]
    assert losses[0] == pytest.approx(np.log(512), abs=1e-4)  # no colour is preferred
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    last = rows(pretrained)[-1]
    assert last['eval/loss'] < 0.6 * losses[0]
    assert 0.1 < last['eval/accuracy'] <= last['eval/accuracy_top5'] <= 1  # of 512 colours
    assert last['fewshot/5shot'] > 0.2  # twice the accuracy of guessing one of 10 digits


def test_it_beats_every_prediction_without_an_image(pretrained):
    """The best of them are the frequencies of the colours, whose loss is the entropy."""
    config, _ = record.read(pretrained)
    run, _ = resolve(ConfigDict(config), '')
    images = np.concatenate([batch['image'][batch['mask']] for batch in run.eval_batches])
    colors = masked.targets(
        images * np.array(config['preprocess']['std']) + np.array(config['preprocess']['mean']),
        (4, 4),
        'mean_color',
    )
    shares = np.bincount(np.ravel(colors)) / colors.size
    entropy = -np.sum(shares[shares > 0] * np.log(shares[shares > 0]))
    assert rows(pretrained)[-1]['eval/loss'] < entropy - 0.1


def test_resumed_run_predicts_the_same_patches(pretrained, run_main, tmp_path):
    for steps in (10, 20):
        assert run_main(tmp_path, fields=FIELDS | {'num_steps': steps}).returncode == 0
    whole, parts = (
        [row['train/loss'] for row in rows(workdir) if 'train/loss' in row]
        for workdir in (pretrained, tmp_path)
    )
    assert len(parts) == 20
    assert whole[:20] == parts


def test_fine_tuning_starts_from_its_encoder(pretrained, run_main, tmp_path):
    result = run_main(
        tmp_path, fields=TINY | {'pretrained': pretrained, 'model.pool': 'gap', 'num_steps': 6}
    )
    assert result.returncode == 0, result.stderr
    assert 'pre-trained weights from' in result.stderr
    assert 'initialised  head/kernel' in result.stderr
    assert rows(tmp_path)[-1]['eval/loss'] > 0


def test_its_weights_have_no_head(pretrained, capsys):
    loaded = weights.load(str(pretrained))
    assert (loaded.num_classes, loaded.classes) == (0, None)
    assert 'mask_embedding' not in loaded.params
    assert evaluate.main([f'--workdir={pretrained}', '--json']) == 1


def test_a_class_token_is_refused_before_a_file_is_written(run_main, tmp_path):
    result = run_main(tmp_path / 'run', fields=FIELDS | {'model.pool': 'cls'})
    assert result.returncode == 1
    assert 'model.pool is cls: expected gap, because masked.target is mean_color' in result.stderr
    assert not (tmp_path / 'run' / 'config.json').exists()
