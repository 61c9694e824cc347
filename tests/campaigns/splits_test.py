import pytest

from tests.support.datasets import write_images
from tests.support.sweeps import LR, command, config_of, fields_of_a_sweep, pretend, valid_json
from vit_jax.campaigns import sweep
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError


@pytest.fixture
def fields(image_directory):
    return fields_of_a_sweep(image_directory)


@pytest.fixture
def config(fields):
    return config_of(fields)


def test_splits_that_cannot_be_used(config, tmp_path):
    config.dataset.test_split = ''
    with pytest.raises(UserError, match='dataset.test_split is empty: name the split that scores'):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.test_split = 'train'
    with pytest.raises(UserError, match=r"'train' has images of .*eval_split 'train\[80%:\]'"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.test_split = 'tset'
    with pytest.raises(
        UserError,
        match="dataset.test_split is 'tset': no split folder 'tset' .* "
        'are: test, train. Name one of them, or a slice',
    ):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.update(test_split='train[85%:]', eval_split='train[80%:85%]')
    with pytest.raises(
        UserError,
        match=r"test_split 'train\[85%:\]' has images of "
        "dataset.final_split 'train', which the winner trains on",
    ):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.update(train_split='train[:90%]', final_split='train[:84%]')
    with pytest.raises(UserError, match=r"test_split .* of dataset.train_split 'train\[:90%\]'"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.test_split = 'test'
    with pytest.raises(UserError, match=r"eval_split 'train\[80%:85%\]' .* all members train on"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.final_split = 'tran'
    with pytest.raises(UserError, match="dataset.final_split is 'tran': no split folder 'tran'"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
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
def test_the_advice_for_splits_trains_on_no_part_of_the_test_split(
    splits, advice, config, tmp_path, monkeypatch
):
    """And a sweep can follow it."""
    config.dataset.update(splits)
    config.dataset.num_examples = 0
    with pytest.raises(UserError) as error:
        sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path))
    assert str(error.value).endswith(
        'hold out a part, as in '
        + ' '.join(f'--config.dataset.{name}_split=train{part}' for name, part in advice.items())
    )
    pretend(monkeypatch, lambda config: 0.5)
    config.dataset.update({f'{name}_split': f'train{part}' for name, part in advice.items()})
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0


def test_a_sum_does_not_tell_what_the_best_one_trains_on(config, tmp_path):
    config.dataset.update(train_split='train[:20]+test[:4]', final_split='')
    with pytest.raises(UserError, match=r'is the sum train\[:20\]\+test\[:4\]: name what the best'):
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
    with pytest.raises(
        UserError,
        match=r"test_split 'test\[4:\]' has images of dataset.final_split"
        r" 'train\[:20\]\+test\[:5\]', which the winner trains on",
    ):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))


@pytest.mark.parametrize('test_split', ['', 'test'])  # recipes have the second
@pytest.mark.parametrize('part', ['', 'train/'])
def test_a_directory_with_no_split_but_one_is_cut_into_three(
    part, test_split, config, tmp_path, monkeypatch, caplog
):
    write_images(tmp_path / 'data' / part, ['ant', 'bee'], 20)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.dataset.update(eval_split='', test_split=test_split)
    runs = pretend(monkeypatch, lambda config: 0.5)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep')) == 0
    splits = [(run['dataset.train_split'], run['dataset.eval_split']) for run in runs.values()]
    assert splits == [('train[:80%]', 'train[80%:90%]')] * 2 + [('train[:90%]', 'train[90%:]')]
    assert 'which is cut into three parts: members train on train[:80%]' in caplog.text


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
def test_what_gives_a_sweep_a_test_split(folders, splits, advice, config, tmp_path, monkeypatch):
    """And a sweep can follow it."""
    for number, folder in enumerate(folders):
        write_images(tmp_path / 'data' / folder, ['ant', 'bee'], 20, seed=number)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.dataset.update(splits, test_split='')
    options = [f'--config.dataset.{name}_split={split}' for name, split in advice.items()]
    for missing, message in (
        ('', 'test_split is empty'),
        ('tset', "test_split is 'tset': no split"),
    ):
        config.dataset.test_split = missing
        with pytest.raises(UserError, match=f'dataset.{message}') as error:
            sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path / 's'))
        assert str(error.value).endswith(' '.join(options))
    pretend(monkeypatch, lambda config: 0.5)
    config.dataset.update({f'{name}_split': split for name, split in advice.items()})
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep')) == 0


def test_a_sweep_of_a_subset_stays_inside_of_it(config, tmp_path, monkeypatch):
    """As those of VTAB: 800 of 1,000 images train, 200 choose, then the 1,000 train."""
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
