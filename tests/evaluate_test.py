import contextlib
import csv
import dataclasses
import io
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, confusion_matrix

from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.runs import TINY, load
from vit_jax import config as config_lib
from vit_jax import evaluate, weights
from vit_jax.scoring.split import dataset_of
from vit_jax.training import loop
from vit_jax.workdir import metrics


@pytest.fixture(scope='module')
def run(tmp_path_factory, image_directory):
    """A short run on three classes, with averaged parameters."""
    workdir = tmp_path_factory.mktemp('evaluate') / 'run'
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(
        TINY
        | {
            'num_epochs': 0.0,
            'num_steps': 8,
            'eval_every': 0,
            'dataset.name': str(image_directory),
            'ema_decay': 0.5,
            'batch_size': 24,
            'evals.fewshot.shots': (1, 5),
        }
    )
    assert loop.train(config, str(workdir)) == 0
    return workdir


@pytest.fixture(scope='module')
def scored(run):
    """The result of the command for the run."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert evaluate.main([f'--workdir={run}', '--batch_size=8', '--json']) == 0
    return json.loads(output.getvalue().splitlines()[-1])


def command(capsys, *arguments):
    """Runs the command; returns (exit code, JSON of the last line of stdout)."""
    code = evaluate.main([*arguments, '--batch_size=8', '--json'])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_workdir_has_the_scores_that_its_run_logged(run, scored):

    def main_metrics(values):
        return {
            name: value
            for name, value in values.items()
            if name.startswith('eval/') and name != 'eval/seconds'
        }

    values = main_metrics(scored)
    assert values.keys() >= {
        'eval/accuracy',
        'eval/accuracy_top5',
        'eval/loss',
        'eval/num_examples',
    }
    assert values == pytest.approx(main_metrics(metrics.read(run)[-1]), rel=1e-5)
    assert list(scored['classes']) == ['ant', 'bee', 'cat']
    right = sum(c['accuracy'] * c['num_examples'] for c in scored['classes'].values())
    assert right / 12 == pytest.approx(scored['eval/accuracy'])


@pytest.mark.slow
def test_the_label_of_a_run_is_also_evaluated(tfds_directory, tmp_path, capsys, caplog):
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(
        TINY
        | {
            'num_epochs': 0.0,
            'num_steps': 5,
            'eval_every': 0,
            'image_size': (8,),
            'dataset.name': 'dots',
            'dataset.data_dir': str(tfds_directory['tfrecord']),
            'dataset.label': 'label/2',
        }
    )
    assert loop.train(config, str(tmp_path)) == 0
    assert json.loads((tmp_path / 'config.json').read_text())['dataset']['label'] == 'label/2'
    assert json.loads((tmp_path / 'classes.json').read_text()) == ['ant-bee', 'cat']
    code, result = command(capsys, f'--workdir={tmp_path}')
    assert code == 0
    assert {name: row['num_examples'] for name, row in result['classes'].items()} == {
        'ant-bee': 8,
        'cat': 4,
    }
    accuracies = metrics.scores(metrics.read(str(tmp_path)), metrics.ACCURACY)
    assert result['eval/accuracy'] == accuracies[max(accuracies)]
    assert evaluate.main([f'--workdir={tmp_path}', '--label=label']) == 1
    assert 'has 2 classes and dots has 3' in caplog.records[-1].getMessage()
    with refused('conflict', file=tmp_path) as error:
        loop.train(config_lib.changed(config, {'dataset.label': ''}), str(tmp_path))
    assert "dataset.label: 'label/2' in the workdir, '' now" in error.value.value


def test_another_data_set_does_not_use_the_label_of_the_run(run):
    found = dataset_of(str(run), {'name': None})
    assert found['label'] == ''
    config = json.loads((run / 'config.json').read_text())
    config['dataset']['label'] = 'place'
    workdir = run.parent / 'labelled'
    (workdir / 'checkpoints').mkdir(parents=True)
    (workdir / 'config.json').write_text(json.dumps(config))
    (workdir / 'classes.json').write_text('[]')
    for given, label in ((None, 'place'), (config['dataset']['name'], 'place'), ('other', '')):
        found = dataset_of(str(workdir), {'name': given})
        assert found['label'] == label
    del config['dataset']['label']  # older versions did not have it
    (workdir / 'config.json').write_text(json.dumps(config))
    assert dataset_of(str(workdir), {'name': None})['label'] == ''


def test_a_checkpoint_of_a_workdir(run, scored, capsys):
    assert command(capsys, f'--workdir={run}/checkpoints/8') == (0, scored)


def test_a_path_that_is_no_workdir_is_refused(run, tmp_path, caplog):
    path = str(tmp_path / 'x.safetensors')
    weights.save(weights.load(str(run)), path, 'vit_jax')
    assert evaluate.main([f'--workdir={path}']) == 1
    assert f'--workdir={path} is not the workdir of a run' in caplog.records[-1].getMessage()


def test_a_missing_split_is_refused(run, image_directory, caplog):
    assert evaluate.main([f'--workdir={run}', '--split=tets']) == 1
    message = caplog.records[-1].getMessage()
    assert f"no split folder 'tets' in '{image_directory}'; the folders there are: test, train" in (
        message
    )
    assert 'or in --split of vit_jax.evaluate' in message


def test_weights_on_another_split(run, image_directory, capsys):
    """60 images in batches of 8: the last one is padded, and every image counts once."""
    code, result = command(
        capsys, f'--pretrained={run}', f'--dataset={image_directory}', '--split=train'
    )
    assert code == 0
    assert (result['dataset'], result['split']) == (str(image_directory), 'train')
    assert {c['num_examples'] for c in result['classes'].values()} == {20}


@pytest.mark.slow
def test_several_splits_in_one_call(run, scored, image_directory, capsys, caplog):
    """Each result equals the result of the split alone."""
    alone = [command(capsys, f'--workdir={run}', '--split=train[:50%]')[1], scored]
    splits = ['--split=train[:50%]', '--split=test']
    for arguments in ([], [f'--dataset={image_directory}'] * 2):
        code, result = command(capsys, f'--workdir={run}', *splits, *arguments)
        assert (code, result) == (0, {'results': alone})
    assert evaluate.main([f'--workdir={run}', *splits, f'--dataset={image_directory}']) == 0
    ends = [f'images of {image_directory}, {name}' for name in ('train[:50%]', 'test')]
    out = capsys.readouterr().out.splitlines()
    assert (out[3].endswith(ends[0]), out[7].endswith(ends[1]), len(out)) == (True, True, 8)
    for arguments, message in [
        (['--dataset=a', '--dataset=b', '--dataset=c'], '--dataset is given 3 times and --split 2'),
        (['--save=x.npz'], '--save is for one split'),
    ]:
        assert evaluate.main([f'--workdir={run}', *splits, *arguments]) == 1
        assert message in caplog.records[-1].getMessage()


@pytest.mark.slow
def test_preprocessing_of_the_command_line(run, image_directory, tmp_path, capsys, caplog):
    """Options have the same effect as values in the weights, and override them."""
    loaded, results = weights.load(str(run)), {}
    fields = dict(
        fit='squash',
        crop_ratio=0.6,
        resize='bicubic',
        antialias=False,
        mean=(0.4, 0.5, 0.6),
        std=(0.3, 0.2, 0.1),
    )
    flags = [
        '--preprocess=fit=squash,crop_ratio=0.6',
        '--preprocess=resize=bicubic',
        '--preprocess=antialias=False',
        '--preprocess=mean=0.4,0.5,0.6',
        '--preprocess=std=0.3,0.2,0.1',
    ]
    size = {'image_size': (16, 16)}
    for name, stated, arguments in [
        ('stated', size | fields, []),
        ('given', None, flags),
        ('both', loaded.preprocess, flags),
        ('silent', None, []),
    ]:
        path = str(tmp_path / f'{name}.safetensors')
        weights.save(dataclasses.replace(loaded, preprocess=stated), path, 'vit_jax')
        caplog.clear()
        _, results[name] = command(
            capsys,
            f'--pretrained={path}',
            f'--dataset={image_directory}',
            '--split=test',
            *arguments,
        )
        assert ('add --preprocess FIELD=VALUE' in caplog.text) == (name == 'silent')
    assert results['stated'] == results['given'] == results['both'] != results['silent']


def test_table(run, image_directory, capsys):
    assert evaluate.main([f'--workdir={run}']) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4
    accuracy, mean = re.match(
        'accuracy (.+ %)  mean of 3 classes (.+ %)  worst class .* of 4 images  loss ', out[-1]
    ).groups()
    assert accuracy == mean  # all classes have four images
    assert out[-1].endswith(f' on 12 images of {image_directory}, test')


def test_a_class_without_images_is_a_warning(run, tmp_path, capsys, caplog):
    write_images(tmp_path / 'test', ['ant', 'bee'], 4, seed=2)
    (tmp_path / 'test' / 'cat').mkdir()
    code, result = command(capsys, f'--workdir={run}', f'--dataset={tmp_path}')
    assert code == 0
    assert result['classes']['cat'] == {'accuracy': None, 'num_examples': 0}
    text = 'has no images of 1 of 3 classes: cat: accuracies say nothing about them'
    assert any(message.endswith(text) for message in caplog.messages)


def test_slices_equal_the_slices_of_the_run_for_every_address_of_its_weights(
    run, image_directory, tmp_path
):
    old = tmp_path / 'old'
    shutil.copytree(run, old)
    recorded = json.loads((old / 'config.json').read_text())
    del recorded['dataset']['stratify']  # earlier versions did not have them
    del recorded['dataset']['heic']
    (old / 'config.json').write_text(json.dumps(recorded))
    other = {'name': str(image_directory), 'eval_split': 'train[90%:]'}
    for field in ('stratify', 'heic'):
        for workdir, expected in ((run, True), (old, False)):
            checkpoint = max((pathlib.Path(workdir) / 'checkpoints').iterdir())
            assert dataset_of(str(workdir), {'name': None})[field] == expected
            assert dataset_of(None, other, str(workdir))[field] == expected
            assert dataset_of(None, other, str(checkpoint))[field] == expected
        assert dataset_of(None, other, 'hf:google/vit-base-patch16-224')[field]


def test_broken_images_are_not_scored_but_named_and_counted(run, tmp_path, capsys):
    """Evaluation allows more broken images than a training run."""
    write_images(tmp_path / 'test', ['ant', 'bee', 'cat'], 4, seed=2)
    broken = [tmp_path / 'test' / name for name in ('ant/001.png', 'cat/000.png')]
    broken[0].write_bytes(broken[0].read_bytes()[:60])
    broken[1].write_text('no image')
    arguments = [f'--workdir={run}', f'--dataset={tmp_path}']
    code, result = command(capsys, *arguments)
    assert code == 0
    assert result['broken'] == [str(path) for path in broken]
    assert [c['num_examples'] for c in result['classes'].values()] == [3, 4, 3]
    assert evaluate.main(arguments) == 0
    assert capsys.readouterr().out.endswith(
        f' on 10 images of {tmp_path}, test, 2 broken left out\n'
    )


def test_saved_logits_give_the_numbers(run, image_directory, tmp_path, capsys):
    """All numbers follow from the logits; the table has the worst class first."""
    code, result = command(capsys, f'--workdir={run}', '--split=train', f'--save={tmp_path}/x.npz')
    assert code == 0
    saved = np.load(tmp_path / 'x.npz')
    logits, label = saved['logits'], saved['label']
    assert (logits.shape, label.shape, len(set(saved['name']))) == ((60, 3), (60,), 60)
    names = saved['classes'].tolist()
    assert all(f'/train/{names[k]}/' in path for path, k in zip(saved['name'], label, strict=True))
    predicted = logits.argmax(-1)
    assert result['eval/accuracy'] == pytest.approx((predicted == label).mean())
    expected = confusion_matrix(label, predicted)
    assert [[result['confusion'][a].get(b, 0) for b in names] for a in names] == expected.tolist()
    assert [result['classes'][name]['accuracy'] for name in names] == pytest.approx(
        expected.diagonal() / 20
    )
    confidence = np.asarray(jax.nn.softmax(logits)).max(-1)
    bins = result['calibration']['bins']
    assert sum(b['num_examples'] * b['confidence'] for b in bins) == pytest.approx(
        confidence.sum(), rel=1e-5
    )
    assert evaluate.main([f'--workdir={run}', '--split=train']) == 0
    scores = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert scores == sorted(scores)


def read_table(path):
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def test_a_table_has_a_row_for_each_image(run, tmp_path, capsys):
    code, result = command(
        capsys, f'--workdir={run}', f'--csv={tmp_path}/x.csv', f'--save={tmp_path}/x.npz'
    )
    rows, saved = read_table(tmp_path / 'x.csv'), np.load(tmp_path / 'x.npz')
    assert code == 0
    assert list(rows[0]) == ['path', 'label', 'prediction', 'probability']
    assert [row['path'] for row in rows] == list(saved['name'])
    assert [row['label'] for row in rows] == list(saved['classes'][saved['label']])
    best = saved['logits'].argmax(-1)
    assert [row['prediction'] for row in rows] == list(saved['classes'][best])
    probabilities = np.asarray(jax.nn.softmax(saved['logits'])).max(-1)
    np.testing.assert_allclose(
        [float(row['probability']) for row in rows], probabilities, rtol=1e-5
    )
    right = np.mean([row['label'] == row['prediction'] for row in rows])
    assert result['eval/accuracy'] == pytest.approx(right)


def test_a_table_of_images_with_several_labels(run, labelled, tmp_path, capsys):
    root, labels = labelled
    options = [f'--pretrained={run}', '--loss=sigmoid', f'--dataset={root}', '--split=test']
    code, result = command(capsys, *options, f'--csv={tmp_path}/x.csv')
    rows = read_table(tmp_path / 'x.csv')
    assert code == 0
    assert len(rows) == 12
    for row in rows:
        assert row['label'].split(';') == labels[row['path'].rpartition('/')[2]]
        assert 0 < float(row['probability']) < 1
    right = np.mean([row['prediction'] in row['label'].split(';') for row in rows])
    assert result['eval/accuracy'] == pytest.approx(right)


def test_files_that_cannot_be_written_are_refused(run, tmp_path, caplog):
    (tmp_path / 'full.npz').symlink_to('/dev/full')
    for path, message in [
        ('x.csv', 'x.csv cannot be written: expected a name that ends in .npz'),
        (f'{tmp_path}/full.npz', f'{tmp_path}/full.npz cannot be written (No sp'),
        (f'{tmp_path}/no/x.npz', f'there is no directory {tmp_path}/no'),
    ]:
        assert evaluate.main([f'--workdir={run}', f'--save={path}']) == 1
        assert message in caplog.records[-1].getMessage()
    assert evaluate.main([f'--workdir={run}', '--csv=x.npz']) == 1
    assert 'expected a name that ends in .csv' in caplog.records[-1].getMessage()
    assert caplog.text.count('calibration error') == 1  # the result is logged


@pytest.fixture
def labelled(image_directory, tmp_path):
    """The images of the test split with one label or two each: (directory, {name: labels})."""
    folder, labels = tmp_path / 'labelled' / 'test', {}
    folder.mkdir(parents=True)
    for number, path in enumerate(sorted((image_directory / 'test').glob('*/*.png'))):
        labels[f'{number}.png'] = sorted({path.parent.name, ['ant', 'bee', 'cat'][number % 3]})
        shutil.copy(path, folder / f'{number}.png')
    with open(folder / 'labels.csv', 'w', newline='') as file:
        csv.writer(file).writerows([name, ';'.join(found)] for name, found in labels.items())
    return folder.parent, labels


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_several_labels(loss, run, labelled, tmp_path, capsys, caplog):
    """The weights may be trained for one label, which the log says, or for several."""
    root, labels = labelled
    code, result = command(
        capsys,
        f'--pretrained={run}',
        f'--loss={loss}',
        f'--dataset={root}',
        '--split=test',
        f'--save={tmp_path}/x.npz',
    )
    assert code == 0
    assert ('was trained for one: an image is right' in caplog.text) == (loss == 'softmax')
    saved = np.load(tmp_path / 'x.npz')
    targets = np.array(
        [
            [name in labels[path.rpartition('/')[2]] for name in saved['classes']]
            for path in saved['name']
        ]
    )
    np.testing.assert_array_equal(saved['label'], targets)
    logits = saved['logits'].astype(np.float64)
    scores = logits if loss == 'sigmoid' else np.asarray(jax.nn.log_softmax(logits))
    precision = average_precision_score(targets, scores, average=None)
    assert result['eval/mean_average_precision'] == pytest.approx(precision.mean(), rel=1e-5)
    assert [c['average_precision'] for c in result['classes'].values()] == pytest.approx(
        precision, rel=1e-5
    )
    assert result['eval/accuracy'] == pytest.approx(targets[range(12), logits.argmax(-1)].mean())
    if loss == 'softmax':
        expected = -(targets / targets.sum(-1, keepdims=True) * scores).sum(-1).mean()
        assert result['eval/loss'] == pytest.approx(expected, rel=1e-5)
    assert 'confusion' not in result


def test_weights_for_several_labels_on_images_with_one(
    run, image_directory, tmp_path, capsys, caplog
):
    config = json.loads((run / 'config.json').read_text())
    config['dataset']['multi_label'] = True
    shutil.copytree(run, tmp_path / 'run')
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(config))
    code, result = command(capsys, f'--workdir={tmp_path}/run', '--loss=sigmoid')
    assert code == 0
    assert 'images have one label and' in caplog.text
    assert 'eval/mean_average_precision' not in result


@pytest.mark.slow
def test_labels_from_a_list_in_the_order_of_files(run, image_directory, tmp_path, capsys, caplog):
    """Images without labels do not count, and any label is right, as in ImageNet-ReaL."""
    names, lists, right = ['ant', 'bee', 'cat'], [], {}
    for number, path in enumerate(sorted((image_directory / 'test').glob('*/*.png'))):
        folder = tmp_path / 'data' / 'val' / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / f'val_{number:02}.png')
        lists.append([[], [0], [1, 2], [names.index(path.parent.name)]][number % 4])
        right[f'val_{number:02}.png'] = lists[-1]
    (tmp_path / 'real.json').write_text(json.dumps(lists))
    arguments = [
        f'--workdir={run}',
        f'--dataset={tmp_path}/data',
        '--split=val',
        f'--labels={tmp_path}/real.json',
        f'--save={tmp_path}/x.npz',
    ]
    code, result = command(capsys, *arguments)
    assert code == 0
    assert result['eval/num_examples'] == 9
    assert result['labels'] == f'{tmp_path}/real.json'
    saved = np.load(tmp_path / 'x.npz')
    hits = [
        int(k) in right[path.rpartition('/')[2]]
        for path, k in zip(saved['name'], saved['logits'].argmax(-1), strict=True)
    ]
    assert (len(hits), result['eval/accuracy']) == (9, pytest.approx(np.mean(hits)))
    for text, message in [
        ('[[0]]', 'real.json has 1 lists of labels and the split has 12'),
        ('{"0": [0]}', 'expected a list'),
        ('no', 'cannot be read'),
        (json.dumps([[]] * 12), 'no image of the split has a label'),
    ]:
        (tmp_path / 'real.json').write_text(text)
        assert evaluate.main(arguments) == 1
        assert message in caplog.records[-1].getMessage()


def test_a_loss_that_is_newer_than_the_run(run, scored, tmp_path, capsys):
    shutil.copytree(run, tmp_path / 'run')
    config = json.loads((run / 'config.json').read_text())
    del config['loss']['label_smoothing']
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(config))
    assert command(capsys, f'--workdir={tmp_path}/run') == (0, scored)


def test_classes_of_another_data_set(run, image_directory, tmp_path, capsys, caplog):
    """Any mapped class is right, and images without one are not scored, as in ObjectNet."""
    for old, new in (('ant', 'small_insect'), ('bee', 'flier'), ('cat', 'pet')):
        shutil.copytree(image_directory / 'test' / old, tmp_path / 'data' / 'images' / new)
    (tmp_path / 'mappings').mkdir()
    files = {
        'folder_to_objectnet_label': {
            'small_insect': 'Small insect',
            'flier': 'Flier',
            'pet': 'Pet',
        },
        'objectnet_to_imagenet_1k': {
            'Small insect': 'bee, honey; Ant',
            'Pet': 'cat',
            'Flyer': 'bee',
        },
    }
    for name, content in files.items():
        (tmp_path / 'mappings' / f'{name}.json').write_text(json.dumps(content))
    arguments = [
        f'--workdir={run}',
        f'--dataset={tmp_path}/data',
        '--split=images',
        f'--save={tmp_path}/x.npz',
    ]
    code, result = command(capsys, *arguments, f'--mapping={tmp_path}/mappings')
    assert code == 0
    assert result['eval/num_examples'] == 8
    assert '2 of the 3 classes of' in caplog.text
    assert 'has no images' not in caplog.text
    assert (
        f'{tmp_path}/mappings/objectnet_to_imagenet_1k.json has Flyer, and '
        f'{tmp_path}/mappings/folder_to_objectnet_label.json has no folder for them. '
        'Did you mean Flier? '
    ) in caplog.text
    assert result['mapping'] == f'{tmp_path}/mappings'
    saved = np.load(tmp_path / 'x.npz')
    hits = [
        int(k) in ((0, 1) if 'insect' in path else (2,))
        for path, k in zip(saved['name'], saved['logits'].argmax(-1), strict=True)
    ]
    assert (len(hits), result['eval/accuracy']) == (8, pytest.approx(np.mean(hits)))
    plain = tmp_path / 'map.json'
    plain.write_text('{"small_insect": ["bee", "ant"], "pet": "cat", "fleir": "bee"}')
    assert (
        command(capsys, *arguments, f'--mapping={plain}')[1]['eval/accuracy']
        == result['eval/accuracy']
    )
    assert (
        f'{plain} has fleir, and {tmp_path}/data has no images of them. Did you mean flier? '
        in caplog.text
    )
    for text, message in [
        ('{"pet": "dog"}', "has 'dog' for pet, which is not a class of the weights"),
        ('{"pet": 3}', 'has 3 for pet: expected names'),
        ('[]', 'an object'),
        ('{"dog": "cat"}', 'has none of the classes of the data set'),
    ]:
        plain.write_text(text)
        assert evaluate.main([*arguments, f'--mapping={plain}']) == 1
        assert message in caplog.records[-1].getMessage()
    assert evaluate.main([*arguments, f'--mapping={plain}', '--labels=x.json']) == 1
    assert 'give one of them' in caplog.records[-1].getMessage()


def test_no_readable_image(run, tmp_path, caplog):
    write_images(tmp_path / 'test', ['ant', 'bee', 'cat'], 1)
    for path in tmp_path.rglob('*.png'):
        path.write_text('no image')
    assert evaluate.main([f'--workdir={run}', f'--dataset={tmp_path}']) == 1
    message = caplog.records[-1].getMessage()
    assert 'no image can be read: 3 of 3, 100.00%. Fix or remove them:' in message


def test_other_classes(run, tmp_path, caplog):
    write_images(tmp_path / 'two' / 'test', ['ant', 'bee'], 2)
    write_images(tmp_path / 'three' / 'test', ['ant', 'bee', 'dog'], 2)
    for folder, message in [
        ('two', 'has no folder for class(es) cat'),
        ('three', 'dog'),
        ('missing', 'no directory'),
    ]:
        assert evaluate.main([f'--workdir={run}', f'--dataset={tmp_path / folder}']) == 1
        assert message in caplog.records[-1].getMessage()
    assert evaluate.main([f'--workdir={run}', '--batch_size=0']) == 1
    assert '--batch_size is 0' in caplog.records[-1].getMessage()
    assert evaluate.main([f'--pretrained={run}']) == 1
    assert '--pretrained needs --dataset=NAME_OR_DIRECTORY' in caplog.records[-1].getMessage()


def test_fewshot_equals_the_accuracies_that_the_run_logged(run, capsys):
    """The command uses the averaged parameters and the splits of the run."""
    _, result = command(capsys, f'--workdir={run}', '--fewshot=1,5')
    found = {row['shots']: row for row in result['fewshot'] if row['method'] == 'least squares'}
    logged = metrics.read(run)[-1]
    for shots in (1, 5):
        assert found[shots]['accuracy'] == pytest.approx(logged[f'fewshot/{shots}shot'])
        assert found[shots]['deviation'] == pytest.approx(logged[f'fewshot/{shots}shot_deviation'])


@pytest.mark.slow
def test_fewshot_of_classes_that_the_model_has_not_seen(run, tmp_path, capsys):
    """The table and the JSON agree, and the batch size does not change the features."""
    write_images(tmp_path / 'train', ['red', 'blue'], 9, seed=3)
    write_images(tmp_path / 'test', ['red', 'blue'], 7, seed=4)
    (tmp_path / 'test' / 'red' / '000.png').write_text('no image')
    arguments = [
        f'--pretrained={run}',
        f'--dataset={tmp_path}',
        '--split=test',
        '--fewshot=1,5',
        '--fewshot_l2=1,1024',
        '--fewshot_seeds=2',
    ]
    code, result = command(capsys, *arguments)
    assert code == 0
    assert {name: result[name] for name in result if name not in ('fewshot', 'dataset')} == {
        'train_split': 'train',
        'split': 'test',
        'representation': 'pre_logits',
        'num_features': 16,
        'num_train': 18,
        'num_test': 13,
        'broken': [str(tmp_path / 'test' / 'red' / '000.png')],
    }
    assert {
        (row['shots'], row['l2']) for row in result['fewshot'] if row['method'] == 'least squares'
    } == {(shots, l2) for shots in (1, 5, None) for l2 in (1.0, 1024.0)}
    assert evaluate.main([*arguments, '--batch_size=16', '--representation=patch_mean']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split('  ')[0] == 'shots'
    assert [line.split()[0] for line in lines[1:4]] == ['1', '5', 'all']
    assert lines[4] == (
        'accuracy in %, mean ± standard deviation of 2 draws, of 16 features '
        f'(patch_mean) of 18 images of {tmp_path}, train, on 13 of test, 1 broken '
        'left out'
    )


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            ['--fewshot=0'],
            "--fewshot is '0': expected a whole number, at least 1; or several, with commas",
        ),
        (['--fewshot=1,five'], "--fewshot is '1,five': expected"),
        (['--fewshot=1', '--fewshot_l2=0'], "--fewshot_l2 is '0': expected"),
        (['--fewshot=1', '--fewshot_seeds=0'], '--fewshot_seeds is 0'),
        (['--fewshot=1', '--fewshot_split=test'], '--fewshot_split test and --split test have'),
        (['--fewshot=1', '--fewshot_split=test[8:]'], 'test[8:] and --split test have images in'),
        (
            ['--fewshot=1', '--representation=cls'],
            "the representation is 'cls'. It is one of: pre_log",
        ),
        (['--fewshot_split=train'], '--fewshot_split is for few-shot accuracy: add --fewshot='),
        (['--fewshot=1,21'], '21 shots are more than'),
        (
            ['--fewshot=1,21'],
            'has of 3 of 3 classes: ant (20), bee (20), cat (20). Use at most',
        ),
    ],
)
def test_impossible_fewshot_options_are_refused(run, options, message, caplog):
    assert evaluate.main([f'--workdir={run}', '--split=test', *options]) == 1
    assert message in caplog.records[-1].getMessage()


def test_fewshot_of_one_class(run, tmp_path, caplog):
    for split in ('train', 'test'):
        write_images(tmp_path / split, ['ant'], 3)
    assert (
        evaluate.main(
            [f'--pretrained={run}', f'--dataset={tmp_path}', '--split=test', '--fewshot=1']
        )
        == 1
    )
    assert 'has one class, ant: few-shot needs two or more' in caplog.records[-1].getMessage()


@pytest.fixture
def renamed(run, tmp_path):
    """The run's weights in a layout, with other names of classes: (names, layout) -> path."""

    def write(names, layout):
        named = dataclasses.replace(weights.load(str(run)), classes=names)
        path = str(tmp_path / ('x.safetensors' if layout == 'vit_jax' else 'x'))
        weights.save(named, path, layout)
        return path

    return write


@pytest.mark.parametrize(
    ('names', 'layout'),
    [
        (['Formica', 'Apis', 'Felis'], 'huggingface'),
        (['crane', 'maillot', 'crane'], 'huggingface'),  # as in ImageNet: names do not tell classes
        (['ant', 'crane', 'crane'], 'vit_jax'),
    ],
)
def test_classes_with_other_names_are_matched_by_order(
    names, layout, renamed, scored, image_directory, capsys, caplog
):
    code, result = command(
        capsys,
        f'--pretrained={renamed(names, layout)}',
        f'--dataset={image_directory}',
        '--split=test',
    )
    assert code == 0
    assert list(result['classes']) == ['ant', 'bee', 'cat']
    assert result['eval/accuracy'] == scored['eval/accuracy']
    assert result['eval/loss'] == pytest.approx(scored['eval/loss'], rel=1e-5)
    assert ': the same order is assumed' in caplog.text


def test_classes_with_the_same_names_are_matched_by_name(renamed, image_directory, capsys):
    path = renamed(['cat', 'ant', 'bee'], 'huggingface')
    _, result = command(
        capsys, f'--pretrained={path}', f'--dataset={image_directory}', '--split=test'
    )
    assert list(result['classes']) == ['cat', 'ant', 'bee']


@pytest.mark.parametrize(
    ('names', 'layout', 'message'),
    [
        (['Formica', 'Apis', 'Felis'], 'vit_jax', 'or the weights are: Formica, Apis, Felis'),
        (['ant', 'bee', 'dog'], 'huggingface', 'or the weights are: ant, bee, dog'),
        (['crane', 'ant', 'crane'], 'huggingface', "class 0 is 'crane' in"),  # ant is another one
        (['crane', 'crane', 'ant'], 'vit_jax', "class 0 is 'crane' in"),
    ],
)
def test_names_that_contradict_the_data_are_refused(
    names, layout, message, renamed, image_directory, caplog
):
    assert (
        evaluate.main(
            [
                f'--pretrained={renamed(names, layout)}',
                f'--dataset={image_directory}',
                '--split=test',
            ]
        )
        == 1
    )
    assert message in caplog.records[-1].getMessage()
