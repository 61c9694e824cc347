import json
import re

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from tests.support.errors import refused
from tests.support.runs import ROOT, load, resolved
from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.data import resizing
from vit_jax.errors import UserError
from vit_jax.models import cost, variants
from vit_jax.training import resolve

vit = load('vit')


def checked(config):
    """Returns the checked config, after building its model for its images."""
    config = config_lib.checked(config)
    cost.of_model(models.build(config.model, config.dataset.num_classes or 10), config.image_size)
    return config


@pytest.mark.parametrize(
    'name', sorted(p.stem for p in (ROOT / 'configs').glob('*.py') if p.stem != 'vit')
)
def test_every_config_loads(name):
    checked(load(name).get_config())


@pytest.mark.parametrize(
    ('model', 'dataset'),
    [
        *((model, 'imagenet21k') for model in variants.names()),
        *(('b16', dataset) for dataset in vit.DATASETS if dataset != 'imagenet21k'),
    ],
)
def test_every_pretraining_config_loads(model, dataset):
    config = config_lib.checked(vit.get_config(f'{model},{dataset}'))
    models.build(config.model, config.dataset.num_classes)  # variants_test.py traces it
    assert config.image_size == (224, 224)
    o = config.optimizer
    found = (config.batch_size, o.name, o.b1, o.b2, o.warmup_steps)
    assert found == (4096, 'adam', 0.9, 0.999, 10_000)
    if 'hidden_size' in config.model:
        assert config.model.representation_size == config.model.hidden_size


@pytest.mark.parametrize(
    ('arg', 'epochs', 'lr', 'schedule', 'decay', 'dropout', 'clip'),
    [
        ('b16', 300, 3e-3, 'cosine', 0.3, 0.1, 1.0),  # table 3, row by row
        ('l16,imagenet2012', 300, 3e-3, 'cosine', 0.3, 0.1, 1.0),
        ('b32,imagenet21k', 90, 1e-3, 'linear', 0.03, 0.1, 0.0),
        ('l16,imagenet21k', 90, 1e-3, 'linear', 0.03, 0.1, 0.0),
        ('b16,jft', 7, 8e-4, 'linear', 0.1, 0.0, 0.0),
        ('b32,jft', 7, 8e-4, 'linear', 0.1, 0.0, 0.0),
        ('l32,jft', 7, 6e-4, 'linear', 0.1, 0.0, 0.0),
        ('l16,jft', 14, 4e-4, 'linear', 0.1, 0.0, 0.0),
        ('h14,jft', 14, 3e-4, 'linear', 0.1, 0.0, 0.0),
        ('r50_b16,jft', 7, 8e-4, 'linear', 0.1, 0.0, 0.0),
        ('r50_b32,jft', 7, 8e-4, 'linear', 0.1, 0.0, 0.0),
        ('r50_l16,jft', 14, 4e-4, 'linear', 0.1, 0.0, 0.0),
        ('r50_l32,jft', 7, 2e-4, 'linear', 0.1, 0.0, 0.0),
        ('r50x1,jft', 7, 1e-3, 'linear', 0.1, None, 0.0),
        ('r50x2,jft', 7, 1e-3, 'linear', 0.1, None, 0.0),
        ('r101x1,jft', 7, 8e-4, 'linear', 0.1, None, 0.0),
        ('r152x1,jft', 7, 6e-4, 'linear', 0.1, None, 0.0),
        ('r152x2,jft', 7, 6e-4, 'linear', 0.1, None, 0.0),
    ],
)
def test_table_3(arg, epochs, lr, schedule, decay, dropout, clip):
    config = vit.get_config(arg)
    o = config.optimizer
    assert (config.num_epochs, o.learning_rate, o.schedule, o.weight_decay, o.clip_norm) == (
        epochs,
        lr,
        schedule,
        decay,
        clip,
    )
    assert config.model.get('dropout_rate') == dropout
    assert 'nearest' not in config.recipe


def test_recipe_names_a_missing_row():
    """Table 3: one row for all ViTs on ImageNet, B and L on ImageNet-21k, 14 models on JFT."""
    with_row = {
        (m, d)
        for d in vit.DATASETS
        for m in variants.names()
        if 'nearest' not in vit.get_config(f'{m},{d}').recipe
    }
    vits = ('b16', 'b32', 'l16', 'l32')
    assert with_row == {
        *((m, 'imagenet2012') for m in (*vits, 'h14')),
        *((m, 'imagenet21k') for m in vits),
        *(
            (m, 'jft')
            for m in (
                *vits,
                'h14',
                'r50x1',
                'r50x2',
                'r101x1',
                'r152x1',
                'r152x2',
                'r50_b16',
                'r50_b32',
                'r50_l16',
                'r50_l32',
            )
        ),
    }


def test_model_without_a_row_has_the_nearest_row():
    assert vit.get_config('s16,jft').optimizer.learning_rate == 8e-4
    assert vit.get_config('G14,jft').optimizer.learning_rate == 3e-4
    r200x3 = vit.get_config('r200x3,jft')
    assert (r200x3.optimizer.learning_rate, r200x3.num_epochs) == (6e-4, 14)  # table 6
    assert vit.get_config('r26_s32,jft').optimizer.learning_rate == 8e-4
    assert vit.get_config('l14,jft').optimizer.learning_rate == 4e-4
    assert vit.get_config('axial_b32,jft').optimizer.learning_rate == 3e-4  # appendix D.3
    assert vit.get_config('axial_r50,jft').optimizer.learning_rate == 1e-3  # the row of R50x1


@pytest.mark.parametrize('dataset', ['imagenet21k', 'jft'])
def test_head_of_data_sets_with_many_classes(dataset):
    config = vit.get_config(f'b16,{dataset}')
    assert (config.loss.name, config.model.head_bias_init) == ('sigmoid', -10)
    assert config.optimizer.end_learning_rate == 1e-5


finetune = load('finetune')


@pytest.mark.parametrize(
    ('arg', 'steps', 'warmup', 'held_out', 'size'),
    [
        ('l16,imagenet2012', 20_000, 500, 1, 384),  # table 4, row by row
        ('b16,cifar10', 10_000, 500, 2, 384),
        ('b32,cifar100', 10_000, 500, 2, 384),
        ('b16,oxford_iiit_pet', 500, 100, 10, 384),
        ('h14,oxford_flowers102', 500, 100, 10, 384),
        ('r152x2,cifar10', 10_000, 500, 2, 384),
        ('l16,imagenet2012,512', 20_000, 500, 1, 512),
        ('h14,imagenet2012,518', 20_000, 500, 1, 518),
    ],
)
def test_table_4(arg, steps, warmup, held_out, size):
    config = checked(finetune.get_config(arg))
    o = config.optimizer
    assert (config.num_steps, o.warmup_steps, config.image_size) == (steps, warmup, (size, size))
    assert config.dataset.train_split == f'train[:{100 - held_out}%]'
    assert config.dataset.eval_split == f'train[{100 - held_out}%:]'
    assert (config.batch_size, o.name, o.momentum, o.schedule, o.weight_decay, o.clip_norm) == (
        512,
        'sgd',
        0.9,
        'cosine',
        0.0,
        1.0,
    )
    assert config.ema_decay == (0 if size == 384 else 0.9999)  # table 2
    assert config.preprocess.to_dict() | dict(mean=0, std=0) == dict(
        fit='squash',
        crop_ratio=1.0,
        resize='bilinear',
        antialias=False,
        uint8_resize=False,
        mean=0,
        std=0,
    )
    fields = config_lib.flatten(config)
    assert all(field in fields for field in config.transfer.take)


def test_vtab_has_a_thousand_examples():
    """800 examples train, 200 choose, and the final run trains on all (arXiv 1910.04867)."""
    config = checked(finetune.get_config('r50_b16,vtab'))
    assert (config.num_steps, config.optimizer.warmup_steps) == (2_500, 0)
    dataset = config.dataset
    assert (dataset.train_split, dataset.eval_split, dataset.final_split) == (
        'train[:800]',
        'train[800:1000]',
        'train[:1000]',
    )


def test_unknown_size_to_finetune_at_is_refused():
    with refused('choice', field='the size of images', value='500'):
        finetune.get_config('b16,cifar10,500')


@pytest.mark.parametrize(
    ('dataset', 'name'), [('cifar10', 'cifar10'), ('directory', ''), ('vtab', '')]
)  # '': the user gives it
def test_name_of_the_data_to_finetune_on(dataset, name):
    assert finetune.get_config(f'ti16,{dataset}').dataset.name == name


def test_unknown_data_set_to_finetune_on_is_refused():
    with refused('choice', field='the data set', value='cifar1000') as error:
        finetune.get_config('b16,cifar1000')
    assert "unknown data set 'cifar1000'. Did you mean cifar100" in str(error.value)


bit = load('bit')


@pytest.mark.parametrize(
    ('arg', 'size', 'steps', 'warmup', 'boundaries', 'mixup', 'held_out'),
    [
        ('r50x1,cifar10', (160, 128), 10_000, 500, (3000, 6000, 9000), 0.1, 2),
        ('b32,cifar100', (160, 128), 10_000, 500, (3000, 6000, 9000), 0.1, 2),
        ('r50x1,oxford_iiit_pet', (512, 480), 500, 100, (200, 300, 400), 0.0, 10),
        ('l16,oxford_flowers102', (512, 480), 500, 100, (200, 300, 400), 0.0, 10),
        ('r152x2,imagenet2012', (512, 480), 20_000, 500, (6000, 12_000, 18_000), 0.1, 1),
        ('h14,directory,19999,95', (160, 128), 500, 100, (200, 300, 400), 0.0, 0),
        ('r50_b16,directory,20000,96', (512, 480), 10_000, 500, (3000, 6000, 9000), 0.1, 0),
        ('s16,directory,499999,1', (160, 128), 10_000, 500, (3000, 6000, 9000), 0.1, 0),
        ('s16,directory,500000,999', (512, 480), 20_000, 500, (6000, 12_000, 18_000), 0.1, 0),
    ],
)
def test_bit_hyperrule(arg, size, steps, warmup, boundaries, mixup, held_out):
    """Each row equals big_transfer's bit_hyperrule.py; splits equal its input pipeline."""
    config = checked(bit.get_config(arg))
    o, augment, dataset = config.optimizer, config.augment, config.dataset
    larger, crop = size
    assert config.image_size == (crop, crop)
    assert resizing.target_size(config.image_size, {'fit': 'squash', **augment}) == (larger,) * 2
    assert (config.num_steps, o.warmup_steps, augment.crop, augment.mixup) == (
        steps,
        warmup,
        'resize',
        mixup,
    )
    assert tuple(round(share * steps) for share in o.staircase_boundaries) == boundaries
    assert (
        config.batch_size,
        o.name,
        o.momentum,
        o.schedule,
        o.learning_rate,
        o.weight_decay,
        o.clip_norm,
    ) == (512, 'sgd', 0.9, 'staircase', 0.003, 0.0, 0.0)
    assert dataset.train_split == (f'train[:{100 - held_out}%]' if held_out else 'train')
    assert dataset.eval_split == (f'train[{100 - held_out}%:]' if held_out else '')
    assert dataset.name == ('' if 'directory' in arg else arg.split(',')[1])


@pytest.mark.parametrize(
    ('arg', 'kind', 'field', 'value'),
    [
        ('r50x1,cifar1000', 'choice', 'the data set', 'cifar1000'),
        ('r50x1', 'choice', 'the data set', ''),
        ('r50x1,cifar10,50000', 'value', 'the argument', '50000'),
        ('r50x1,directory', 'value', 'the argument', ''),
        ('r50x1,directory,many,224', 'value', 'the argument', 'many,224'),
        ('r50x1,directory,3000,0', 'value', 'the argument', '3000,0'),
        ('r50x1,directory,1,2,3', 'value', 'the argument', '1,2,3'),
    ],
)
def test_impossible_arguments_of_bit_are_refused(arg, kind, field, value):
    with refused(kind, field=field, value=value):
        bit.get_config(arg)


def test_message_of_missing_sizes_of_bit():
    with refused('value', value='') as error:
        bit.get_config('r50x1,directory')
    assert str(error.value) == (
        "the sizes after MODEL,directory are '': expected the number of training images and their "
        'side in pixels, as in --config=configs/bit.py:r50x1,directory,3000,224. The rule needs '
        'both.'
    )


def test_unknown_data_set():
    with refused('choice', field='the data set', value='imagenet2021') as error:
        vit.get_config('b16,imagenet2021')
    assert "unknown data set 'imagenet2021'. Did you mean imagenet2012" in str(error.value)


def tiny(**fields):
    config = config_lib.base()
    config.num_steps = 10
    config.update_from_flattened_dict({k.replace('__', '.'): v for k, v in fields.items()})
    return config


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('loss.name', 'sofmax'),
        ('model.dtype', 'float16'),
        ('dataset.cache', 'memory'),
    ],
)
def test_unknown_choices_are_refused(field, value):
    with refused('choice', field=field, value=value):
        config_lib.checked(config_lib.changed(tiny(), {field: value}))


@pytest.mark.parametrize(
    ('values', 'field'),
    [
        ({'num_epochs': 3.0}, 'num_steps'),
        ({'num_steps': 0}, 'num_steps'),
        ({'batch_size': 0}, 'batch_size'),
        ({'log_every': -1}, 'log_every'),
        ({'optimizer.learning_rate': 0.0}, 'optimizer.learning_rate'),
        ({'optimizer.momentum': 2.0}, 'optimizer.momentum'),
        ({'optimizer.b2': 1.0}, 'optimizer.b2'),
        ({'optimizer.end_learning_rate': 1e28}, 'optimizer.end_learning_rate'),
        ({'ema_decay': 1.5}, 'ema_decay'),
        ({'ema_decay': -1.0}, 'ema_decay'),
        ({'ema_decay': float('nan')}, 'ema_decay'),
        ({'dataset.shuffle_buffer': 0}, 'dataset.shuffle_buffer'),
        ({'augment.pad': 300}, 'augment.pad'),
        ({'model.pool': 'none'}, 'model.pool'),
        ({'dataset.cache': 'disk', 'dataset.cache_size': 223}, 'dataset.cache_size'),
        ({'dataset.cache_size': 256}, 'dataset.cache_size'),
        ({'patience': 3, 'eval_every': 0}, 'patience'),
        ({'accum_steps': 3}, 'accum_steps'),
        ({'teacher.weights': 'x.npz', 'loss.name': 'sigmoid'}, 'loss.name'),
        (
            {'teacher.weights': 'x.npz', 'masked.target': 'pixels', 'model.pool': 'gap'},
            'masked.target',
        ),
        ({'teacher.weights': 'x.npz', 'loss.class_weights': (1, 2)}, 'loss.class_weights'),
    ],
)
def test_impossible_values_are_refused(values, field):
    with refused('value', field=field):
        config_lib.checked(config_lib.changed(tiny(), values))


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        (
            {'num_epochs': 3.0},
            'num_steps is 10 and num_epochs is 3.0: set exactly one of them and the other to 0.',
        ),
        ({'accum_steps': 3}, 'accum_steps is 3: expected a divisor of batch_size, 4096.'),
        (
            {'teacher.weights': 'x.npz', 'loss.name': 'sigmoid'},
            "teacher.weights is 'x.npz' and loss.name is sigmoid: distillation compares "
            'probabilities that sum to one. Set loss.name=softmax.',
        ),
    ],
)
def test_messages_of_fields_that_depend_on_each_other(values, message):
    with refused('value') as error:
        config_lib.checked(config_lib.changed(tiny(), values))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ('values', 'field', 'value'),
    [
        ({'image_size': (225,)}, 'image_size', (225, 225)),
        ({'model.num_heads': 7}, 'model.hidden_size', 768),
        ({'teacher.image_size': (1, 2, 3)}, 'teacher.image_size', (1, 2, 3)),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values, field, value):
    with refused('value', field=field, value=value):
        config_lib.checked(config_lib.changed(tiny(), values))


def test_unknown_and_missing_fields_are_refused():
    config = tiny()
    config.preprocess.crop = 0.5
    with refused('unknown', field='preprocess.crop') as error:
        config_lib.checked(config)
    assert str(error.value).startswith(
        "this config has no field 'preprocess.crop'. Did you mean preprocess.crop_ratio"
    )
    config = tiny()
    config.loss = {'name': 'sigmoid'}
    with refused('missing', field='loss.class_weights'):
        config_lib.checked(config)


NAN, INF = float('nan'), float('inf')


@pytest.mark.parametrize(
    ('field', 'values', 'expected'),
    [
        (
            'preprocess.crop_ratio',
            (0.0, 1e-9, 1.5, INF, NAN, -1.0),
            'a number, at least 0.01 and at most 1',
        ),
        ('augment.min_area', (0.0, 2.0, NAN), 'a number, at least 1e-06 and at most 1'),
        ('preprocess.mean', ((0.5,), (0.5, 0.5, '0.5'), (0.5, 0.5, NAN)), 'three numbers'),
        ('preprocess.std', ((0.5, 0.5, 0.0), (True, True, True)), 'three numbers .* from 0.001'),
        ('num_epochs', (NAN, INF, -1.0), 'a number, at least 0'),
        ('num_steps', (-5,), 'a whole number, at least 0'),
        ('seed', (10**21, -(2**63) - 1), 'a whole number of 64 bits'),
        ('batch_size', (2**31,), 'a whole number, at least 1, and at most 2,147,483,647'),
        ('image_size', ((10**9, 10**9),), 'one or two whole numbers, .* at most 65,536'),
        ('optimizer.end_learning_rate', (-1.0, INF), 'a number, at least 0'),
        ('optimizer.weight_decay', (-1.0, NAN), 'a number, at least 0'),
        ('optimizer.clip_norm', (-1.0,), 'a number, at least 1e-12 .*, or 0'),
        ('augment.randaugment.magnitude', (-1.0, 22.5, NAN), 'a number, at least 0 and below 22.5'),
        ('augment.randaugment.num_ops', (-1, 17), 'a whole number, at least 0 and at most 16'),
        ('augment.mixup', (-0.1, NAN, INF), 'a number, at least 1e-06 .*, or 0'),
        ('optimizer.staircase_boundaries', ((0.3, 1.5), (-1.0,)), 'numbers from 0 to 1, with'),
        ('optimizer.staircase_factor', (0.0, 2.0), 'a number, at least 1e-06 and at most 1'),
        ('teacher.temperature', (0.0, -1.0, INF), 'a number, at least 0.001 and at most 1000'),
        ('teacher.share', (-0.1, 1.1, NAN), 'a number, at least 0 and at most 1'),
        ('teacher.checksum', (-1, 2**31), 'a whole number, at least 0'),
        ('loss.label_smoothing', (1.5, NAN), 'a number, at least 0 and at most 0.9999999'),
        (
            'loss.class_weights',
            ((1.0, -1.0), (NAN, 1.0), (INF, 1.0), (0.0, 0.0), ('balance',), ('balanced', 1.0)),
            'balanced, or numbers from 1e-9 to 1e9, or 0',
        ),
        (
            'dataset.subset',
            ('0', '-5', '1e3', 'all', '-1%', '1,2', '%'),
            'empty, a number of images, or a share of them such as 10%',
        ),
        ('dataset.cache_size', (-1,), 'a whole number, at least 0'),
        ('dataset.balance', (-0.1, 1.1, NAN), 'a number, at least 0 and at most 1'),
        ('model.layer_norm_epsilon', (INF, -1.0), 'a number, at least 1e-20 and at most 1, or 0'),
        ('model.head_bias_init', (INF,), 'a number, at least -1000000'),
        ('dataset.max_broken_fraction', (-1.0, NAN), 'a number, at least 0 and at most 1'),
        ('mesh.fsdp', (0, -2), 'a whole number, at least 1, or -1'),
        ('eval_every', (-1,), 'a whole number, at least 0'),
    ],
)
def test_values_out_of_range_are_refused(field, values, expected):
    for value in values:
        with refused('value', field=field) as error:
            config_lib.checked(config_lib.changed(tiny(), {field: value}))
        assert re.search(rf'^{field} is .*: expected {expected}', str(error.value))


def test_docs_equal_the_tables():
    assert (ROOT / 'docs/reference/config.md').read_text() == config_lib.markdown()


@pytest.mark.parametrize('name', ['b16', 'r50_b16', 'r50x1', 'axial_b16', 'axial_r50'])
def test_every_field_is_in_a_table(name):
    rows = set(config_lib.FIELDS).union(*models.tables().values(), ['model.resnet'])
    assert config_lib.flatten(config_lib.base(name)).keys() <= rows


def test_complete_config_has_the_numbers_of_the_data():
    config = resolved(tiny(image_size=(32,), dataset__num_classes=7), 50, 7)
    assert (config.image_size, config.dataset.num_examples) == ((32, 32), 50)
    with pytest.raises(AttributeError, match='immutable'):
        config.seed = 1
    with refused('value', field='dataset.num_classes', value=7):
        resolved(tiny(dataset__num_classes=7), 50, 8)
    with pytest.raises(UserError) as error:
        resolved(
            tiny(dataset__num_examples=60, dataset__num_classes=7, dataset__multi_label=True), 50, 8
        )
    assert str(error.value).endswith(
        'add --config.dataset.num_examples=0 --config.dataset.num_classes=0 '
        '--config.dataset.multi_label=False, which uses the numbers of the data.'
    )


def test_weights_of_classes():
    """Balanced weights equal scikit-learn's; a plan does not know the counts."""
    config = config_lib.checked(tiny(loss__class_weights=('balanced',)))
    counts = [5, 45, 1]
    found = resolve.with_data(config, 51, 3, class_counts=counts).loss.class_weights
    labels = np.repeat(np.arange(3), counts)
    np.testing.assert_allclose(
        found, compute_class_weight('balanced', classes=np.arange(3), y=labels), rtol=1e-12
    )
    assert resolve.with_data(config, 51, 3).loss.class_weights == ()
    config.loss.class_weights = (1, 2)
    assert resolve.with_data(config, 51, 2).loss.class_weights == (1, 2)
    with refused('value', field='loss.class_weights', value=(1, 2)):
        resolve.with_data(config, 51, 3)
    with refused('value', field='loss.class_weights', value=(1, 2)):
        config_lib.checked(
            config_lib.changed(
                config,
                {'masked.target': 'pixels', 'model.pool': 'gap', 'model.representation_size': 0},
            )
        )


def test_durations():
    config = resolved(tiny(num_steps=0, num_epochs=2.5, batch_size=10), 50, 2)
    assert config_lib.total_steps(config) == 12
    config = config_lib.changed(config, {'optimizer.warmup_steps': 12})
    with refused('value', field='optimizer.warmup_steps', value=12) as error:
        config_lib.total_steps(config)
    assert str(error.value).endswith('as in --config.optimizer.warmup_steps=1')
    config = config_lib.changed(
        config, {'optimizer.warmup_steps': 2, 'optimizer.cooldown_steps': 11}
    )
    with refused('value', field='optimizer.cooldown_steps', value=11):
        config_lib.total_steps(config)
    with refused('value', field='num_epochs', value=0.01):
        config_lib.total_steps(config_lib.changed(config, {'num_epochs': 0.01}))


def test_functions_do_not_change_their_config():
    given = tiny(image_size=(32,))
    before = given.to_dict()
    config = config_lib.checked(given, {'model.gelu': 'erf', 'preprocess.mean': (0.1, 0.2, 0.3)})
    assert (config.model.gelu, config.preprocess.mean) == ('erf', (0.1, 0.2, 0.3))
    resolve.with_data(config, 50, 7)
    config_lib.changed(given, {'seed': 3})
    assert given.to_dict() == before


@pytest.mark.parametrize(
    ('name', 'field', 'value'),
    [
        ('b16', 'model.layer_scale_init', 0.1),
        ('r50x1', 'model.axial_heads', 8),
        ('r50x1', 'optimizer.decay_scaling', 'gradient'),
        ('b16', 'dataset.cache', 'disk'),
    ],
)
def test_resumed_run_has_the_default_of_a_newer_field(name, field, value):
    new = config_lib.base(name)
    section, _, key = field.partition('.')
    old = json.loads(new.to_json())
    default = old[section].pop(key)
    assert config_lib.differences(old, new) == []
    assert config_lib.differences(old, config_lib.changed(new, {field: value})) == [
        f'{field}: {default!r} in the workdir, {value!r} now'
    ]


def test_published_steps_of_imagenet():
    config = vit.get_config('b16')
    assert config_lib.total_steps(resolved(config, 1_281_167, 1000)) == 93_835


def test_fine_tuning_keeps_the_best_checkpoint():
    assert load('finetune').get_config().keep_best


def test_directory_of_the_same_name_may_have_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in ('.', f'/elsewhere/{tmp_path.name}/', f'../{tmp_path.name}'):
        assert config_lib.may_have_moved(str(tmp_path), other)
    for other in ('', '..', '/elsewhere'):
        assert not config_lib.may_have_moved(str(tmp_path), other)


def test_resumed_run_keeps_the_values_of_its_version(monkeypatch, caplog):
    monkeypatch.setattr(config_lib, 'UNRECORDED', {'preprocess.antialias': False})
    monkeypatch.setattr(config_lib, 'CHANGED_VALUES', {'dataset.shuffle_buffer': [(8, 250)]})
    recorded = config_lib.base().to_dict()
    del recorded['preprocess']['antialias']
    recorded['dataset']['shuffle_buffer'] = 8
    recorded = config_lib.with_unrecorded(recorded)
    assert recorded['preprocess']['antialias'] is False
    now = config_lib.base()
    now.dataset.shuffle_buffer = 250
    kept = config_lib.as_begun(now, recorded)
    assert (kept.preprocess.antialias, kept.dataset.shuffle_buffer) == (False, 8)
    assert not config_lib.differences(recorded, kept)
    assert {record.args[0] for record in caplog.records} == {
        'preprocess.antialias',
        'dataset.shuffle_buffer',
    }
    # Another value is a choice of the user and counts as a difference.
    now.dataset.shuffle_buffer = 99
    assert config_lib.differences(recorded, config_lib.as_begun(now, recorded)) == [
        'dataset.shuffle_buffer: 8 in the workdir, 99 now'
    ]


@pytest.mark.parametrize(
    ('recipe', 'arg'), [('finetune', 'ti16,directory'), ('bit', 'r50x1,directory,3000,224')]
)
def test_resumed_run_on_a_directory_keeps_its_pixels(recipe, arg):
    """New runs have the pixels of Pillow; an earlier version did not antialias."""
    now = load(recipe).get_config(arg)
    assert (now.preprocess.antialias, now.preprocess.uint8_resize) == (True, True)
    recorded = now.to_dict()
    recorded['preprocess']['antialias'] = False
    del recorded['preprocess']['uint8_resize']
    recorded = config_lib.with_unrecorded(recorded)
    kept = config_lib.as_begun(now, recorded)
    assert (kept.preprocess.antialias, kept.preprocess.uint8_resize) == (False, False)
    assert not config_lib.differences(recorded, kept)


@pytest.mark.parametrize('arg', ['ti16,cifar10', 'ti16,vtab'])
def test_data_sets_of_the_paper_have_the_pixels_of_the_source(arg):
    preprocess = load('finetune').get_config(arg).preprocess
    assert (preprocess.antialias, preprocess.uint8_resize) == (False, False)


@pytest.mark.parametrize(
    ('field', 'value'),
    [('preprocess.antialias', False), ('preprocess.resize', 'area'), ('augment.resize', 'area')],
)
def test_uint8_resize_needs_filters_of_pillow(field, value):
    config = load('finetune').get_config('ti16,directory')
    with refused('value', field=field, value=value):
        checked(config_lib.changed(config, {field: value}))


def test_resumed_run_keeps_names_joined_by_commas(caplog):
    """An earlier version read 'kernel,bias' as one name, and nothing decayed."""
    recorded = config_lib.base().to_dict()
    recorded['optimizer']['decay_names'] = ['kernel,bias']
    now = config_lib.changed(config_lib.base(), {'optimizer.decay_names': ('kernel', 'bias')})
    kept = config_lib.as_begun(now, recorded)
    assert kept.optimizer.decay_names == ('kernel,bias',)
    assert not config_lib.differences(recorded, kept)
    assert caplog.records[-1].args[0] == 'optimizer.decay_names'
    other = config_lib.changed(now, {'optimizer.decay_names': ('kernel',)})
    assert config_lib.as_begun(other, recorded).optimizer.decay_names == ('kernel',)


def test_section_may_be_replaced_by_a_dict():
    config = tiny()
    section = config.optimizer.to_dict() | {'decay_names': 'kernel, bias'}
    del config.optimizer
    config.optimizer = section
    assert config_lib.checked(config).optimizer.decay_names == ('kernel', 'bias')


def test_short_run_has_a_curve():
    """log_every is at most a twentieth of the run, unless the config states another number."""
    for num_steps, log_every in ((1, 1), (30, 1), (500, 25), (2000, 100), (10**6, 100)):
        config = config_lib.checked(tiny(num_steps=num_steps, num_epochs=0.0, log_every=0))
        assert resolve.with_data(config, 50, 2).log_every == log_every
        config.log_every = 300
        assert resolve.with_data(config, 50, 2).log_every == 300
    assert config_lib.base().log_every == 0


def test_recorded_numbers_of_earlier_versions_may_be_out_of_range():
    recorded = config_lib.base().to_dict()
    recorded['loss'] |= {'label_smoothing': 0.99999999, 'class_weights': [1e-40, 1e30]}
    recorded['masked']['rate'] = 1e-45
    recorded['augment']['mixup'] = 1e-300
    recorded['teacher']['temperature'] = 1e-300
    config_lib.check_recorded(recorded, 'config.json')
    models.build(recorded['model'] | {'layer_norm_epsilon': 1e-40, 'dropout_rate': 1 - 1e-9}, 2)
    recorded['loss']['label_smoothing'] = -1.0
    with refused('value', field='loss.label_smoothing', value=-1.0, file='config.json'):
        config_lib.check_recorded(recorded, 'config.json')
