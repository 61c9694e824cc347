import dataclasses
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from tests.support.batches import encoded, make
from tests.support.runs import TINY, begin, load
from vit_jax import config as config_lib
from vit_jax import machine, models
from vit_jax.data import order, sources, subsets
from vit_jax.errors import UserError
from vit_jax.files import write_json
from vit_jax.objectives import registry
from vit_jax.parallel import feeding
from vit_jax.reporting import collect
from vit_jax.scoring import split
from vit_jax.training import run as run_lib
from vit_jax.workdir import record
from vit_jax.workdir.checkpoint import Checkpointer


def resolve(workdir, **fields):
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(TINY | {'num_epochs': 0.0} | fields)
    return run_lib.resolve(config, str(workdir))[0]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return resolve(tmp_path_factory.mktemp('run'), eval_every=20, log_every=5)


def test_numbers_of_the_data_are_filled_in_and_nothing_changes_them(run):
    dataset = run.config.dataset
    assert (dataset.num_examples, dataset.num_classes, run.program.num_steps) == (1437, 10, 48)
    assert run.train_data.class_names == tuple('0123456789')
    assert run.config is run.program.config
    with pytest.raises(AttributeError):
        run.config.accum_steps = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.config = None


def test_what_is_due(run):
    assert [step for step in range(49) if run.due('log', step)] == [*range(5, 46, 5), 48]
    assert [step for step in range(49) if run.due('eval', step)] == [20, 40, 48]


def test_how_many_checkpoints_there_may_be(run, tmp_path):
    each = resolve(tmp_path, keep_every=10)
    least = run.number_kept(0, [])
    assert least == each.config.keep_checkpoints + each.config.keep_best
    assert each.number_kept(0, []) == least + 4
    assert each.number_kept(25, [20, 25]) == least + 3  # step 10 is gone


def test_batches_begin_anywhere(run):
    first = run.train_batches(start_step=0)
    batches = [next(first) for _ in range(3)]
    again = next(run.train_batches(start_step=2))
    assert again['image'].shape == (32, 16, 16, 3)
    assert (again['image'] == batches[2]['image']).all()
    assert (again['label'] == batches[2]['label']).all()


@pytest.mark.parametrize(
    ('given', 'backend', 'expected'), [(0, 'cpu', 8), (8, 'cpu', 8), (0, 'gpu', 0), (3, 'gpu', 0)]
)
def test_the_devices_of_the_host_are_recorded(given, backend, expected, tmp_path, monkeypatch):
    """tests/conftest.py has started JAX with eight."""
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    assert resolve(tmp_path, **{'mesh.host_devices': given}).config.mesh.host_devices == expected


def test_other_devices_of_the_host_than_the_environment_says(tmp_path):
    with pytest.raises(
        UserError,
        match='mesh.host_devices is 3, and JAX has started with 8: JAX_N'
        'UM_CPU_DEVICES and --xla_force_host_platform_device_count '
        'in XLA_FLAGS come first. Remove these, or the field.',
    ):
        resolve(tmp_path, **{'mesh.host_devices': 3})


def test_a_run_that_goes_on_keeps_what_it_has_chosen(tmp_path):
    config = resolve(
        tmp_path, accum_steps=2, **{'model.remat_policy': 'products', 'model.unroll': 0}
    ).config
    assert config.model.unroll == 1  # chosen for products on a CPU, where it would else be 12
    record.write(str(tmp_path), config, tuple('0123456789'))
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    again = resolve(tmp_path, accum_steps=0, **{'model.unroll': 0}).config
    assert (again.accum_steps, again.model.remat_policy, again.model.unroll) == (2, 'products', 1)
    assert resolve(tmp_path, accum_steps=-1, **{'model.unroll': 1}).config.accum_steps == 2
    assert resolve(tmp_path, accum_steps=2, **{'model.unroll': 1}).config.model.unroll == 1
    with pytest.raises(UserError, match='seed: 0 in the workdir, 1 now'):
        resolve(tmp_path, accum_steps=0, seed=1)


def test_only_training_reads_the_photos_of_a_folder(tmp_path, image_directory):
    """Which is no matter of the run, but how large they are is."""
    fields = {
        'dataset.name': str(image_directory),
        'dataset.train_split': 'train',
        'dataset.eval_split': 'test',
        'image_size': (8, 8),
        'augment.crop': 'inception',
        'evals.fewshot.shots': (1,),
    }
    disk = fields | {
        'dataset.cache': 'disk',
        'dataset.cache_size': 8,
        'dataset.cache_dir': str(tmp_path / 'f'),
    }
    plain, small = resolve(tmp_path / 'a', **fields), resolve(tmp_path / 'b', **disk)
    assert len(list((tmp_path / 'f').rglob('*.bmp'))) == 60
    train, evaluation = (
        [next(iter(x))['image'] for x in pair]
        for pair in (
            (plain.train_batches(), small.train_batches()),
            (plain.eval_batches, small.eval_batches),
        )
    )
    assert not np.array_equal(*train)
    np.testing.assert_array_equal(*evaluation)
    files = small.train_data.fetch(np.arange(60))['path'].numpy()
    assert all(path.startswith(os.fsencode(image_directory)) for path in files)
    assert (
        config_lib.differences(
            small.config, config_lib.changed(small.config, {'dataset.cache_dir': '/elsewhere'})
        )
        == []
    )
    assert config_lib.differences(
        small.config, config_lib.changed(small.config, {'dataset.cache_size': 9})
    ) == ['dataset.cache_size: 8 in the workdir, 9 now']


def test_a_kernel_that_the_machine_lacks(tmp_path):
    """Also when another machine has begun the run, which here goes on by the one there is."""
    bfloat16 = {'model.dtype': 'bfloat16'}
    config = resolve(tmp_path, **bfloat16).config
    assert (config.model.attention_kernel, config.model.linear_kernel) == ('cpu', 'cpu')
    with pytest.raises(UserError, match='kernel is cudnn, .* this is cpu .* has: xla, cpu'):
        resolve(tmp_path, **bfloat16, **{'model.attention_kernel': 'cudnn'})
    record.write(
        str(tmp_path),
        config_lib.changed(config, {'model.attention_kernel': 'cudnn'}),
        tuple('0123456789'),
    )
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    with pytest.raises(UserError, match='attention_kernel is cudnn'):
        resolve(tmp_path, **bfloat16)
    config = resolve(tmp_path, **bfloat16, **{'model.attention_kernel': 'xla'}).config
    assert config.model.attention_kernel == 'xla'


def test_a_config_that_cannot_be_is_refused_before_data_is_opened(tmp_path):
    with pytest.raises(UserError, match='batch_size is 0'):
        resolve(tmp_path, **{'batch_size': 0, 'dataset.name': '/nowhere/flowers'})
    with pytest.raises(UserError, match="no directory '/nowhere/flowers'"):
        resolve(tmp_path, **{'dataset.name': '/nowhere/flowers'})


def test_batches_read_ahead_and_the_process_take_memory(run):
    """On CPU those of the input pipeline, too; of each device its share."""
    image = 4 * 32 * 16 * 16 * 3 / 8
    assert run_lib.bytes_besides(run.program) == 0.3e9 / 8 + image * (
        feeding.BATCHES_UNDER_WAY + run_lib.pipeline.BATCHES_IN_MEMORY
    )
    assert config_lib.total_steps(run.config) == 48


@pytest.mark.parametrize(
    ('available', 'buffer', 'processes', 'fits'),
    [
        (2 * 53, 10**6, 1, True),  # no window has more examples than there are
        (2 * 53 - 1, 10**6, 1, False),
        (2 * 53 - 1, 10**6, 2, True),
        (20, 10, 1, True),
        (19, 10, 1, False),
    ],
)
def test_windows_of_shuffled_examples_take_memory(
    available, buffer, processes, fits, tmp_path, monkeypatch
):
    """Two of them at least, by a byte an example."""
    source = make('tfrecord', tmp_path).source()
    monkeypatch.setattr(run_lib.sequential, 'bytes_per_record', lambda pieces: 1.0)
    monkeypatch.setattr(machine, 'available_memory', lambda: available)
    if fits:
        run_lib.check_shuffle_memory(source, buffer, processes)
        return
    with pytest.raises(UserError) as error:
        run_lib.check_shuffle_memory(source, buffer, processes)
    assert f'dataset.shuffle_buffer is {buffer}' in str(error.value)
    assert f'--config.dataset.shuffle_buffer={int(0.8 * available / 3)},' in str(error.value)


def test_a_source_without_windows_needs_no_memory_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, 'available_memory', lambda: 0)
    run_lib.check_shuffle_memory(make('digits', tmp_path).source(), 10**6, 1)


@pytest.mark.parametrize(('limit', 'gives_back'), [(1e9, True), (9e9, False)])
def test_large_steps_keep_no_memory(limit, gives_back, run, monkeypatch):
    """What malloc keeps lies in pieces: steps once took four times the compiler's figure."""
    calls = []
    monkeypatch.setattr(machine, 'give_memory_back', lambda: calls.append(True))
    monkeypatch.setattr(run_lib.accumulation, 'bytes_needed', lambda compiled: 5e8)
    monkeypatch.setattr(run_lib.accumulation, 'memory_limit', lambda: limit)
    run_lib.make_room(run.program)
    assert bool(calls) == gives_back


def test_a_new_run_begins_and_an_old_one_goes_on(tmp_path, caplog):
    run = resolve(tmp_path, ema_decay=0.5)
    record.write(str(tmp_path), run.config, run.train_data.class_names)
    checkpoints = Checkpointer(str(tmp_path), 2, False)
    state, step, extra = run_lib.initial_or_restored(run, checkpoints, None)
    assert (step, extra) == (0, {})
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, state.ema_params)
    run_lib.announce(run, state)
    for text in ('  blocks     2 layers ', '1437 training images, 360 evaluation images'):
        assert text in caplog.text
    checkpoints.save(7, state.replace(step=jnp.int32(7)), {'sum': 1})
    checkpoints.wait()
    restored, step, extra = run_lib.initial_or_restored(run, checkpoints, None)
    assert (step, extra) == (7, {'sum': 1})
    assert int(restored.step) == 7
    run_lib.announce(run, restored)
    assert 'continuing from the checkpoint of step 7 of 48' in caplog.text
    with pytest.raises(UserError, match='is at step 7 already and the config asks for 5'):
        run_lib.initial_or_restored(
            resolve(tmp_path, ema_decay=0.5, num_steps=5), checkpoints, None
        )
    checkpoints.close()


@pytest.mark.parametrize('family', ['vit', 'hybrid', 'resnet', 'axial', 'axial_resnet'])
def test_every_parameter_is_in_one_line_of_a_kind(family):
    config = load('quickstart').get_config(family)
    model = models.build(config.model, 10)
    params = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), train=False)
    )['params']
    total, *lines = run_lib.parameter_kinds(params).splitlines()
    counts = {line.split()[0]: int(line.split()[-1].replace(',', '')) for line in lines}
    assert total == f'{sum(counts.values()):,} parameters'
    assert sum(counts.values()) == sum(x.size for x in jax.tree.leaves(params))
    assert counts['head'] == sum(x.size for x in jax.tree.leaves(params['head']))
    assert len(counts) == len(lines) <= 10


def test_what_may_surprise_is_said(tmp_path, caplog):
    run = resolve(
        tmp_path,
        ema_decay=0.99,
        **{'optimizer.lr_factors': '^head/=1,.=0', 'optimizer.warmup_steps': 25},
    )
    state = run.program.initial_state()
    run_lib.announce(run, state)
    head = sum(x.size for x in jax.tree.leaves(state.params['head']))
    total = sum(x.size for x in jax.tree.leaves(state.params))
    assert f'training {head:,} of {total:,} parameters' in caplog.text
    assert 'ema_decay 0.99 is high for 48 steps: at the end 62 % of the average' in caplog.text
    assert 'Try 0.7917, or 0 for no average' in caplog.text
    assert (
        'optimizer.warmup_steps is 25 of 48 steps: the learning rate reaches its peak late. '
        'Try 4.' in caplog.text
    )


def test_the_metric_that_decides_is_one_that_the_run_has(tmp_path):
    with pytest.raises(
        UserError,
        match="best_metric is 'fewshot/5shot': expected one of those "
        'that this run evaluates, eval/accuracy, eval/accuracy_top5, eval/loss. '
        'Few-shot accuracies come with evals.fewshot.shots.',
    ):
        resolve(tmp_path, best_metric='fewshot/5shot')
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


@pytest.mark.slow
def test_the_numbers_of_a_subset_are_those_of_the_run(tmp_path):
    """Also where a recipe states those of the whole."""
    fields = {
        'dataset.subset': '10%',
        'dataset.num_examples': 1437,
        'num_steps': 0,
        'num_epochs': 4.0,
        'loss.class_weights': ('balanced',),
        'dataset.balance': 1.0,
    }
    run = resolve(tmp_path, **fields)
    counts = np.bincount(run.train_data.labels)
    assert (run.config.dataset.num_examples, counts.sum(), run.program.num_steps) == (144, 144, 18)
    np.testing.assert_allclose(run.config.loss.class_weights, 14.4 / counts)
    labels = np.concatenate([next(run.train_batches(start_step=k))['label'] for k in range(5)])
    assert (np.bincount(labels) == 16).all()
    record.write(str(tmp_path), run.config, tuple('0123456789'))
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    assert resolve(tmp_path, **fields).config.loss == run.config.loss
    with pytest.raises(UserError, match="dataset.subset: '10%' in the workdir, '144' now"):
        resolve(tmp_path, **fields | {'dataset.subset': '144'})


@pytest.mark.parametrize(
    ('train', 'evaluation', 'shared'),
    [
        ('train', 'test', False),
        ('train[:80%]', 'train[80%:]', False),
        ('train', 'train[90%:]', True),
    ],
)
def test_evaluation_on_what_is_trained_on_is_said(train, evaluation, shared, tmp_path, caplog):
    run = resolve(tmp_path, **{'dataset.train_split': train, 'dataset.eval_split': evaluation})
    run_lib.announce(run, run.program.initial_state())
    text = (
        f'dataset.eval_split {evaluation} has images of dataset.train_split {train}: '
        'evaluations score what the model is trained on. Other images: train[:90%] and'
    )
    assert (text in caplog.text) == shared


def test_a_directory_is_found_from_elsewhere(image_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(image_directory.parent)
    found = resolve(tmp_path / 'run', **{'dataset.name': image_directory.name})
    assert found.config.dataset.name == str(image_directory)
    few = resolve(tmp_path / 'other', **{'evals.fewshot.dataset': image_directory.name})
    assert few.config.evals.fewshot.dataset == str(image_directory)


def folder(root, counts):
    """DIR/SPLIT/CLASS with so many images, by split and class; returns the fields of such a run."""
    for part, classes in counts.items():
        for name, count in classes.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                (root / part / name / f'{number}.png').write_bytes(encoded(number))
    return {
        'dataset.name': str(root),
        'dataset.train_split': 'train',
        'dataset.eval_split': 'test',
        'batch_size': 8,
    }


def leave_begun(workdir, run, without=()):
    """Leaves what a run has written that has saved a checkpoint."""
    (workdir / 'checkpoints' / '5').mkdir(parents=True)
    recorded = run.config.to_dict()
    for name in without:
        del recorded['dataset'][name]
    write_json(str(workdir / record.CONFIG), recorded)
    write_json(str(workdir / record.CLASSES), list(run.train_data.class_names))


def test_a_class_without_training_images_is_refused(tmp_path):
    full = {'ant': 8, 'bee': 8, 'cat': 8}
    fields = folder(tmp_path / 'data', {'train': full, 'test': full})
    run = resolve(tmp_path / 'full', **fields)
    for path in (tmp_path / 'data' / 'train' / 'cat').iterdir():
        path.unlink()
    with pytest.raises(UserError, match='train .*no images of 1 of 3 classes: cat') as error:
        resolve(tmp_path / 'new', **fields)
    assert 'dataset.train_split' in str(error.value)
    # Neither of these learns classes from labels.
    resolve(
        tmp_path / 'masked',
        **fields,
        **{
            'masked.target': 'mean_color',
            'model.pool': 'gap',
            'model.representation_size': 0,
        },
    )
    assert run.train_data.num_examples == 24


def test_a_run_that_has_begun_without_images_of_a_class_resumes_with_a_warning(tmp_path, caplog):
    full = {'ant': 8, 'bee': 8, 'cat': 8}
    fields = folder(tmp_path / 'data', {'train': full | {'cat': 0}, 'test': full})
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:  # as earlier versions did
        patch.setattr(run_lib, '_require_training_images', lambda *_: None)
        leave_begun(tmp_path, resolve(tmp_path, **fields))
    again = resolve(tmp_path, **fields)
    run_lib.announce(again, again.program.initial_state())
    assert 'dataset.train_split train has no images of 1 of 3 classes: cat: the' in caplog.text


def test_a_class_without_evaluation_images_is_a_warning(tmp_path, caplog):
    full = {'ant': 8, 'bee': 8, 'cat': 8}
    fields = folder(tmp_path / 'data', {'train': full, 'test': full | {'bee': 0}})
    run = resolve(tmp_path, **fields)
    run_lib.announce(run, run.program.initial_state())
    assert 'dataset.eval_split test has no images of 1 of 3 classes: bee: acc' in caplog.text


@pytest.mark.parametrize(
    ('balance', 'weights', 'is_said'),
    [(1.0, ('balanced',), True), (1.0, (), False), (0.0, ('balanced',), False)],
)
def test_classes_that_are_balanced_twice_are_a_warning(balance, weights, is_said, tmp_path, caplog):
    run = resolve(tmp_path, **{'dataset.balance': balance, 'loss.class_weights': weights})
    run_lib.announce(run, run.program.initial_state())
    assert ('dataset.balance is 1 and loss.class_weights are set' in caplog.text) == is_said


def test_a_run_of_an_earlier_version_resumes_with_its_images_in_their_order(tmp_path, caplog):
    """Its slices were cut from the files by the hash of their names."""
    fields = folder(tmp_path / 'data', {'train': {'ant': 31, 'bee': 17, 'cat': 6}})
    fields |= {
        'dataset.train_split': 'train[:90%]',
        'dataset.eval_split': 'train[90%:]',
        'dataset.subset': '50%',
    }
    new = resolve(tmp_path / 'new', **fields)
    begun = tmp_path / 'begun'
    leave_begun(begun, new, without=['stratify'])
    resumed = resolve(begun, **fields)
    assert resumed.config.dataset.stratify is False
    assert 'dataset.stratify stays False' in caplog.text

    def names(source):
        return [source.name_of(index) for index in range(source.num_examples)]

    paths = [f'{path.parent.name}/{path.name}' for path in (tmp_path / 'data').glob('train/*/*')]
    paths.sort(key=lambda path: hashlib.blake2b(path.encode()).digest())
    by_hash = [str(tmp_path / 'data' / 'train' / path) for path in paths]
    assert names(resumed.eval_data) == by_hash[49:]
    subset = order.permute(tf.range(24, dtype=tf.int64), subsets._KEY, 49).numpy()
    assert names(resumed.train_data) == [by_hash[index] for index in subset]
    assert names(new.eval_data) != by_hash[49:]
    assert len(set(new.train_data.labels)) == len(set(new.eval_data.labels)) == 3
    # All other commands open the slices of the run, too.
    dataset = split.dataset_of(str(begun), {'name': None})
    assert names(sources.open_split(dataset, dataset['eval_split'])) == by_hash[49:]
    config, _ = collect.read(str(begun))
    assert config['dataset']['stratify'] is False
    # Who asks for another order asks for another run.
    leave_begun(tmp_path / 'new', new)
    with pytest.raises(UserError, match='dataset.stratify: True in the workdir, False now'):
        resolve(tmp_path / 'new', **fields, **{'dataset.stratify': False})


def test_a_name_that_no_parameter_has_is_refused_in_a_new_run_only(tmp_path):
    with pytest.raises(UserError, match="optimizer.decay_names has 'kernle'"):
        resolve(tmp_path / 'new', **{'optimizer.decay_names': ('kernle',)})
    run = resolve(tmp_path / 'before')
    names = ('kernel,scale',)  # which an earlier version took as one name
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
