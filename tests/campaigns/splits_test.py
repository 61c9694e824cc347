import pytest

from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.sweeps import LR, command, config_of, fields_of_a_sweep, pretend, valid_json
from vit_jax.campaigns import sweep
from vit_jax.data.folders import choose_splits
from vit_jax.data.sources import open_source


@pytest.fixture
def fields(image_directory):
    return fields_of_a_sweep(image_directory)


@pytest.fixture
def config(fields):
    return config_of(fields)


def test_impossible_splits_are_refused(config, tmp_path):
    def refuse(field, kind='value'):
        with refused(kind, field=f'dataset.{field}') as error:
            sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
        return str(error.value)

    config.dataset.test_split = ''
    refuse('test_split', kind='missing')
    config.dataset.test_split = 'train'
    assert refuse('test_split').startswith(
        "dataset.test_split 'train' shares images with dataset.eval_split 'train[80%:]', which "
        'chooses the winner: hold out a part, as in --config.dataset.train_split='
    )
    config.dataset.test_split = 'tset'
    assert "dataset.test_split is 'tset': " in refuse('test_split')
    config.dataset.update(test_split='train[85%:]', eval_split='train[80%:85%]')
    assert "dataset.final_split 'train', which trains the winner" in refuse('test_split')
    config.dataset.update(train_split='train[:90%]', final_split='train[:84%]')
    assert "dataset.train_split 'train[:90%]', which trains all members" in refuse('test_split')
    config.dataset.test_split = 'test'
    assert "dataset.train_split 'train[:90%]', which trains all members" in refuse('eval_split')
    config.dataset.final_split = 'tran'
    refuse('final_split')
    assert not list(tmp_path.iterdir())  # before anything is trained
    result = command(tmp_path, f'--config.{LR}=0.1,0.2', '--config.dataset.test_split=tset')
    assert result.returncode == 1
    assert (
        "error: dataset.test_split is 'tset': 'digits' has no split 'tset'; it has 'train' and "
        "'test'\n"
    ) in result.stderr
    assert 'Traceback' not in result.stderr


@pytest.mark.parametrize(
    ('splits', 'advice'),
    [
        ({'eval_split': 'test'}, {'train': '[:90%]', 'eval': '[90%:]', 'final': ''}),
        ({'final_split': 'test'}, {'train': '[:90%]', 'eval': '[90%:]', 'final': ''}),
        ({'eval_split': 'train'}, {'train': '[:90%]', 'eval': '[90%:]', 'final': ''}),
        (
            {'test_split': 'train'},
            {'train': '[:80%]', 'eval': '[80%:90%]', 'final': '[:90%]', 'test': '[90%:]'},
        ),
    ],
)
def test_advice_does_not_train_on_the_test_split(splits, advice, config, tmp_path, monkeypatch):
    """A sweep can follow the advice."""
    config.dataset.update(splits)
    config.dataset.num_examples = 0
    with refused('value') as error:
        sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path))
    assert str(error.value).endswith(
        'hold out a part, as in '
        + ' '.join(f'--config.dataset.{name}_split=train{part}' for name, part in advice.items())
    )
    pretend(monkeypatch, lambda config: 0.5)
    config.dataset.update({f'{name}_split': f'train{part}' for name, part in advice.items()})
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0


def test_sum_of_splits_needs_a_final_split(config, tmp_path):
    config.dataset.update(train_split='train[:20]+test[:4]', final_split='')
    with refused('missing', field='dataset.final_split'):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))


def test_sums_of_splits_are_compared_by_part(config, tfds_directory, tmp_path, monkeypatch):
    pretend(monkeypatch, lambda config: 0.5)
    config.batch_size = 8
    config.dataset.update(
        name='dots',
        data_dir=str(tfds_directory['tfrecord']),
        num_examples=0,
        train_split='train[:20]',
        eval_split='test[:4]',
        test_split='test[4:]',
        final_split='train[:20]+test[:4]',
        label='label/2',
    )
    assert sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    config.dataset.final_split = 'train[:20]+test[:5]'
    with refused('value', field='dataset.test_split', value='test[4:]') as error:
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    assert "shares images with dataset.final_split 'train[:20]+test[:5]'" in str(error.value)


@pytest.mark.parametrize('test_split', ['', 'test'])  # recipes have the second
@pytest.mark.parametrize('part', ['', 'train/'])
def test_directory_with_one_split_is_cut_into_three(
    part, test_split, config, tmp_path, monkeypatch, caplog
):
    write_images(tmp_path / 'data' / part, ['ant', 'bee'], 20)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.dataset.update(eval_split='', test_split=test_split)
    runs = pretend(monkeypatch, lambda config: 0.5)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep')) == 0
    splits = [(run['dataset.train_split'], run['dataset.eval_split']) for run in runs.values()]
    assert splits == [('train[:80%]', 'train[80%:90%]')] * 2 + [('train[:90%]', 'train[90%:]')]
    assert 'so the sweep cuts it into three parts: members train on train[:80%]' in caplog.text


@pytest.mark.parametrize(
    ('folders', 'splits', 'advice'),
    [
        (
            ['train', 'test'],
            {'train_split': 'train[:90%]', 'eval_split': 'train[90%:]'},
            {'test': 'test'},
        ),
        (['train', 'val', 'test'], {'eval_split': ''}, {'test': 'test'}),
        (
            ['train', 'val'],
            {'eval_split': ''},
            {'train': 'train[:90%]', 'final': 'train[:90%]', 'test': 'train[90%:]'},
        ),
        (
            ['train'],
            {'train_split': 'train[:90%]', 'eval_split': 'train[90%:]'},
            {
                'train': 'train[:80%]',
                'eval': 'train[80%:90%]',
                'final': 'train[:90%]',
                'test': 'train[90%:]',
            },
        ),
    ],
)
def test_advice_for_a_missing_test_split(folders, splits, advice, config, tmp_path, monkeypatch):
    """A sweep can follow the advice."""
    for number, folder in enumerate(folders):
        write_images(tmp_path / 'data' / folder, ['ant', 'bee'], 20, seed=number)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.dataset.update(splits, test_split='')
    options = [f'--config.dataset.{name}_split={split}' for name, split in advice.items()]
    for test_split, kind in (('', 'missing'), ('tset', 'value')):
        config.dataset.test_split = test_split
        with refused(kind, field='dataset.test_split') as error:
            sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path / 's'))
        assert str(error.value).endswith(' '.join(options))
    pretend(monkeypatch, lambda config: 0.5)
    config.dataset.update({f'{name}_split': split for name, split in advice.items()})
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep')) == 0


def test_sweep_of_a_subset_uses_no_other_images(config, tmp_path, monkeypatch):
    """VTAB trains on 800 of 1,000 images, chooses by 200, and then trains on all 1,000."""
    runs = pretend(monkeypatch, lambda config: 0.5)
    config.batch_size = 8
    config.dataset.update(
        train_split='train[:24]',
        eval_split='train[24:30]',
        num_examples=0,
        final_split='train[:30]',
    )
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0

    def images(split):
        source = open_source(config.dataset.name, split)
        return {source.name_of(index) for index in range(source.num_examples)}

    seen = {name: images(run['dataset.train_split']) for name, run in runs.items()}
    assert seen['lr=0.1'] | images(runs['lr=0.1']['dataset.eval_split']) == images('train[:30]')
    assert seen['final-lr=0.1'] == images('train[:30]')
    assert seen['lr=0.1'] < seen['final-lr=0.1'] < images('train')
    assert len(seen['final-lr=0.1']) == 30
    assert {run['dataset.final_split'] for run in runs.values()} == {''}  # as in older workdirs
    assert valid_json((tmp_path / 'sweep.json').read_text())['final_split'] == 'train[:30]'


def test_folds_cover_the_final_split(config, tmp_path, monkeypatch):
    """Each member trains on everything that the winner trains on, but one fold."""
    runs = pretend(monkeypatch, lambda config: 0.5)
    config.batch_size = 8
    config.dataset.update(final_split='train[:30]', test_split='train[30:]')
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), num_folds=3) == 0

    def images(split):
        source = open_source(config.dataset.name, split)
        return {source.name_of(index) for index in range(source.num_examples)}

    members = {name: run for name, run in runs.items() if not name.startswith('final')}
    assert list(members) == [f'lr={rate}_fold={k}of3' for rate in (0.1, 0.2) for k in (1, 2, 3)]
    final = runs['final-lr=0.1']
    assert final['dataset.train_split'] == 'train[:30]'
    for run in members.values():
        trained, scored = images(run['dataset.train_split']), images(run['dataset.eval_split'])
        assert not trained & scored
        assert trained | scored == images('train[:30]')
        assert run['dataset.num_examples'] == 0
    held_out = [run['dataset.eval_split'] for run in members.values()]
    assert held_out[:3] == held_out[3:]  # the members are compared on the same folds
    assert sum(len(images(split)) for split in held_out[:3]) == 30


def test_test_images_are_in_no_fold(config, tmp_path):
    config.dataset.update(test_split='train[50:]', final_split='')
    with refused('value', field='dataset.test_split', value='train[50:]'):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), num_folds=3)


@pytest.mark.parametrize('part', ['', 'train/'])
def test_directory_with_one_split_is_cut_into_folds_and_a_test_split(
    part, config, tmp_path, monkeypatch, caplog
):
    write_images(tmp_path / 'data' / part, ['ant', 'bee'], 20)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.batch_size = 8
    config.dataset.update(eval_split='', test_split='test')
    runs = pretend(monkeypatch, lambda config: 0.5)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep'), num_folds=2) == 0
    assert [(run['dataset.train_split'], run['dataset.eval_split']) for run in runs.values()] == [
        ('train[:90%]@fold!=1/2', 'train[:90%]@fold=1/2'),
        ('train[:90%]@fold!=2/2', 'train[:90%]@fold=2/2'),
    ] * 2 + [('train[:90%]', 'train[90%:]')]
    assert 'so the sweep cuts it into two parts: members are cross-validated on' in caplog.text


def test_folds_of_a_directory_with_a_validation_folder(config, tmp_path, monkeypatch):
    """The folder does not replace the fold that scores a member."""
    for number, folder in enumerate(['train', 'val', 'test']):
        write_images(tmp_path / 'data' / folder, ['ant', 'bee'], 10, seed=number)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.batch_size = 8
    config.dataset.update(eval_split='', test_split='test')
    runs = pretend(monkeypatch, lambda config: 0.5)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep'), num_folds=2) == 0
    for run in runs.values():
        splits = (run['dataset.train_split'], run['dataset.eval_split'])
        assert choose_splits(run['dataset.name'], *splits) == splits


def test_a_class_with_one_image_is_refused_before_anything_trains(config, tmp_path, monkeypatch):
    """It is missing in the training without the fold of this image."""
    write_images(tmp_path / 'data' / 'train', ['ant', 'bee'], 10)
    write_images(tmp_path / 'data' / 'train', ['yak'], 1)
    write_images(tmp_path / 'data' / 'test', ['ant', 'bee', 'yak'], 1)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.batch_size = 8
    runs = pretend(monkeypatch, lambda config: 0.5)
    with refused('content', field='dataset.train_split'):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep'), num_folds=3)
    assert not runs
