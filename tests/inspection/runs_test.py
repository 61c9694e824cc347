"""Tables of the results of runs, the compute of their pre-training, and benchmarks."""

import json
import shutil

import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.runs import resolved
from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.inspection import runs
from vit_jax.models import cost, variants
from vit_jax.workdir import metrics, record

SMALL = {'hidden_size': 16, 'num_layers': 2, 'mlp_dim': 32, 'num_heads': 2, 'patch_size': (8, 8)}


def write_run(workdir, rows, examples=1000, model=(), **fields):
    """Writes a workdir with rows of metrics and a checkpoint folder of the last step."""
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
    """Rows of metrics with an evaluation every 100 steps."""
    metrics_rows = [{'step': 1, 'train/loss': 2.0}]
    for k, accuracy in enumerate(accuracies):
        row = {'step': 100 * (k + 1), 'eval/accuracy': accuracy, 'eval/loss': 1.0}
        if shots:
            row |= {'fewshot/5shot': accuracy / 2, 'fewshot/5shot_deviation': 0.01}
        metrics_rows.append(row)
    return metrics_rows


def test_there_is_a_row_for_each_evaluation(tmp_path):
    long = write_run(tmp_path / 'a', rows(0.5, 0.75, shots=True))
    short = write_run(tmp_path / 'b', rows(0.25), examples=400, image_size=(32, 16))
    table = runs.evaluations((long, short))
    assert table['run'].tolist() == [long, long, short]
    assert table['model'].tolist() == ['16x2'] * 3
    assert table['family'].tolist() == ['ViT'] * 3
    np.testing.assert_array_equal(table['accuracy'], [0.5, 0.75, 0.25])
    np.testing.assert_array_equal(table['final'], [False, True, True])
    np.testing.assert_allclose(table['epochs'], [5, 10, 12.5])
    np.testing.assert_array_equal(table['examples'], [1000, 1000, 400])
    np.testing.assert_array_equal(table['fewshot/5shot'], [0.25, 0.375, np.nan])
    fields = models.fields('b16') | SMALL
    model = models.build(fields, 3)
    square = 3 * 50 * cost.of_model(model, (16, 16)).flops
    wide = 3 * 50 * cost.of_model(model, (32, 16)).flops
    np.testing.assert_allclose(table['flops'], [100 * square, 200 * square, 100 * wide])


def test_compute_and_data_count_the_pretraining(tmp_path):
    before = write_run(tmp_path / 'before', rows(0.3, 0.4), examples=9000)
    tuned = write_run(tmp_path / 'tuned', rows(0.9), pretrained=before, image_size=(64, 64))
    table = runs.evaluations((tuned,))
    first = runs.evaluations((before,))
    np.testing.assert_allclose(table['flops'], first['flops'][-1:])
    np.testing.assert_array_equal(table['examples'], [9000])
    assert table['accuracy'].tolist() == [0.9]
    early = write_run(tmp_path / 'early', rows(0.8), pretrained=f'{before}/checkpoints/100')
    (tmp_path / 'before/checkpoints/100').mkdir()
    np.testing.assert_allclose(runs.evaluations((early,))['flops'], first['flops'][:1])


@pytest.mark.parametrize('saved', [(100, 200), ()])
def test_pretraining_counts_up_to_the_step_of_its_weights(saved, tmp_path):
    """The weights are the best checkpoint if the run has keep_best, even if it was deleted."""
    flops = {}
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
        (flops[name],) = runs.evaluations((tuned,))['flops']
    first = runs.evaluations((before,))['flops']
    assert flops == {'accuracy': first[0], 'newest': first[1], 'loss': first[1]}


def test_accuracies_of_masked_patches_are_excluded(tmp_path, caplog):
    """Few-shot accuracies of such a run are accuracies of classes and are included."""
    masked = write_run(
        tmp_path / 'm',
        rows(0.4, shots=True),
        model={'pool': 'gap'},
        masked={'target': 'mean_color'},
    )
    tuned = write_run(tmp_path / 'f', rows(0.8), pretrained=masked)
    table = runs.with_pretraining((masked, tuned))
    assert (table['run'].tolist(), table['accuracy'].tolist()) == ([tuned], [0.8])
    assert not any('shot' in name for name in table)
    assert caplog.messages == [
        'Skipped runs that predict colours of hidden patches and no classes (use runs that were '
        f'fine-tuned from them): {masked}'
    ]
    table = runs.with_few_shots((masked, tuned))
    assert (table['run'].tolist(), table['fewshot/5shot'].tolist()) == ([masked], [0.2])
    assert np.isnan(table['accuracy']).all()
    with refused(kind='inapplicable'):
        runs.with_pretraining((masked,))


def test_runs_of_unknown_pretraining_are_excluded(tmp_path, caplog):
    other = write_run(tmp_path / 'a', rows(0.9), pretrained='hf:someone/weights')
    known = write_run(tmp_path / 'b', rows(0.8))
    assert runs.with_pretraining((other, known))['run'].tolist() == [known]
    assert 'Skipped runs that have an unknown pre-training' in caplog.text
    assert caplog.text.count(other) == 1
    with refused(kind='inapplicable'):
        runs.with_pretraining((other,))


def test_evaluations_without_few_shots_are_excluded(tmp_path, caplog):
    """The first run has them only in its later evaluations."""
    some = write_run(tmp_path / 'a', [*rows(0.5), *rows(0.6, 0.7, shots=True)[2:]])
    none = write_run(tmp_path / 'b', rows(0.9))
    table = runs.with_few_shots((some, none))
    assert table['run'].tolist() == [some]
    assert table['fewshot/5shot'].tolist() == [0.35]
    assert caplog.messages == [
        'Skipped runs that have no few-shot accuracies (train with '
        f'--config.evals.fewshot.shots=5): {none}'
    ]


def test_rows_have_names_and_families_of_models(tmp_path):
    ti16 = models.fields('ti16')
    hybrid = {'resnet': variants.hybrid_resnet((1, 1), 32), 'patch_size': (1, 1)}
    table = runs.evaluations(
        (
            write_run(tmp_path / 'a', rows(0.1), model=ti16, image_size=(32, 32)),
            write_run(tmp_path / 'b', rows(0.1), model=hybrid, image_size=(32, 32)),
        )
    )
    assert table['model'].tolist() == ['ti16', '16x2']
    assert table['family'].tolist() == ['ViT', 'hybrid']


def test_runs_without_the_needed_metrics_are_refused(tmp_path):
    empty = write_run(tmp_path / 'a', [{'step': 1, 'train/loss': 2.0}])
    with refused(kind='inapplicable') as error:
        runs.evaluations((empty,))
    assert str(error.value) == (
        f'these runs have no evaluation (eval/accuracy in metrics.jsonl): {empty}'
    )
    with refused(kind='inapplicable'):
        runs.with_few_shots((write_run(tmp_path / 'b', rows(0.5)),))
    with refused(kind='missing', field='--workdir', file=tmp_path):
        runs.evaluations((str(tmp_path),))


def benchmark(**changes):
    """The fields of vit_jax.benchmark --json that figures read."""
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


def test_speeds_are_read_from_benchmarks(tmp_path):
    (tmp_path / 'a').write_text('a table\n' + json.dumps(benchmark()) + '\n')
    (tmp_path / 'b').write_text(json.dumps(benchmark(model=None, batch_size=16)))
    table = runs.speeds([str(tmp_path / 'a'), str(tmp_path / 'b')])
    assert {name: x.tolist() for name, x in table.items()} == {
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
def test_other_files_are_not_benchmarks(tmp_path, text):
    file = tmp_path / 'a'
    if text is not None:
        file.write_text(text)
    with refused(kind='content', field='--benchmark', file=file):
        runs.speeds([str(file)])
