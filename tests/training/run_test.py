"""Runs that are resolved, and the states that they start from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.resolved import resolve
from tests.support.runs import begin
from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.objectives import registry
from vit_jax.training import announcement
from vit_jax.training import run as run_lib
from vit_jax.workdir import record
from vit_jax.workdir.checkpoint import Checkpointer


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return resolve(tmp_path_factory.mktemp('run'), eval_every=20, log_every=5)


def test_config_of_a_run_is_complete_and_frozen(run):
    dataset = run.config.dataset
    assert (dataset.num_examples, dataset.num_classes, run.program.num_steps) == (1437, 10, 48)
    assert run.train_data.class_names == tuple('0123456789')
    assert run.config is run.program.config
    with pytest.raises(AttributeError):
        run.config.accum_steps = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.config = None


def test_logs_and_evaluations_are_due_every_n_steps_and_at_the_end(run):
    assert [step for step in range(49) if run.is_due('log', step)] == [*range(5, 46, 5), 48]
    assert [step for step in range(49) if run.is_due('eval', step)] == [20, 40, 48]


def test_evaluations_left_include_the_last_one(run):
    assert [run.evaluations_left(step) for step in (0, 19, 20, 40, 47, 48)] == [3, 3, 2, 1, 1, 0]


def test_number_of_checkpoints_at_the_end(run, tmp_path):
    keeps_every_tenth = resolve(tmp_path, keep_every=10)
    least = run.number_kept(0, [])
    assert least == run.config.keep_checkpoints + run.config.keep_best
    assert keeps_every_tenth.number_kept(0, []) == least + 4
    assert keeps_every_tenth.number_kept(25, [20, 25]) == least + 3  # step 10 was deleted


def test_batches_start_at_any_step(run):
    first = run.train_batches(start_step=0)
    batches = [next(first) for _ in range(3)]
    again = next(run.train_batches(start_step=2))
    assert again['image'].shape == (32, 16, 16, 3)
    assert (again['image'] == batches[2]['image']).all()
    assert (again['label'] == batches[2]['label']).all()


@pytest.mark.parametrize(
    ('number', 'backend', 'expected'), [(0, 'cpu', 8), (8, 'cpu', 8), (0, 'gpu', 0), (3, 'gpu', 0)]
)
def test_the_number_of_cpu_devices_is_recorded(number, backend, expected, tmp_path, monkeypatch):
    """tests/conftest.py has started JAX with eight devices."""
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    assert resolve(tmp_path, **{'mesh.host_devices': number}).config.mesh.host_devices == expected


def test_another_number_of_cpu_devices_than_jax_shows_is_refused(tmp_path):
    with refused('value', field='mesh.host_devices', value=3) as error:
        resolve(tmp_path, **{'mesh.host_devices': 3})
    assert str(error.value).startswith(
        'mesh.host_devices is 3, and JAX has started with 8: JAX_NUM_CPU_DEVICES and '
        '--xla_force_host_platform_device_count in XLA_FLAGS take precedence. Remove these, or the '
        'field.'
    )


def test_resumed_run_keeps_its_choices(tmp_path):
    config = resolve(
        tmp_path, accum_steps=2, **{'model.remat_policy': 'products', 'model.unroll': 0}
    ).config
    assert config.model.unroll == 1  # chosen for products on a CPU; without them it is 12
    record.write(str(tmp_path), config, tuple('0123456789'))
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    again = resolve(tmp_path, accum_steps=0, **{'model.unroll': 0}).config
    assert (again.accum_steps, again.model.remat_policy, again.model.unroll) == (2, 'products', 1)
    assert resolve(tmp_path, accum_steps=-1, **{'model.unroll': 1}).config.accum_steps == 2
    assert resolve(tmp_path, accum_steps=2, **{'model.unroll': 1}).config.model.unroll == 1
    with refused('conflict', value=['seed: 0 in the workdir, 1 now']):
        resolve(tmp_path, accum_steps=0, seed=1)


@pytest.mark.parametrize('accum_steps', [-1, 1])
def test_the_objective_is_built_once(accum_steps, tmp_path, monkeypatch):
    """A function of the user may take long, or have effects."""
    build = registry.build
    calls = []
    monkeypatch.setattr(registry, 'build', lambda *args: calls.append(args) or build(*args))
    run = resolve(tmp_path, accum_steps=accum_steps)
    assert len(calls) == 1
    assert run.config.accum_steps >= 1


def test_a_kernel_that_the_machine_lacks_is_refused(tmp_path):
    """A run of another machine resumes if the command names a kernel of this one."""
    bfloat16 = {'model.dtype': 'bfloat16'}
    config = resolve(tmp_path, **bfloat16).config
    assert (config.model.attention_kernel, config.model.linear_kernel) == ('cpu', 'cpu')
    with refused('value', field='model.attention_kernel', value='cudnn') as error:
        resolve(tmp_path, **bfloat16, **{'model.attention_kernel': 'cudnn'})
    assert 'this is cpu' in str(error.value)
    record.write(
        str(tmp_path),
        config_lib.changed(config, {'model.attention_kernel': 'cudnn'}),
        tuple('0123456789'),
    )
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    with refused('value', field='model.attention_kernel', value='cudnn'):
        resolve(tmp_path, **bfloat16)
    config = resolve(tmp_path, **bfloat16, **{'model.attention_kernel': 'xla'}).config
    assert config.model.attention_kernel == 'xla'


def test_an_impossible_config_is_refused_before_data_is_opened(tmp_path):
    with refused('value', field='batch_size', value=0):
        resolve(tmp_path, **{'batch_size': 0, 'dataset.name': '/nowhere/flowers'})
    with refused('missing', field='dataset.name', file='/nowhere/flowers'):
        resolve(tmp_path, **{'dataset.name': '/nowhere/flowers'})


def test_new_run_starts_and_old_run_resumes(tmp_path, caplog):
    run = resolve(tmp_path, ema_decay=0.5)
    record.write(str(tmp_path), run.config, run.train_data.class_names)
    checkpoints = Checkpointer(str(tmp_path), 2, False)
    state, step, extra = run_lib.initial_or_restored(run, checkpoints, None)
    assert (step, extra) == (0, {})
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, state.ema_params)
    announcement.announce(run, state)
    for text in ('  blocks     2 layers ', '1437 training images, 360 evaluation images'):
        assert text in caplog.text
    checkpoints.save(7, state.replace(step=jnp.int32(7)), {'sum': 1})
    checkpoints.wait()
    restored, step, extra = run_lib.initial_or_restored(run, checkpoints, None)
    assert (step, extra) == (7, {'sum': 1})
    assert int(restored.step) == 7
    announcement.announce(run, restored)
    assert 'continuing from the checkpoint of step 7 of 48' in caplog.text
    with refused('conflict', field='num_steps', file=tmp_path, value=5):
        run_lib.initial_or_restored(
            resolve(tmp_path, ema_decay=0.5, num_steps=5), checkpoints, None
        )
    checkpoints.close()


def test_best_metric_is_a_metric_of_the_run(tmp_path):
    with refused('choice', field='best_metric', value='fewshot/5shot') as error:
        resolve(tmp_path, best_metric='fewshot/5shot')
    assert str(error.value) == (
        "best_metric is 'fewshot/5shot': expected a metric that this run evaluates, "
        'eval/accuracy, eval/accuracy_top5, eval/loss. Few-shot accuracies need '
        'evals.fewshot.shots.'
    )
    run = resolve(
        tmp_path,
        best_metric='fewshot/5shot',
        **{'evals.fewshot.shots': (1, 5), 'evals.fewshot.test_split': 'test'},
    )
    assert run_lib.metric_names(run)[3:] == ['fewshot/1shot', 'fewshot/5shot']


def test_the_metrics_of_the_main_evaluator_are_those_of_the_objective(tmp_path):
    config = resolve(tmp_path).config
    model = models.build(config.model, 10)
    several = config_lib.changed(config, {'dataset.multi_label': True})
    names = [metric.name for metric in registry.build(several, model).evaluator.metrics]
    assert 'mean_average_precision' in names
    fields = {'masked.target': 'mean_color', 'model.pool': 'gap'}  # and no classes
    masked = config_lib.changed(several, fields)
    model = models.build(masked.model, 10)
    names = [metric.name for metric in registry.build(masked, model).evaluator.metrics]
    assert names[0] == 'patch_accuracy'
    assert 'accuracy' in names
    assert 'mean_average_precision' not in names


def test_a_decay_name_without_parameters_is_refused_in_a_new_run_only(tmp_path):
    with refused('unknown', field='optimizer.decay_names', value='kernle'):
        resolve(tmp_path / 'new', **{'optimizer.decay_names': ('kernle',)})
    run = resolve(tmp_path / 'before')
    names = ('kernel,scale',)  # an earlier version read two names as one
    begin(
        tmp_path / 'before',
        config_lib.changed(run.config, {'optimizer.decay_names': names}),
        run.train_data.class_names,
    )
    resumed = resolve(tmp_path / 'before', **{'optimizer.decay_names': ('kernel', 'scale')})
    assert resumed.config.optimizer.decay_names == names


def test_a_resumed_run_keeps_the_interval_of_its_log(tmp_path):
    run = resolve(tmp_path, log_every=0)
    assert run.config.log_every == 2  # of 48 steps
    begin(tmp_path, config_lib.changed(run.config, {'log_every': 40}), run.train_data.class_names)
    assert resolve(tmp_path, log_every=0).config.log_every == 40
    assert resolve(tmp_path, log_every=3).config.log_every == 3
