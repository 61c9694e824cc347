import json
import signal

import jax.numpy as jnp
import pytest

from tests.support.errors import refused
from tests.support.steps import setup
from vit_jax.errors import DivergedError
from vit_jax.workdir import outputs as outputs_lib
from vit_jax.workdir.checkpoint import Checkpointer, Snapshot
from vit_jax.workdir.metrics import MetricsLog
from vit_jax.workdir.outputs import Outputs, RunSettings
from vit_jax.workdir.progress import Meter

FINITE = {
    'loss': jnp.float32(2.0),
    'grad_norm': jnp.float32(1.0),
    'update_norm': jnp.float32(0.1),
    'learning_rate': jnp.float32(1e-3),
}
EVALUATION = {
    'eval/accuracy': 0.5,
    'eval/accuracy_top5': 1.0,
    'eval/loss': 0.7,
    'eval/num_examples': 360.0,
}


@pytest.fixture(name='state')
def _state():
    return setup()[0]


def opened_outputs(workdir, start, num_steps, checkpoints, meter=None, num_classes=10, **options):
    """The outputs of a run; `start` is a Snapshot, or the step of one without a state."""
    if isinstance(start, int):
        start = Snapshot(None, start, {})
    rows = MetricsLog(str(workdir))
    rows.open(start.step)
    rows.compare(start.extra.get('metrics'))
    meter = meter or Meter(8, num_steps, 1e6, None)
    settings = RunSettings(num_steps, num_classes, **options)
    return Outputs(str(workdir), start, settings, checkpoints, rows, meter)


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpointer(str(tmp_path), 2, False)
    yield opened
    opened.close()


@pytest.fixture
def outputs(tmp_path, checkpoints):
    """The outputs of a new run of 4 steps."""
    opened = opened_outputs(tmp_path, 0, 4, checkpoints)
    opened.meter.start(0)
    yield opened
    opened.close()


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]


def test_log_reports_waits_before_the_first_step_and_the_estimate_after_it(
    tmp_path, monkeypatch, caplog
):
    now = [50.0]
    monkeypatch.setattr(outputs_lib.time, 'perf_counter', lambda: now[0])
    checkpoints = Checkpointer(str(tmp_path), 2, False)
    meter = Meter(8, 500, 1e6, None, 1, 3)
    opened = opened_outputs(tmp_path, 0, 500, checkpoints, meter)
    opened.meter.start(0)
    opened.wait_for_batch(61.0)
    assert 'the first batch has not arrived for 61 s' in caplog.text
    now[0] += 62
    opened.begin_first_step(0, 10.2)
    assert 'waiting for the first step (compiled in 10.2 s' in caplog.text
    now[0] += 60
    opened.advance(1, FINITE)
    assert 'about 8 h 20 min for the 499 steps' in caplog.text
    opened.advance(2, FINITE)
    assert caplog.text.count('about') == 1
    opened.close()
    checkpoints.close()


@pytest.mark.pictures
def test_rows_of_training_and_evaluation(outputs, tmp_path, caplog):
    outputs.advance(0, None)
    outputs.log(1, FINITE)
    outputs.log_evaluation(1, EVALUATION, 0.25)
    training, evaluation = rows(tmp_path)
    assert (training['step'], training['train/loss'], training['train/grad_norm']) == (1, 2.0, 1.0)
    assert evaluation == {'step': 1, 'eval/seconds': 0.25} | EVALUATION
    assert (tmp_path / 'curves.png').exists()
    assert (outputs.has_evaluation(1), outputs.has_evaluation(0)) == (True, False)
    assert 'step 1/4  loss 2.0000' in caplog.text
    assert 'step 1/4  eval accuracy 50.00 %' in caplog.text


def test_changed_number_of_evaluation_images_is_one_warning(outputs, caplog):
    for step, count in enumerate((360.0, 360.0, 359.0, 359.0), 1):
        outputs.log_evaluation(step, EVALUATION | {'eval/num_examples': count}, 0.25)
    assert [line for line in caplog.messages if 'before' in line] == [
        'evaluated 359 images, but 360 before: the split has changed, and earlier evaluations are '
        'not comparable'
    ]


@pytest.mark.parametrize('name', ['loss', 'grad_norm', 'update_norm'])
def test_values_that_are_not_finite_are_neither_logged_nor_saved(name, outputs, state, tmp_path):
    outputs.save(1, state, FINITE)
    broken = FINITE | {name: jnp.float32('nan')}
    for write in (
        lambda: outputs.log(2, broken),
        lambda: outputs.save(2, state, broken),
        lambda: outputs.advance(2, broken),
    ):
        with pytest.raises(DivergedError, match='at step 2. The last good checkpoint, of step 1,'):
            write()
    with pytest.raises(DivergedError, match='^eval/loss is nan at step 2. The last good'):
        outputs.require_finite(2, EVALUATION | {'eval/loss': float('nan')})
    assert rows(tmp_path) == []
    assert [path.name for path in (tmp_path / 'checkpoints').iterdir()] == ['1']


def test_conclusion_of_a_stopped_and_of_a_complete_run(outputs, state, tmp_path, caplog):
    outputs.conclude(2, signal.SIGTERM)
    assert 'stopped by SIGTERM after step 2 of 4 before there was anything to save' in caplog.text
    outputs.save(2, state, FINITE)
    outputs.conclude(2, signal.SIGINT)
    assert 'stopped by SIGINT after step 2 of 4 and saved. To continue, run the' in caplog.text
    outputs.save(4, state, FINITE)
    outputs.log_evaluation(4, EVALUATION, 0.25)
    outputs.conclude(4, None)
    (tmp_path / 'curves.png').write_text('')
    outputs.log_evaluation(2, EVALUATION | {'eval/accuracy': 0.75}, 3600.0)
    outputs.conclude(4, None)
    block = caplog.records[-1].getMessage().splitlines()
    assert caplog.text.count('curves.png') == 1  # only existing files are listed
    assert block == [
        'done: 4 steps in 01:00:00, eval accuracy 75.00 %',
        '  best        eval/accuracy 75.00 % at step 2',
        f'  checkpoint  {tmp_path}/checkpoints/4',
        f'  best saved  {tmp_path}/checkpoints/2',
        f'  curves      {tmp_path}/curves.png',
        f'  metrics     {tmp_path}/metrics.jsonl',
    ]


def test_log_names_classes_without_images_and_the_worst_class(outputs, state, tmp_path, caplog):
    outputs.save(4, state, FINITE)
    missing = 'no images of 1 of 10 classes: squirrel monkey'
    worst = "worst class 'marmoset': 12.50 % of 8 images"
    outputs.log_evaluation(4, EVALUATION, 0.25, missing=missing, worst=worst)
    assert f'eval accuracy 50.00 % ({missing})  top-5' in caplog.messages[-1]
    outputs.conclude(4, None)
    assert caplog.messages[-1].splitlines()[0].endswith(f'50.00 % ({missing}), {worst}')
    assert rows(tmp_path)[-1].keys() == {'step', 'eval/seconds', *EVALUATION}


def test_log_shows_top_5_only_for_ten_or_more_classes(tmp_path, outputs, checkpoints, caplog):
    outputs.log_evaluation(1, EVALUATION, 0.25)
    assert 'eval accuracy 50.00 %  top-5 100.00 %  loss 0.7000' in caplog.text
    with_nine_classes = opened_outputs(tmp_path, 2, 4, checkpoints, outputs.meter, num_classes=9)
    with_nine_classes.log_evaluation(2, EVALUATION, 0.25)
    assert 'step 2/4  eval accuracy 50.00 %  loss 0.7000' in caplog.text
    with_nine_classes.close()


def test_training_rows_are_details_while_the_live_line_shows_them(outputs, caplog):
    caplog.set_level('DEBUG', 'vit_jax')
    outputs.log(3, FINITE)
    outputs._line.shown = True
    outputs.log(4, FINITE)
    levels = {r.getMessage()[:8]: r.levelname for r in caplog.records if ' lr ' in r.getMessage()}
    assert levels == {'step 3/4': 'INFO', 'step 4/4': 'DEBUG'}


def test_patience_depends_only_on_the_rows(tmp_path, caplog):
    """A resumed run counts the evaluations from before the interruption."""
    workdir = str(tmp_path / '50%')  # a log message must not treat the name as a format
    accuracies = [0.5, 0.7, 0.6, 0.7, 0.8]
    stopped = []
    for step, accuracy in enumerate(accuracies, 1):
        for patience in (0, 2, 3):
            checkpoints = Checkpointer(workdir, 2, False)
            outputs = opened_outputs(workdir, step, 9, checkpoints, patience=patience)
            if not outputs.has_evaluation(step):
                outputs.log_evaluation(step, EVALUATION | {'eval/accuracy': accuracy}, 0.25)
            has_lost_patience = outputs.has_lost_patience()
            assert outputs.is_complete(step) == has_lost_patience
            if has_lost_patience:
                stopped.append((step, patience))
                outputs.conclude(step, None)
            outputs.close()
            checkpoints.close()
    assert stopped == [(4, 2)]
    assert (
        'stopped early after step 4 of 9: eval/accuracy has not improved in 2 '
        'evaluations. To continue, raise patience.'
    ) in caplog.text


def test_failed_write_of_metrics_names_the_last_checkpoint(outputs, state, tmp_path, limited_files):
    outputs.save(1, state.replace(step=jnp.int32(1)), FINITE)
    outputs.conclude(1, signal.SIGTERM)
    with limited_files(10), refused(kind='unwritable', file=tmp_path / 'metrics.jsonl') as error:
        outputs.log(2, FINITE)
        outputs.save(2, state.replace(step=jnp.int32(2)), FINITE)
    assert 'The last good checkpoint, of step 1, is in' in str(error.value)


def losses_of(folder, state, stop=None):
    """train/loss of 9 steps, logged every 4 steps and saved at 3 and 6.

    With `stop` the run stops at that step and resumes; after a stop at 3, it stops at 7 again.
    """
    losses = [jnp.float32(x) for x in (0.1, 1.7, 0.3, 2.9, 1.1, 0.7, 0.2, 3.3, 0.4)]
    step = 0
    while step < 9:
        checkpoints = Checkpointer(str(folder), 2, False)
        start = checkpoints.restore_latest(state) or Snapshot(state, 0, {})
        step = start.step
        outputs = opened_outputs(folder, start, 9, checkpoints)
        while step < (stop or 9):
            values = FINITE | {'loss': losses[step]}
            step += 1
            if step % 4 == 0 or step == 9:
                outputs.log(step, values)
            if step in (3, 6):
                outputs.save(step, state.replace(step=jnp.int32(step)), values)
            outputs.advance(step, values)
        checkpoints.wait()
        outputs.close()
        checkpoints.close()
        stop = 7 if stop == 3 else None  # step 7 is after the newest checkpoint
    return [(row['step'], row['train/loss']) for row in rows(folder)]


def test_loss_of_a_resumed_run_is_the_mean_of_the_whole_interval(state, tmp_path):
    uninterrupted = losses_of(tmp_path / 'a', state)
    first = [float(jnp.float32(x)) for x in (0.1, 1.7, 0.3, 2.9)]
    assert uninterrupted[0] == (4, sum(first) / 4)
    assert [step for step, _ in uninterrupted] == [4, 8, 9]
    assert losses_of(tmp_path / 'b', state, stop=3) == uninterrupted
