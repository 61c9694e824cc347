"""Rows of runs and benchmarks: what they reached, and what their pre-training took."""

import json
import shutil

import numpy as np
import pytest

from tests.support.runs import resolved
from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.errors import Inapplicable, UserError
from vit_jax.inspection import runs
from vit_jax.models import cost, variants
from vit_jax.workdir import metrics, record

SMALL = {'hidden_size': 16, 'num_layers': 2, 'mlp_dim': 32, 'num_heads': 2, 'patch_size': (8, 8)}


def write_run(workdir, rows, examples=1000, model=(), **fields):
    """A workdir with such rows of metrics and a checkpoint folder of its last step."""
    config = config_lib.base()
    config.update({'batch_size': 50, 'num_steps': 200, 'image_size': (16, 16), **fields})
    config.optimizer.warmup_steps = 0
    config.model.update(SMALL | dict(model))
    step = rows[-1]['step'] if rows else 1
    (workdir / record.CHECKPOINTS / str(step)).mkdir(parents=True)
    record.write(str(workdir), resolved(config, examples, 3), ['ant', 'bee', 'cat'])
    (workdir / metrics.FILE).write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(workdir)


def rows(*accuracies, shots=False):
    found = [
        {'step': 100 * (k + 1), 'eval/accuracy': accuracy, 'eval/loss': 1.0}
        for k, accuracy in enumerate(accuracies)
    ]
    for row in found if shots else []:
        row |= {'fewshot/5shot': row['eval/accuracy'] / 2, 'fewshot/5shot_deviation': 0.01}
    return [{'step': 1, 'train/loss': 2.0}, *found]


def test_a_row_for_each_evaluation(tmp_path):
    long = write_run(tmp_path / 'a', rows(0.5, 0.75, shots=True))
    short = write_run(tmp_path / 'b', rows(0.25), examples=400, image_size=(32, 16))
    found = runs.evaluations((long, short))
    assert found['run'].tolist() == [long, long, short]
    assert found['model'].tolist() == ['16x2'] * 3
    assert found['family'].tolist() == ['ViT'] * 3
    np.testing.assert_array_equal(found['accuracy'], [0.5, 0.75, 0.25])
    np.testing.assert_array_equal(found['final'], [False, True, True])
    np.testing.assert_allclose(found['epochs'], [5, 10, 12.5])
    np.testing.assert_array_equal(found['examples'], [1000, 1000, 400])
    np.testing.assert_array_equal(found['fewshot/5shot'], [0.25, 0.375, np.nan])
    fields = models.fields('b16') | SMALL
    square, wide = (
        3 * 50 * cost.of_model(models.build(fields, 3), size).flops for size in ((16, 16), (32, 16))
    )
    np.testing.assert_allclose(found['flops'], [100 * square, 200 * square, 100 * wide])


def test_compute_and_data_are_those_of_the_pretraining(tmp_path):
    before = write_run(tmp_path / 'before', rows(0.3, 0.4), examples=9000)
    tuned = write_run(tmp_path / 'tuned', rows(0.9), pretrained=before, image_size=(64, 64))
    found, first = runs.evaluations((tuned,)), runs.evaluations((before,))
    np.testing.assert_allclose(found['flops'], first['flops'][-1:])
    np.testing.assert_array_equal(found['examples'], [9000])
    assert found['accuracy'].tolist() == [0.9]
    early = write_run(tmp_path / 'early', rows(0.8), pretrained=f'{before}/checkpoints/100')
    (tmp_path / 'before/checkpoints/100').mkdir()
    np.testing.assert_allclose(runs.evaluations((early,))['flops'], first['flops'][:1])


@pytest.mark.parametrize('saved', [(100, 200), ()])
def test_pretraining_ends_where_its_weights_are_taken(saved, tmp_path):
    """At the best checkpoint where the run keeps it, also if all of them were deleted since."""
    found = {}
    for name, fields in (
        ('accuracy', {'keep_best': True}),
        ('newest', {}),
        ('loss', {'keep_best': True, 'best_metric': 'eval/loss'}),
    ):
        before = write_run(tmp_path / name, rows(0.5, 0.3), **fields)
        shutil.rmtree(tmp_path / name / record.CHECKPOINTS)
        for step in ('', *saved):
            (tmp_path / name / record.CHECKPOINTS / str(step)).mkdir()
        tuned = write_run(tmp_path / f'from-{name}', rows(0.9), pretrained=before)
        (found[name],) = runs.evaluations((tuned,))['flops']
    first = runs.evaluations((before,))['flops']
    assert found == {'accuracy': first[0], 'newest': first[1], 'loss': first[1]}


def test_hits_of_masked_patches_are_no_accuracy_of_classes(tmp_path, caplog):
    """Few-shot accuracy of such a run is of classes, and is not given to others by its column."""
    masked = write_run(
        tmp_path / 'm',
        rows(0.4, shots=True),
        model={'pool': 'gap'},
        masked={'target': 'mean_color'},
    )
    tuned = write_run(tmp_path / 'f', rows(0.8), pretrained=masked)
    found = runs.with_pretraining((masked, tuned))
    assert (found['run'].tolist(), found['accuracy'].tolist()) == ([tuned], [0.8])
    assert not any('shot' in name for name in found)
    assert caplog.messages == [
        'left out, as they predict colours of hidden patches and no classes '
        f'(give runs that were fine-tuned from them): {masked}'
    ]
    found = runs.with_few_shots((masked, tuned))
    assert (found['run'].tolist(), found['fewshot/5shot'].tolist()) == ([masked], [0.2])
    assert np.isnan(found['accuracy']).all()
    with pytest.raises(Inapplicable, match='these runs predict colours of hidden patches and no'):
        runs.with_pretraining((masked,))


def test_unknown_pretraining(tmp_path, caplog):
    other = write_run(tmp_path / 'a', rows(0.9), pretrained='hf:someone/weights')
    known = write_run(tmp_path / 'b', rows(0.8))
    assert runs.with_pretraining((other, known))['run'].tolist() == [known]
    assert 'left out, as they are of unknown pre-training' in caplog.text
    assert caplog.text.count(other) == 1
    with pytest.raises(Inapplicable, match='these runs are of unknown pre-training'):
        runs.with_pretraining((other,))


def test_runs_without_few_shots_are_left_out_and_named(tmp_path, caplog):
    """And the evaluations before the field was set, whose run is not."""
    later = [*rows(0.5), *rows(0.6, 0.7, shots=True)[2:]]
    given = write_run(tmp_path / 'a', later), write_run(tmp_path / 'b', rows(0.9))
    found = runs.with_few_shots(given)
    assert found['run'].tolist() == [given[0]]
    assert found['fewshot/5shot'].tolist() == [0.35]
    assert caplog.messages == [
        'left out, as they have no few-shot accuracies (train with '
        f'--config.evals.fewshot.shots=5): {given[1]}'
    ]


def test_names_and_families(tmp_path):
    ti16 = models.fields('ti16')
    hybrid = {'resnet': variants.hybrid_resnet((1, 1), 32), 'patch_size': (1, 1)}
    found = runs.evaluations(
        (
            write_run(tmp_path / 'a', rows(0.1), model=ti16, image_size=(32, 32)),
            write_run(tmp_path / 'b', rows(0.1), model=hybrid, image_size=(32, 32)),
        )
    )
    assert found['model'].tolist() == ['ti16', '16x2']
    assert found['family'].tolist() == ['ViT', 'hybrid']


def test_runs_without_what_a_figure_needs(tmp_path):
    empty = write_run(tmp_path / 'a', [{'step': 1, 'train/loss': 2.0}])
    with pytest.raises(Inapplicable, match=f'have no evaluation .eval/accuracy in .*: {empty}'):
        runs.evaluations((empty,))
    with pytest.raises(Inapplicable, match='no few-shot accuracies .train with --config.evals'):
        runs.with_few_shots((write_run(tmp_path / 'b', rows(0.5)),))
    with pytest.raises(UserError, match='is not the workdir of a run'):
        runs.evaluations((str(tmp_path),))


def benchmark(**changes):
    """What vit_jax.benchmark --json prints, as far as it is read."""
    return {
        'recipe': 'a recipe',
        'model': 'ti16',
        'batch_size': 8,
        'image_size': [32, 18],
        'dtype': 'float32',
        'devices': 2,
        'device': 'cpu',
        'subjects': {'matmul': {'seconds': 1}, 'inference': {'images_per_second': 12.5}},
        **changes,
    }


def test_speeds(tmp_path):
    (tmp_path / 'a').write_text('a table\n' + json.dumps(benchmark()) + '\n')
    (tmp_path / 'b').write_text(json.dumps(benchmark(model=None, batch_size=16)))
    found = runs.speeds([str(tmp_path / 'a'), str(tmp_path / 'b')])
    assert {name: x.tolist() for name, x in found.items()} == {
        'model': ['ti16', 'a recipe'],
        'setting': ['2 x cpu, float32'] * 2,
        'pixels': [24, 24],
        'batch_size': [8, 16],
        'images_per_second': [12.5, 12.5],
    }


@pytest.mark.parametrize(
    'text',
    [None, '', 'no JSON', '3', '{"subjects": {}}', json.dumps(benchmark(subjects={'train': {}}))],
)
def test_what_is_no_benchmark(tmp_path, text):
    if text is not None:
        (tmp_path / 'a').write_text(text)
    with pytest.raises(UserError, match='--benchmark=.*a cannot be read .*: expected what vit_jax'):
        runs.speeds([str(tmp_path / 'a')])
