from tests.support.errors import refused
from tests.support.runs import load
from tests.support.sweeps import LR, QUICKSTART
from vit_jax.campaigns import grids


def test_swept_fields_are_separated_from_other_arguments():
    rest = [
        QUICKSTART,
        '--workdir=a,b',
        '--config.image_size=32,48',
        '--config.seed=1',
        '--config.dataset.name=x,y',
        '--config.optimizer.lr_factors=^head/=1,.=0',
        '--config.hidden=1,2',
        '--config.batch_size',
        '8',
    ]
    texts, others = grids.separate(
        [
            *rest[:3],
            f'--config.{LR}=0.03,1e-3',
            *rest[3:6],
            '--config.augment.flip',
            'true,false',
            *rest[6:],
        ]
    )
    assert texts == {LR: '0.03,1e-3', 'augment.flip': 'true,false'}
    assert others == rest


def test_values_are_parsed_to_the_types_of_their_fields():
    config = load('quickstart').get_config()
    config.batch_size = 32
    grid = grids.read(
        {
            LR: '0.03,1e-3,1e-3',
            'augment.flip': 'true,false',
            'batch_size': '16,8',
            'optimizer.name': 'sgd,adam',
        },
        config,
    )
    assert grid == {
        LR: [1e-3, 0.03],
        'augment.flip': [False, True],
        'batch_size': [8, 16],
        'optimizer.name': ['sgd', 'adam'],
    }
    assert config.batch_size == 32


def test_field_given_twice_is_refused():
    for second in ([f'--config.{LR}', '3,4'], [f'--config.{LR}=3'], [f'--config.{LR}', '3']):
        with refused('value', field=LR) as error:
            grids.separate([f'--config.{LR}=1,2', *second])
        assert str(error.value) == (
            f'--config.{LR} is given twice: give it once, with all its values.'
        )
