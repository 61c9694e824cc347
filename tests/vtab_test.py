"""VTAB-1k: recipes equal the definition, and one command does all tasks that have data."""

import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest

from tests.support import vtab as stand_ins
from tests.support.batches import make, numbers
from tests.support.pages import check, write_workdir
from tests.support.runs import ROOT, begin, check_message, load, run_here
from vit_jax import config as config_lib
from vit_jax import models, vtab, weights
from vit_jax.data import sources
from vit_jax.errors import DivergedError, UserError
from vit_jax.training import loop

recipes = load('vtab')

# data/*.py of google-research/task_adaptation: classes, the set, and where its splits come from:
# the share of train, in per cent, that is the new train; None where there is a split validation.
# Of three numbers the second is that of validation, and the rest of train is the test split.
DEFINITION = {
    'caltech101': (102, 'caltech101', 90, 'test'),
    'cifar100': (100, 'cifar100', 90, 'test'),
    'dtd': (47, 'dtd', None, 'test'),
    'oxford_flowers102': (102, 'oxford_flowers102', None, 'test'),
    'oxford_iiit_pet': (37, 'oxford_iiit_pet', 80, 'test'),
    'sun397': (397, 'sun397/tfds', None, 'test'),
    'svhn': (10, 'svhn_cropped', 90, 'test'),
    'patch_camelyon': (2, 'patch_camelyon', None, 'test'),
    'eurosat': (10, 'eurosat/rgb', 60, 80),
    'resisc45': (45, 'resisc45', 60, 80),
    'diabetic_retinopathy': (5, 'diabetic_retinopathy_detection/btgraham-300', None, 'test'),
    'clevr_count': (8, 'clevr', 90, 'validation'),
    'clevr_distance': (6, 'clevr', 90, 'validation'),
    'dmlab': (6, 'dmlab', None, 'test'),
    'dsprites_location': (16, 'dsprites', 80, 90),
    'dsprites_orientation': (16, 'dsprites', 80, 90),
    'kitti_distance': (4, 'kitti', None, 'test'),
    'smallnorb_azimuth': (18, 'smallnorb', 'test', 50),
    'smallnorb_elevation': (9, 'smallnorb', 'test', 50),
}
GROUPS = {'Natural': 7, 'Specialized': 4, 'Structured': 8}  # arXiv 1910.04867, section 3


def defined_examples(task):
    """(split of the set, number) of the examples of train800, val200 and test."""
    _, name, held_out, test = DEFINITION[task]
    sizes = stand_ins.SIZES[name]
    if held_out is None:
        val, first = 'validation', 0
    elif held_out == 'test':
        val, first = 'test', 0
    else:
        val, first = 'train', held_out * sizes['train'] // 100
    test, begin = (test, 0) if isinstance(test, str) else (val, test * sizes[val] // 100)
    return (
        [('train', k) for k in range(800)],
        [(val, first + k) for k in range(200)],
        [(test, k) for k in range(begin, sizes[test])],
    )


def defined_label(task, example):
    """As task_adaptation computes it, in NumPy."""

    def highest(thresholds, distance):
        return np.max(np.where((np.array(thresholds, np.float32) - distance) < 0))

    objects = example.get('objects')
    if task == 'clevr_count':
        return len(objects) - 3
    if task == 'clevr_distance':
        return highest(
            [0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0], min(each['pixel_coords'][2] for each in objects)
        )
    if task == 'kitti_distance':
        vehicles = [each['location'][2] for each in objects if each['type'] < 3]
        return highest([-100.0, 8.0, 20.0, 999.0], min([*vehicles, 1000.0]))
    if task == 'dsprites_location':
        return int(example['label_x_position'] // (32 / 16))
    if task == 'dsprites_orientation':
        return int(example['label_orientation'] // (40 / 16))
    return example[
        {'smallnorb_azimuth': 'label_azimuth', 'smallnorb_elevation': 'label_elevation'}.get(
            task, 'label'
        )
    ]


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """What writes the stand-in of a set once, and returns (data_dir, its first examples)."""
    root, written = tmp_path_factory.mktemp('tfds'), {}

    def prepare(name):
        if name not in written:
            written[name] = stand_ins.write(root, name)
        return str(root), written[name]

    return prepare


QUICK = 'dtd', 'clevr_distance', 'kitti_distance', 'smallnorb_azimuth'  # of each kind of label


@pytest.mark.parametrize(
    'task',
    [pytest.param(task, marks=[] if task in QUICK else pytest.mark.slow) for task in DEFINITION],
)
def test_a_task_is_as_defined(task, prepared):
    config = config_lib.checked(recipes.get_config(f'ti16,{task}'))
    dataset, num_classes = config.dataset, DEFINITION[task][0]
    name = re.sub(r'\d+\.[\d*]+\.[\d*]+$', '', dataset.name).rstrip(':')
    assert name == DEFINITION[task][1]
    data_dir, examples = prepared(name + (':3.1.0' if name == 'kitti' else ''))

    def opened(split):
        return sources.open_source(dataset.name, split, data_dir, label=dataset.label)

    def at(source, index):
        return re.search(
            r'-(\w+)\.tfrecord-00000-of-00001 record (\d+)$', source.name_of(index)
        ).groups()

    train, val, test = defined_examples(task)
    for split, expected in (
        (dataset.train_split, train),
        (dataset.eval_split, val),
        (dataset.final_split, train + val),
        (dataset.test_split, test),
    ):
        source = opened(split)
        assert len(source.class_names) == dataset.num_classes == num_classes
        assert len(set(source.class_names)) == num_classes
        assert source.num_examples == len(expected)
        chosen = {*range(min(1000, len(expected))), len(expected) - 1}
        assert [at(source, k) for k in chosen] == [
            (name, str(number)) for name, number in (expected[k] for k in chosen)
        ]
    assert len({*train, *val}) == 1000
    assert not {*train, *val} & {*test}
    source, labels = opened('train'), [defined_label(task, example) for example in examples]
    files = sources.tf.data.TFRecordDataset(source.pieces.filename[0])
    items = [source.load({'record': record}) for record in files]
    assert [int(label) for _, label in items] == labels
    assert len(set(labels)) > 1
    if name == 'dsprites':  # 0 and 1 there
        assert set(np.unique(sources.tf.io.decode_png(items[0][0]))) == {0, 255}


def test_the_transfer_setting():
    """Table 4; BiT's pixels at one size; no crop or flip where the label is a place."""
    assert set(DEFINITION) == set(recipes.TASKS)
    groups = recipes.get_tasks()
    assert {group: list(groups.values()).count(group) for group in GROUPS} == GROUPS
    for task, group in groups.items():
        config = recipes.get_config(f'b16,{task}')
        assert (config.num_steps, config.batch_size, config.image_size) == (2500, 512, (384, 384))
        assert config.optimizer.learning_rate == 0.01
        assert (config.preprocess.fit, config.preprocess.crop_ratio) == ('squash', 1)
        crop = config.augment.crop, config.augment.flip
        assert crop == (('none', False) if group == 'Structured' else ('resize', True))
    with pytest.raises(
        UserError, match="the task of VTAB in MODEL,TASK is 'dsprite'. Did you mean dsprites"
    ):
        recipes.get_config('b16,dsprite')


@pytest.mark.parametrize('kind', ['tfrecord', pytest.param('array_record', marks=pytest.mark.slow)])
def test_a_sum_of_splits_has_only_its_examples(kind, tmp_path):
    """Over several epochs, each example equally often."""
    data = make(kind, tmp_path)  # 53 examples in 5 files
    found = numbers(data.batches(11, split='train[:8]+train[30:33]'))
    expected = [*range(8), 30, 31, 32]
    assert sorted(found) == sorted(8 * expected)
    assert sorted(numbers(data.evaluated(split='train[:8]+train[30:33]'))) == expected


CONFIG = """
import runpy

def get_config(arg):
    model, task = arg.split(',')
    config = runpy.run_path({quickstart!r})['get_config']()
    config.dataset.update(
        name='digits' if task != 'b' else 'cifar100', data_dir='/nowhere',
        train_split='train[:40]', eval_split='train[40:50]', final_split='train[:50]',
        test_split='test', num_examples=40)
    return config

def get_tasks():
    return dict(a='First', b='First', c='Second', d='Second')
"""


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / 'tasks.py'
    path.write_text(CONFIG.format(quickstart=f'{ROOT}/configs/quickstart.py'))
    return path


def command(tasks, *arguments):
    return run_here(
        f'--config={tasks}:any', f'--workdir={tasks.parent}/all', *arguments, command=vtab
    )


def test_all_tasks_by_one_command(tasks, monkeypatch):
    """On the 1,000 examples, scored once; what is missing or diverges is named."""
    runs = {}

    def train(config, folder):
        task = os.path.basename(folder)
        runs[task] = config_lib.flatten(config)
        scores = {'a': [0.5], 'c': [0.75], 'd': []}[task]
        write_workdir(pathlib.Path(folder), config, scores)
        if not scores:
            raise DivergedError('loss nan')
        return 0

    monkeypatch.setattr(loop, 'train', train)
    result = command(tasks, '--config.seed=3')
    assert result.returncode == 0, result.stderr
    assert list(runs) == ['a', 'c', 'd']
    for run in runs.values():
        assert (
            run['dataset.train_split'],
            run['dataset.eval_split'],
            run['eval_every'],
            run['seed'],
            run['keep_best'],
        ) == ('train[:50]', 'test', 0, 3, False)
    assert "left out: b: data set 'cifar100' is not prepared" in result.stderr
    assert "tfds.builder('cifar100', data_dir='/nowhere').download" in result.stderr
    assert 'WARNING left out: b: data set' in (tasks.parent / 'all' / 'train.log').read_text()
    assert 'd diverges and has no accuracy: loss nan' in result.stderr
    lines = [' '.join(line.split()) for line in result.stderr.splitlines()]
    first = lines.index('First, mean, of 1 of 2 tasks 50.00 %')
    assert lines[first : first + 7] == [
        'First, mean, of 1 of 2 tasks 50.00 %',
        'a 50.00 %',
        'b no data',
        'Second, mean, of 1 of 2 tasks 75.00 %',
        'c 75.00 %',
        'd diverges',
        'all, mean, of 2 of 4 tasks 62.50 %',
    ]
    written = json.loads((tasks.parent / 'all' / 'vtab.json').read_text())
    assert written == {
        'tasks': {
            'a': {'group': 'First', 'test_accuracy': 0.5},
            'c': {'group': 'Second', 'test_accuracy': 0.75},
            'd': {'group': 'Second', 'test_accuracy': None},
        },
        'failed': [],
        'missing': ['b'],
        'means': {
            'First': {'test_accuracy': 0.5, 'tasks': 1, 'of': 2},
            'Second': {'test_accuracy': 0.75, 'tasks': 1, 'of': 2},
            'all': {'test_accuracy': 0.625, 'tasks': 2, 'of': 4},
        },
    }
    read, _ = check((tasks.parent / 'all' / 'report.html').read_text())
    assert [row[:2] for row in read.tables[0][1:]] == [
        ['aFirst', '50.00 %'],
        ['cSecond', '75.00 %'],
        ['dSecond · diverges', '–'],
    ]
    result = command(tasks, '--tasks=a')
    assert f'not in these numbers: c, d, also in {tasks.parent / "all"}. Name all' in result.stderr


def test_a_task_that_fails_leaves_the_others(tasks, monkeypatch):
    """Where all fail, numbers that were there stay."""
    words = {'a': 'a record is damaged', 'c': 'another is damaged', 'd': ''}

    def train(config, folder):
        task = os.path.basename(folder)
        if words[task]:
            raise UserError(words[task])
        write_workdir(pathlib.Path(folder), config, [0.25])
        return 0

    monkeypatch.setattr(loop, 'train', train)
    result = command(tasks)
    assert result.returncode == 1
    assert 'task a failed: a record is damaged\n' in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        'error: 2 of 4 tasks failed, as said above: a, c. Mend that, and run the same command'
    )
    lines = [' '.join(line.split()) for line in result.stderr.splitlines()]
    assert {'a failed', 'b no data', 'c failed', 'd 25.00 %'} < set(lines)
    path = tasks.parent / 'all' / 'vtab.json'
    written = json.loads(path.read_text())
    assert (written['failed'], written['missing']) == (['a', 'c'], ['b'])
    words.update(d='the disk is full')
    assert '3 of 4 tasks failed, as said above: a, c, d' in command(tasks).stderr
    assert json.loads(path.read_text())['tasks'] == {
        'd': {'group': 'Second', 'test_accuracy': 0.25}
    }
    path.with_name('config.json').write_text('{}')
    assert f'{path.parent} holds a run or a model' in command(tasks).stderr


def test_tasks_go_on_with_as_many_devices_as_those_of_an_older_version(tasks, monkeypatch):
    given = []
    monkeypatch.setattr(vtab, 'run', lambda *_: 0)
    monkeypatch.setattr(vtab.machine, 'cores', lambda: 2)
    monkeypatch.setattr(vtab.machine, 'check_backend', given.append)
    command(tasks)
    begin(tasks.parent / 'all' / 'c', config_lib.base(), without=['host_devices'])
    command(tasks)
    assert given == [2, 1]


@pytest.mark.slow
def test_the_command_trains_and_continues(tmp_path, monkeypatch):
    """Two sets of full size, real training from weights; then nothing is trained again."""
    sizes = {'train': 810, 'validation': 210, 'test': 30}
    stand_ins.write(tmp_path, 'dtd', sizes)
    stand_ins.write(tmp_path, 'kitti:3.1.0', sizes)
    model = models.fields('ti16') | {'num_layers': 1, 'hidden_size': 24, 'mlp_dim': 24}
    params = models.build(model, 3).init(jax.random.key(0), np.zeros([1, 32, 32, 3]))['params']
    loaded = weights.Weights(jax.tree.map(np.asarray, params), model, 3, None, None, 'vit_jax', '')
    weights.save(loaded, str(tmp_path / 'w.safetensors'), 'vit_jax')
    arguments = (
        f'--config={ROOT}/configs/vtab.py:ti16',
        f'--workdir={tmp_path}/all',
        f'--config.pretrained={tmp_path}/w.safetensors',
        '--config.num_steps=3',
        '--config.batch_size=8',
        '--config.image_size=32',
        '--config.model.num_layers=1',
        '--config.model.hidden_size=24',
        '--config.model.mlp_dim=24',
        '--config.accum_steps=1',
        f'--config.dataset.data_dir={tmp_path}',
    )
    result = run_here(*arguments, command=vtab)
    assert result.returncode == 0, result.stderr
    first = json.loads((tmp_path / 'all' / 'vtab.json').read_text())
    assert set(first['tasks']) == {'dtd', 'kitti_distance'}
    assert len(first['missing']) == 17
    assert "left out: clevr_count, clevr_distance: data set 'clevr:3.*.*' is not" in result.stderr
    assert '1000 training images, 30 evaluation images, 4 classes' in result.stderr
    read, _ = check((tmp_path / 'all' / 'report.html').read_text())
    assert [row[0] for row in read.tables[0][1:]] == ['dtdNatural', 'kitti_distanceStructured']
    monkeypatch.setattr(loop, 'update', None)
    result = run_here(*arguments, command=vtab)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / 'all' / 'vtab.json').read_text()) == first


def test_a_signal_ends_all(tasks, monkeypatch):
    monkeypatch.setattr(loop, 'train', lambda config, folder: 143)
    result = command(tasks, '--tasks=c, a')
    assert result.returncode == 143
    assert 'run the same command again' in result.stderr
    assert not (tasks.parent / 'all' / 'vtab.json').exists()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--tasks=a,e'], "--tasks is 'e'. It is one of: a, b, c, d."),
        (
            ['--config.dataset.num_classes=9'],
            "the task a: 'digits' has 10 classes, and the recipe 9: prepare the set again.",
        ),
        (['--tasks=b'], 'the data of none of the tasks are on this machine'),
        (
            ['--config.dataset.label=colour'],
            "the task a: dataset.label (--label) is 'colour', and only "
            "TFDS sets have several to choose from: leave it empty for 'digits'.",
        ),
        (
            ['--coordinator=localhost:1', '--num_processes=2', '--process_id=0'],
            'vit_jax.vtab runs as one process and was started as one of 2',
        ),
        (['--config.batchsize=3'], 'Did you mean batch_size'),
    ],
)
def test_mistakes(tasks, arguments, message):
    check_message(command(tasks, *arguments), message)
    assert not (tasks.parent / 'all').exists()


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (
            f'{ROOT}/configs/quickstart.py',
            'has no tasks (a function get_tasks): expected --config=',
        ),
        (f'{ROOT}/configs/vtabs.py:b16', 'no config file'),
        (
            f'{ROOT}/configs/vtab.py:b16,dtd',
            'vtab.py:b16,dtd names more than a model: expected --conf',
        ),
        (f'{ROOT}/configs/vtab.py:b61', "unknown model 'b61'. Did you mean b16"),
    ],
)
def test_a_config_file_without_tasks(config, message, tmp_path):
    check_message(run_here(f'--config={config}', f'--workdir={tmp_path}', command=vtab), message)
