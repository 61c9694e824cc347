import functools
import json
import math
import os
import re
import shutil
import signal

import jax
import pytest
from PIL import Image

from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.runs import TIMED, TINY, begin, load
from vit_jax.errors import DivergedError
from vit_jax.evaluators import evaluator
from vit_jax.training import accumulation, loop, run_memory
from vit_jax.training import run as run_lib
from vit_jax.workdir import curves, metrics


def make_config(**fields):
    config = load('quickstart').get_config()
    fields = {name.replace('__', '.'): value for name, value in fields.items()}
    config.update_from_flattened_dict(
        TINY | {'num_epochs': 0.0, 'num_steps': 12, 'eval_every': 100} | fields
    )
    return config


config = make_config


def directory_config(root, **fields):
    return config(dataset__name=str(root), image_size=(8,), **fields)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """The workdir of a complete run with evaluations and checkpoints at different steps."""
    workdir = tmp_path_factory.mktemp('finished')
    assert (
        loop.train(
            config(eval_every=4, checkpoint_every=5, keep_best=True, keep_checkpoints=1),
            str(workdir),
        )
        == 0
    )
    return workdir


def rows(workdir, name):
    return [row for row in metrics.read(workdir) if name in row]


@pytest.mark.pictures
def test_a_run_writes_all_of_its_files(tmp_path, caplog):
    assert loop.train(config(checkpoint_every=5, keep_every=4, log_every=4), str(tmp_path)) == 0
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == ['10', '12', '4', '8']
    assert {'config.json', 'classes.json', 'metrics.jsonl', 'curves.png'} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert any('tfevents' in p.name for p in tmp_path.iterdir())
    training = rows(tmp_path, 'train/loss')
    assert [row['step'] for row in training] == [4, 8, 12]
    assert {
        'train/loss',
        'train/learning_rate',
        'train/grad_norm',
        'train/update_norm',
        'train/images_per_sec',
        'train/data_wait',
        'train/eta_sec',
        'train/flops_per_sec',
        'train/memory_gb',
        'step',
    } == set(training[0])
    # 360 images in batches of 32: the last one is padded, and every image counts once.
    assert [row['eval/num_examples'] for row in rows(tmp_path, 'eval/accuracy')] == [360]
    for text in (
        '  blocks     2 layers ',
        '1437 training images, 360 evaluation images',
        'done: 12 steps',
        'curves.png',
        'checkpoints/12',
    ):
        assert text in caplog.text
    # A complete run may log with another period.
    assert loop.train(config(checkpoint_every=5, keep_every=4, log_every=2), str(tmp_path)) == 0
    assert 'the run is complete at step 12: to continue, raise num_steps' in caplog.text


@pytest.fixture
def labelled(tmp_path):
    """A directory of images with one, two or three labels."""
    names = ['ant', 'bee', 'cat']

    def labels_of(i):
        return ';'.join(n for k, n in enumerate(names) if i + 1 >> k & 1 or k == i % 3)

    for split, count in (('train', 24), ('test', 10)):
        write_images(tmp_path / 'data', [split], count)
        (tmp_path / 'data' / split / 'labels.csv').write_text(
            ''.join(f'{i:03}.png,{labels_of(i)}\n' for i in range(count))
        )
    return tmp_path / 'data'


@pytest.mark.slow
def test_images_with_several_labels(labelled, tmp_path):
    """A run that ends early and resumes is bit-identical."""
    fields = dict(
        loss__name='sigmoid', batch_size=8, optimizer__warmup_steps=1, model__dropout_rate=0.2
    )
    found = {}
    for name, lengths in (('whole', [6]), ('extended', [4, 6])):
        for length in lengths:
            assert (
                loop.train(
                    directory_config(labelled, num_steps=length, **fields), str(tmp_path / name)
                )
                == 0
            )
        found[name] = rows(tmp_path / name, 'eval/mean_average_precision')[-1]
        del found[name]['eval/seconds']
    assert 0 < found['whole']['eval/mean_average_precision'] <= 1
    assert found['whole']['eval/num_examples'] == 10
    assert found['whole'] == found['extended']
    recorded = json.loads((tmp_path / 'whole' / 'config.json').read_text())
    assert recorded['dataset']['multi_label'] is True


@pytest.mark.slow
@pytest.mark.nightly  # .ci/run has it in tests/objectives/teacher_test.py
def test_resumed_run_with_mixup_is_bit_identical(tmp_path):
    """The batch is split in parts. Without MixUp the losses are different."""
    losses = {}
    for name, alpha, lengths in (('whole', 0.5, [4]), ('extended', 0.5, [2, 4]), ('off', 0.0, [4])):
        for length in lengths:
            made = config(
                num_steps=length,
                accum_steps=2,
                augment__mixup=alpha,
                model__dropout_rate=0.2,
                optimizer__warmup_steps=1,
            )
            assert loop.train(made, str(tmp_path / name)) == 0
        losses[name] = [row['train/loss'] for row in rows(tmp_path / name, 'train/loss')]
    assert losses['whole'] == losses['extended'] != losses['off']


def test_several_labels_need_the_loss_sigmoid_in_both_splits(labelled, tmp_path):
    with refused('value', field='loss.name', value='softmax'):
        loop.train(directory_config(labelled), str(tmp_path / 'run'))
    shutil.rmtree(labelled / 'test')
    write_images(labelled / 'test', ['ant', 'bee', 'cat'], 2)
    with refused('content', field='dataset.eval_split', value='test'):
        loop.train(directory_config(labelled, loss__name='sigmoid'), str(tmp_path / 'run'))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_seed_decides_the_losses(finished, tmp_path):
    losses = [[row['train/loss'] for row in rows(finished, 'train/loss')]]
    for name, seed in [('b', 0), ('c', 1)]:
        loop.train(config(seed=seed), str(tmp_path / name))
        losses.append([row['train/loss'] for row in rows(tmp_path / name, 'train/loss')])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_divergence_stops_the_run_and_names_the_last_good_checkpoint(tmp_path):
    broken = config(
        optimizer__name='sgd',
        optimizer__learning_rate=1e25,
        optimizer__clip_norm=0.0,
        checkpoint_every=1,
        log_every=100,
        optimizer__warmup_steps=3,
    )
    with refused('diverged') as error:
        loop.train(broken, str(tmp_path))
    step, last = re.search(
        r'at step (\d+). The last good checkpoint, of step (\d+), is in', str(error.value)
    ).groups()
    assert int(last) == int(step) - 1 >= 1
    assert 'lower optimizer.learning_rate' in str(error.value)
    assert max(int(p.name) for p in (tmp_path / 'checkpoints').iterdir()) == int(last)


@pytest.mark.slow
def test_an_error_in_an_evaluation_saves_the_steps_before_it(tmp_path, monkeypatch):
    saves_late = config(checkpoint_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(evaluator, 'total', lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.train(saves_late, str(tmp_path))
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['12']
    assert loop.train(saves_late, str(tmp_path)) == 0
    assert [row['step'] for row in rows(tmp_path, 'eval/loss')] == [12]


@pytest.mark.slow
def test_a_model_whose_evaluation_is_not_finite_is_neither_scored_nor_saved(tmp_path):
    """A finite update can be so large that the loss of the evaluation is not finite."""
    broken = config(
        optimizer__name='sgd',
        optimizer__learning_rate=1e12,
        optimizer__clip_norm=0.0,
        optimizer__warmup_steps=0,
        num_steps=1,
        evals__fewshot__shots=(1,),
    )
    with refused('diverged') as error:
        loop.train(broken, str(tmp_path))
    assert not math.isfinite(error.value.value['eval/loss'])
    assert not rows(tmp_path, 'eval/loss')
    assert not any((tmp_path / 'checkpoints').iterdir())


@pytest.mark.slow
def test_divergence_before_the_first_checkpoint(tmp_path):
    broken = config(
        optimizer__name='sgd',
        optimizer__learning_rate=1e25,
        optimizer__clip_norm=0.0,
        checkpoint_every=100,
        log_every=100,
        optimizer__warmup_steps=0,
    )
    with pytest.raises(DivergedError, match='No checkpoint'):
        loop.train(broken, str(tmp_path))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize('num_steps', [12, 6])
def test_signal_during_evaluation_saves_and_evaluates_on_return(num_steps, tmp_path, monkeypatch):
    config = functools.partial(make_config, num_steps=num_steps, model__dropout_rate=0.2)
    loop.train(config(eval_every=6), str(tmp_path / 'undisturbed'))
    total = evaluator.total

    def interrupted_total(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return total(*args)

    monkeypatch.setattr(evaluator, 'total', interrupted_total)
    assert loop.train(config(eval_every=6), str(tmp_path / 'run')) == 143
    assert (tmp_path / 'run' / 'checkpoints' / '6').is_dir()
    assert rows(tmp_path / 'run', 'eval/loss') == []
    monkeypatch.setattr(evaluator, 'total', total)
    assert loop.train(config(eval_every=6), str(tmp_path / 'run')) == 0
    both = [
        [{k: v for k, v in row.items() if k not in TIMED} for row in metrics.read(tmp_path / name)]
        for name in ('undisturbed', 'run')
    ]
    assert both[0] == both[1]


@pytest.mark.slow
def test_signal_as_the_run_ends(tmp_path, monkeypatch, caplog):
    """The run is complete, and its exit code stops the caller, for example a sweep."""
    draw = curves.draw  # the last action of an evaluation

    def interrupted_draw(*args):
        draw(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(curves, 'draw', interrupted_draw)
    assert loop.train(config(num_steps=6), str(tmp_path)) == 143
    assert [row['step'] for row in rows(tmp_path, 'eval/loss')] == [6]
    assert (tmp_path / 'checkpoints' / '6').is_dir()
    assert caplog.messages[-1] == (
        f'the run is complete; python -m vit_jax.report {tmp_path} writes its page'
    )
    assert loop.train(config(num_steps=6), str(tmp_path)) == 0


@pytest.mark.slow  # compiles a large step eight times
@pytest.mark.nightly
def test_automatic_accumulation_is_recorded(tmp_path, monkeypatch):
    whole = config(accum_steps=0, num_steps=5)
    assert loop.train(whole, str(tmp_path / 'whole')) == 0
    assert json.loads((tmp_path / 'whole' / 'config.json').read_text())['accum_steps'] == 1
    # A limit between the memory of two steps: with one image per device, and with all of them.
    needed = []
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: 1e12)
    original = accumulation.bytes_needed
    monkeypatch.setattr(
        accumulation, 'bytes_needed', lambda c: needed.append(original(c)) or needed[-1]
    )
    big = config(accum_steps=0, num_steps=5, batch_size=512)
    loop.train(big, str(tmp_path / 'fits'))
    monkeypatch.setattr(run_memory, 'bytes_besides', lambda program: 0)
    limit = (max(needed) - 1) / accumulation.HEADROOM
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: limit)
    loop.train(big, str(tmp_path / 'cut'))
    assert json.loads((tmp_path / 'cut' / 'config.json').read_text())['accum_steps'] > 1


@pytest.mark.slow
def test_the_best_checkpoint_is_saved_at_its_evaluation(finished):
    accuracy = {row['step']: row['eval/accuracy'] for row in rows(finished, 'eval/accuracy')}
    best = max(accuracy, key=lambda step: (accuracy[step], step))
    assert {int(p.name) for p in (finished / 'checkpoints').iterdir()} == {best, 12}


@pytest.mark.slow
@pytest.mark.nightly
def test_run_without_improvement_ends_early_and_resumes_with_more_patience(tmp_path, caplog):
    """The resumed run is bit-identical. All metrics that best_metric can name are logged."""
    still = dict(
        optimizer__learning_rate=1e-30,
        eval_every=1,
        checkpoint_every=100,
        best_metric='fewshot/1shot',
        keep_best=True,
        num_steps=40,
        dataset__train_split='train[:100]',
        dataset__eval_split='test[:50]',
    )
    made = config(**still, evals__fewshot__shots=(1,))
    names = run_lib.metric_names(run_lib.resolve(made, str(tmp_path / 'names'))[0])
    for name, patience in [('whole', 2), ('parts', 1), ('parts', 2)]:
        made.patience = patience
        assert loop.train(made, str(tmp_path / name)) == 0
        last = 1 + patience
        assert f'stopped early after step {last} of 40: fewshot/1shot has not' in caplog.text
        assert (tmp_path / name / 'checkpoints' / str(last)).is_dir()
    assert loop.train(made, str(tmp_path / 'whole')) == 0
    assert 'the run is complete at step 3: to continue, raise patience' in caplog.text
    whole, parts = (
        [{k: v for k, v in row.items() if k not in TIMED} for row in metrics.read(tmp_path / name)]
        for name in ('whole', 'parts')
    )
    assert whole == parts
    assert [row['step'] for row in whole if 'eval/loss' in row] == [1, 2, 3]
    evaluation = {name for row in whole for name in row if name.startswith(('eval/', 'fewshot/'))}
    assert evaluation - {'eval/num_examples', 'fewshot/1shot_deviation'} == set(names)


@pytest.mark.slow
def test_fewer_steps_than_the_run_has_done_are_refused(finished):
    with refused('conflict', field='num_steps', file=finished, value=8):
        loop.train(
            config(
                num_steps=8, eval_every=4, checkpoint_every=5, keep_best=True, keep_checkpoints=1
            ),
            str(finished),
        )


@pytest.mark.slow
def test_the_parameter_average_is_evaluated(tmp_path, caplog):
    loop.train(config(ema_decay=1.0), str(tmp_path))  # the average never leaves the start
    assert (
        'ema_decay 1 is high for 12 steps: at the end the initial weights have a share of 100 % in '
        'the average, and evaluations score the average. Try 0.1667, or 0'
    ) in caplog.text
    (row,) = rows(tmp_path, 'eval/loss')
    assert row['eval/loss'] == pytest.approx(2.302585, abs=1e-5)  # a head of zeros: ln 10


@pytest.mark.slow
def test_a_run_does_not_resume_on_other_images(tmp_path, caplog):
    for split, count in (('train', 20), ('test', 4)):
        write_images(tmp_path / 'data' / split, ['ant', 'bee'], count)
    fields = {'batch_size': 8, 'num_steps': 2, 'optimizer__warmup_steps': 1}
    assert loop.train(directory_config(tmp_path / 'data', **fields), str(tmp_path / 'run')) == 0
    (tmp_path / 'data/test/ant/000.png').rename(tmp_path / 'data/test/ant/new.png')
    moved = (tmp_path / 'data/train/ant/003.png').rename(tmp_path / 'data/train/bee/moved.png')
    fields['num_steps'] = 4
    with refused('conflict', file=tmp_path / 'run') as error:
        loop.train(directory_config(tmp_path / 'data', **fields), str(tmp_path / 'run'))
    assert 'bee/moved.png' in str(error.value)
    assert f'--config.pretrained={tmp_path}/run' in str(error.value)
    moved.rename(tmp_path / 'data/train/ant/003.png')
    caplog.clear()
    assert loop.train(directory_config(tmp_path / 'data', **fields), str(tmp_path / 'run')) == 0
    assert '1 new: ant/new.png' in caplog.text  # evaluation images: a warning
    caplog.clear()
    (tmp_path / 'run/data.json').unlink()  # earlier versions did not write it
    fields['num_steps'] = 6
    assert loop.train(directory_config(tmp_path / 'data', **fields), str(tmp_path / 'run')) == 0
    assert (tmp_path / 'run/data.json').exists()


@pytest.mark.slow
def test_one_truncated_jpeg_is_skipped_counted_and_named(tmp_path, caplog):
    write_images(tmp_path / 'data' / 'train', ['ant', 'bee'], 60)
    write_images(tmp_path / 'data' / 'test', ['ant', 'bee'], 4)
    path = tmp_path / 'data' / 'train' / 'bee' / '059.jpg'
    Image.open(path.with_name('058.png')).resize((64, 64)).save(path)
    path.write_bytes(path.read_bytes()[:-300])
    assert (
        loop.train(
            directory_config(tmp_path / 'data', batch_size=32, num_steps=8), str(tmp_path / 'run')
        )
        == 0
    )
    assert re.search(r'Skipped broken image .*bee/059.jpg: .* \(1 of 121\)', caplog.text)


@pytest.mark.slow
def test_all_images_broken(tmp_path):
    for split in ('train', 'test'):
        write_images(tmp_path / 'data' / split, ['ant', 'bee'], 5)
        for path in (tmp_path / 'data' / split).rglob('*.png'):
            path.write_bytes(path.read_bytes()[:40])
    with refused('unreadable', field='dataset.max_broken_fraction', value=10) as error:
        loop.train(directory_config(tmp_path / 'data'), str(tmp_path / 'run'))
    assert 'ant/000.png' in str(error.value)


def test_batch_not_divisible_by_the_devices(tmp_path):
    assert jax.device_count() == 8
    with refused('value', field='batch_size', value=30):
        loop.train(config(batch_size=30), str(tmp_path))


def test_workdir_of_another_config(tmp_path):
    begin(tmp_path, config())
    with refused('conflict', file=tmp_path) as error:
        loop.train(config(model__hidden_size=32), str(tmp_path))
    assert 'model.hidden_size: 16 in the workdir, 32 now' in error.value.value


def test_class_folder_missing_in_the_eval_split(tmp_path):
    write_images(tmp_path / 'data' / 'train', ['ant', 'bee'], 5)
    write_images(tmp_path / 'data' / 'test', ['ant'], 5)
    with refused('missing', file=tmp_path / 'data' / 'test', value=['bee']):
        loop.train(directory_config(tmp_path / 'data'), str(tmp_path / 'run'))


def test_directory_without_images(tmp_path):
    for split in ('train', 'test'):
        (tmp_path / 'data' / split / 'ant').mkdir(parents=True)
    with refused('missing', file=tmp_path / 'data' / 'train'):
        loop.train(directory_config(tmp_path / 'data'), str(tmp_path / 'run'))
