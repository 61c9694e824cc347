"""VTAB-1k: recipes equal the definition, and one command trains all tasks with data."""

import json
import re

import jax
import numpy as np
import pytest

from tests.support import vtab as stand_ins
from tests.support.batches import make, numbers
from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.pages import check
from tests.support.runs import ROOT, check_message, load, run_here
from vit_jax import config as config_lib
from vit_jax import models, vtab, weights
from vit_jax.data import sources
from vit_jax.training import loop

recipes = load('vtab')

# From data/*.py of google-research/task_adaptation: classes, data set, start of the held-out
# examples, test split. The start is a percentage of train; None: the split validation; 'test': the
# test split. A number as the test split is the percentage of the source split where it starts.
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
    """Returns (split, number) of the examples of train800, val200 and test."""
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
    """Computes a label in NumPy as task_adaptation does."""

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
    """Returns a function that writes a fake data set once: name -> (data_dir, first examples)."""
    root, written = tmp_path_factory.mktemp('tfds'), {}

    def prepare(name):
        if name not in written:
            written[name] = stand_ins.write(root, name)
        return str(root), written[name]

    return prepare


QUICK = ('dtd', 'clevr_distance', 'kitti_distance', 'smallnorb_azimuth')  # all kinds of labels


@pytest.mark.parametrize(
    'task',
    nightly_but(QUICK, DEFINITION),
)
def test_task_equals_its_definition(task, prepared):
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


def test_transfer_settings():
    """Table 4, the preprocessing of BiT, and no crop or flip for labels that are places."""
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
    with refused('choice', field='the task of VTAB in MODEL,TASK', value='dsprite'):
        recipes.get_config('b16,dsprite')


@pytest.mark.parametrize('kind', ['tfrecord', pytest.param('array_record', marks=pytest.mark.slow)])
def test_sum_of_splits_has_only_its_examples(kind, tmp_path):
    """Each example is equally frequent over several epochs."""
    data = make(kind, tmp_path)  # 53 examples in 5 files
    found = numbers(data.batches(11, split='train[:8]+train[30:33]'))
    expected = [*range(8), 30, 31, 32]
    assert sorted(found) == sorted(8 * expected)
    assert sorted(numbers(data.evaluated(split='train[:8]+train[30:33]'))) == expected


@pytest.mark.slow
def test_command_trains_and_resumes(tmp_path, monkeypatch):
    """Two tasks train from weights; the second call does not train them again."""
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
    assert "Left out clevr_count, clevr_distance: data set 'clevr:3.*.*' is not" in result.stderr
    assert '1000 training images, 30 evaluation images, 4 classes' in result.stderr
    read, _ = check((tmp_path / 'all' / 'report.html').read_text())
    assert [row[0] for row in read.tables[0][1:]] == ['dtdNatural', 'kitti_distanceStructured']
    monkeypatch.setattr(loop, 'update', None)
    result = run_here(*arguments, command=vtab)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / 'all' / 'vtab.json').read_text()) == first


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
def test_config_file_without_tasks_is_refused(config, message, tmp_path):
    check_message(run_here(f'--config={config}', f'--workdir={tmp_path}', command=vtab), message)
