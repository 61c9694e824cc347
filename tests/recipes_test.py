"""Recipes, number by number, against their sources (ViT itself: config_test.py)."""

import re

import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.runs import ROOT, load
from vit_jax import cli, models
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.training import optimizer

plain, augreg, masked, distill = map(load, ('plain', 'augreg', 'masked', 'distill'))
scaling, bit_pretrain, vit = load('scaling'), load('bit_pretrain'), load('vit')


def complete(config):
    """Returns the checked config, after building its model."""
    config = config_lib.checked(config)
    models.build(config.model, config.dataset.num_classes)
    return config


@pytest.mark.parametrize(
    ('arg', 'epochs', 'steps'),
    [('s16', 90, 111_477), ('s16,150', 150, 185_794), ('s16,300', 300, 371_588)],
)
def test_plain_equals_vit_s16_i1k_of_big_vision(arg, epochs, steps):
    config = complete(plain.get_config(arg))
    o, augment, model = config.optimizer, config.augment, config.model
    assert (config.num_epochs, config.batch_size, config.image_size) == (epochs, 1024, (224, 224))
    assert config_lib.total_steps(config) == steps  # round(epochs * 1,268,355 / 1024)
    assert (o.name, o.b1, o.b2, o.mu_dtype, o.learning_rate, o.clip_norm) == (
        'adam',
        0.9,
        0.999,
        'bfloat16',
        1e-3,
        1.0,
    )
    assert (o.schedule, o.warmup_steps, o.end_learning_rate) == ('cosine', 10_000, 0.0)
    assert (o.weight_decay, o.decay_scaling, o.decay_names) == (1e-4, 'schedule', ('kernel',))
    assert (augment.crop, augment.min_area, augment.flip) == ('inception', 0.05, True)
    assert (augment.randaugment.num_ops, augment.randaugment.magnitude) == (2, 10)
    assert (augment.mixup, augment.mixup_with) == (0.2, 'next')
    assert (model.pool, model.position, model.representation_size) == ('gap', 'sincos_2d', 384)
    assert (model.dropout_rate, model.stochastic_depth_rate, model.head_bias_init) == (0, 0, 0)
    assert (config.loss.name, config.loss.label_smoothing) == ('softmax', 0.0)
    assert (config.dataset.train_split, config.dataset.eval_split) == ('train[:99%]', 'train[99%:]')
    size = config.preprocess.crop_ratio * 256
    assert (config.preprocess.fit, size, config.preprocess.mean) == ('cover', 224, (0.5,) * 3)


@pytest.mark.parametrize(
    ('level', 'num_ops', 'magnitude', 'mixup'),
    [
        ('none', 0, 0, 0.0),
        ('light1', 2, 0, 0.0),
        ('light2', 2, 10, 0.2),
        ('medium1', 2, 15, 0.2),
        ('medium2', 2, 15, 0.5),
        ('strong1', 2, 20, 0.5),
        ('strong2', 2, 20, 0.8),
    ],
)
def test_levels_of_augreg(level, num_ops, magnitude, mixup):
    """RANDAUG_DEF and MIXUP_DEF of big_vision's configs/vit_i21k.py."""
    augment = complete(augreg.get_config(f'b16,imagenet21k,{level}')).augment
    assert (augment.randaugment.num_ops, augment.randaugment.magnitude, augment.mixup) == (
        num_ops,
        magnitude,
        mixup,
    )


@pytest.mark.parametrize(
    ('name', 'checkpoint'),
    [  # README of vision_transformer
        ('l16', 'L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0'),
        ('b16', 'B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0'),
        ('s16', 'S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0'),
        ('r50_l32', 'R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1'),
        ('r26_s32', 'R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0'),
        ('ti16', 'Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0'),
        ('b32', 'B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0'),
        ('s32', 'S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0'),
        ('r_ti16', 'R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0'),
    ],
)
def test_augreg_on_imagenet21k_equals_the_released_checkpoints(name, checkpoint):
    config = complete(augreg.get_config(name))
    o, level = config.optimizer, config.recipe.removeprefix('AugReg ').split(',')[0]
    rates = config.model.dropout_rate, config.model.stochastic_depth_rate
    assert checkpoint.split('-', 1)[1] == (
        f'i21k-{config.num_epochs:.0f}ep-lr_{o.learning_rate}-aug_{level}-wd_{o.weight_decay}'
        f'-do_{rates[0]}-sd_{rates[1]}'
    )
    assert (config.model.pool, config.model.representation_size) == ('cls', 0)
    assert (config.loss.name, config.model.head_bias_init, config.batch_size) == (
        'sigmoid',
        -10.0,
        4096,
    )


@pytest.mark.parametrize(
    ('name', 'level'),
    [  # big_vision's configs/vit_i1k.py
        ('ti16', 'light1'),
        ('s32', 'medium1'),
        ('s16', 'medium2'),
        ('b32', 'medium2'),
        ('b16', 'medium2'),
        ('l16', 'medium2'),
    ],
)
def test_augreg_on_imagenet_equals_big_vision(name, level):
    config = complete(augreg.get_config(f'{name},imagenet2012'))
    o, model = config.optimizer, config.model
    assert config.recipe == f'AugReg {level}, {name} on imagenet2012'
    assert (o.weight_decay * o.learning_rate, o.clip_norm, o.warmup_steps) == (
        pytest.approx(1e-4),
        1.0,
        10_000,
    )
    assert (config.loss.name, model.head_bias_init, config.num_epochs) == ('sigmoid', -6.9, 300)
    assert (model.pool, model.representation_size) == ('cls', model.hidden_size)


def test_masked_patches_equal_appendix_b12():
    config = complete(masked.get_config('b16'))
    o = config.optimizer
    assert (config.masked.target, config.masked.rate) == ('mean_color', 0.5)
    assert (config.batch_size, config.num_steps) == (4096, 1_000_000)
    assert (o.name, o.learning_rate, o.warmup_steps, o.schedule) == ('adam', 2e-4, 10_000, 'cosine')
    with refused('value', field='augment.mixup', value=0.2):
        complete(config_lib.changed(config, {'augment.mixup': 0.2}))


@pytest.mark.parametrize(
    ('fields', 'student', 'teacher'),
    [
        ([], 224, 224),
        (['image_size=16'], 16, 16),
        (['teacher.image_size=32'], 224, 32),
        (['teacher.image_size=32', 'image_size=16'], 16, 32),
    ],
)
def test_teacher_of_distill_has_the_image_size_of_the_student(fields, student, teacher):
    config = config_lib.checked(
        cli.read_config(
            [f'--config={ROOT}/configs/distill.py', *(f'--config.{field}' for field in fields)]
        )
    )
    assert (config.image_size, config.teacher.image_size) == ((student,) * 2, (teacher,) * 2)


@pytest.mark.parametrize(
    ('arg', 'size', 'batch', 'steps', 'temperature', 'rate', 'decay'),
    [
        ('imagenet2012', 224, 4096, 367_835, 1.0, 0.03, 3e-4),  # bit_i1k.py of big_vision
        ('oxford_flowers102,fast', 128, 512, 19_922, 10.0, 0.003, 3e-4),  # bigsweep_flowers_pet.py
        ('oxford_flowers102', 128, 512, 199_219, 1.0, 0.001, 1e-4),
        ('oxford_flowers102,long', 128, 512, 1_992_188, 1.0, 0.0003, 1e-5),
        ('oxford_iiit_pet,fast', 128, 512, 6469, 5.0, 0.01, 1e-3),
        ('oxford_iiit_pet,medium', 128, 512, 19_406, 10.0, 0.003, 3e-4),
        ('oxford_iiit_pet,long', 128, 512, 194_062, 2.0, 0.003, 1e-5),
    ],
)
def test_distill_equals_big_vision(arg, size, batch, steps, temperature, rate, decay):
    config = complete(distill.get_config(arg))
    o, dataset, teacher = config.optimizer, config.dataset, config.teacher
    of_imagenet = arg == 'imagenet2012'
    assert (config.image_size, teacher.image_size) == ((size, size), (size, size))
    assert (config.batch_size, o.learning_rate, o.weight_decay) == (batch, rate, decay)
    dataset.num_examples = (
        dataset.num_examples or {'oxford_flowers102': 1020, 'oxford_iiit_pet': 3312}[dataset.name]
    )
    assert config_lib.total_steps(config) == steps
    assert (o.name, o.b1, o.b2, o.mu_dtype, o.clip_norm, o.schedule, o.decay_scaling) == (
        'adam',
        0.9,
        0.999,
        'bfloat16',
        1.0,
        'cosine',
        'schedule',
    )
    assert o.warmup_steps == (5000 if of_imagenet else 1500)
    assert (teacher.temperature, teacher.share) == (temperature, 1.0)
    assert (config.augment.mixup, config.augment.mixup_with) == (1.0, 'next')
    assert (config.augment.crop, config.augment.min_area, config.augment.flip) == (
        'inception',
        0.05,
        True,
    )
    assert size / config.preprocess.crop_ratio == (256 if of_imagenet else 160)
    assert (
        dataset.train_split
        == {
            'imagenet2012': 'train[:98%]',
            'oxford_flowers102': 'train',
            'oxford_iiit_pet': 'train[:90%]',
        }[dataset.name]
    )
    assert config.model.resnet.units == (3, 4, 6, 3)


@pytest.mark.parametrize(
    ('arg', 'layers', 'width', 'mlp', 'patch', 'heads'),
    [
        ('', 8, 1024, 2048, 32, 16),  # appendix D.2; 64 numbers a head, as in table 1's B and L
        ('depth,16', 16, 1024, 2048, 32, 16),
        ('depth,64', 64, 1024, 2048, 32, 16),
        ('width,2048', 8, 2048, 2048, 32, 32),
        ('mlp,8192', 8, 1024, 8192, 32, 16),
        ('patch,16', 8, 1024, 2048, 16, 16),
        ('all,2', 16, 2048, 4096, 16, 32),
    ],
)
def test_shapes_are_scaled_from_the_base_of_appendix_d2(arg, layers, width, mlp, patch, heads):
    config = complete(scaling.get_config(arg))
    model, row = config.model, vit.get_config('l32,jft')
    assert (
        model.num_layers,
        model.hidden_size,
        model.mlp_dim,
        model.patch_size,
        model.num_heads,
        model.representation_size,
    ) == (layers, width, mlp, (patch, patch), heads, width)
    few = config.evals.fewshot
    assert (few.shots, few.dataset, few.test_split) == ((5,), 'imagenet2012', 'validation')
    for field in (
        'optimizer',
        'loss',
        'dataset',
        'preprocess',
        'augment',
        'num_epochs',
        'batch_size',
    ):  # not in D.2: table 3's nearest row
        assert config[field] == row[field], field
    differs = [name for name in model if model[name] != row.model[name]]
    assert set(differs) <= {
        'num_layers',
        'hidden_size',
        'mlp_dim',
        'patch_size',
        'num_heads',
        'representation_size',
    }


@pytest.mark.slow
def test_relative_compute_equals_the_docstring():
    stated = re.findall(r'(\w+,\d+) (\d+\.\d+)', scaling.__doc__)
    assert len(stated) == 6

    def flops(arg=''):
        config = scaling.get_config(arg)
        return cost.of_model(models.build(config.model, 1000), config.image_size).flops

    base = flops()
    for arg, ratio in stated:
        assert flops(arg) / base == pytest.approx(float(ratio), abs=0.05), arg


@pytest.mark.parametrize('dimension', ['depth', 'width', 'mlp', 'patch'])
def test_lines_of_figure_8_meet_in_the_base(dimension):
    assert (
        scaling.get_config(f'{dimension},{scaling.BASE[dimension]}').model
        == (scaling.get_config('all,1').model)
        == scaling.get_config().model
    )


@pytest.mark.parametrize(
    ('arg', 'kind', 'field'),
    [
        ('heads,8', 'choice', 'the scaled dimension'),
        ('depth', 'value', 'the shape'),
        ('depth,0', 'value', 'the shape'),
        ('width,1.5', 'value', 'the shape'),
        ('all,3', 'value', 'the shape'),
    ],
)
def test_impossible_shapes_are_refused(arg, kind, field):
    with refused(kind, field=field):
        scaling.get_config(arg)


def test_message_of_an_impossible_shape():
    with refused('value', value='all,3') as error:
        scaling.get_config('all,3')
    assert str(error.value) == (
        "the shape is 'all,3': expected a dimension and a whole number, as in depth,64 or "
        'width,2048, or all,2, all,4 or all,8.'
    )


@pytest.mark.parametrize('arg', ['width,1000', 'patch,30'])
def test_shapes_that_no_model_can_have_are_refused(arg):
    with pytest.raises(UserError):
        complete(scaling.get_config(arg))


@pytest.mark.parametrize(
    ('dataset', 'epochs', 'falls', 'steps'),
    [
        ('imagenet2012', 90, (30, 60, 80), 28_151),
        ('imagenet21k', 90, (30, 60, 80), 310_823),
        ('jft', 40, (10, 23, 30, 37), None),
    ],
)
def test_bit_pretraining_equals_section_33(dataset, epochs, falls, steps):
    """arXiv 1912.11370; loss and evaluation as in big_vision's bit_i1k.py and bit_i21k.py."""
    config = complete(bit_pretrain.get_config(f'r50x1,{dataset}'))
    o, augment = config.optimizer, config.augment
    assert (config.num_epochs, config.batch_size, config.image_size) == (epochs, 4096, (224, 224))
    assert (o.name, o.momentum, o.learning_rate, o.warmup_steps, o.clip_norm) == (
        'sgd',
        0.9,
        pytest.approx(0.03 * 4096 / 256),
        5000,
        0,
    )
    assert (o.weight_decay, o.decay_scaling) == (1e-4, 'gradient')
    assert (augment.crop, augment.flip, augment.mixup) == ('inception', True, 0)
    assert (config.loss.name, config.model.head_bias_init) == (
        ('softmax', 0) if dataset == 'imagenet2012' else ('sigmoid', -10)
    )
    if steps:
        assert config_lib.total_steps(config) == steps  # round(90 * examples / 4096)
    rate = optimizer.make_schedule(o, 1000 * epochs)  # an epoch has 1000 steps
    for n, epoch in enumerate(falls):
        np.testing.assert_allclose(
            [rate(1000 * epoch), rate(1000 * epoch + 1)], [0.48 / 10**n, 0.048 / 10**n], rtol=1e-5
        )


def test_unknown_arguments_are_refused():
    for recipe, arg, field in (
        (distill, 'oxford_iiit_pet,quick', 'the length'),
        (bit_pretrain, 'r50x1,jft300m', 'the data set'),
        (plain, 's16,100', 'the number of epochs'),
        (augreg, 'b16,imagenet2012,strong', 'the level of augmentation'),
        (augreg, 'b16,imagenet', 'the data set'),
    ):
        with refused('choice', field=field, value=arg.rpartition(',')[2]):
            recipe.get_config(arg)


def test_model_without_a_published_level_needs_one():
    with refused('missing', field='the level of augmentation') as error:
        augreg.get_config('h14')
    assert 'as in --config=configs/augreg.py:h14,imagenet21k,medium1' in str(error.value)
    assert complete(augreg.get_config('h14,imagenet21k,medium1')).optimizer.weight_decay == 0.1


HELD_OUT_TOGETHER = {'dataset.eval_split': 'train[:51200]', 'dataset.test_split': ''}


@pytest.mark.parametrize(
    ('name', 'argument', 'earlier'),
    [
        ('plain', 's16', {}),
        ('augreg', 'b16', HELD_OUT_TOGETHER),
        ('augreg', 'b16,imagenet2012', {}),
        ('distill', 'imagenet2012', {}),
        ('distill', 'oxford_iiit_pet', {}),
        ('bit_pretrain', 'r50x1', {}),
        ('bit_pretrain', 'r50x1,imagenet21k', HELD_OUT_TOGETHER),
        ('vit', 'b16,imagenet21k', HELD_OUT_TOGETHER),
        ('finetune', 'b16,cifar10', {}),
        ('vtab', 'b16,dtd', {}),
        ('bit', 'r50x1,cifar10', {}),
    ],
)
def test_resumed_run_of_an_earlier_version_keeps_its_images_and_their_order(
    name, argument, earlier
):
    now = load(name).get_config(argument)
    begun = config_lib.changed(now, {'dataset.shuffle_buffer': 16_384, **earlier})
    assert config_lib.differences(begun.to_dict(), now)
    kept = config_lib.as_begun(now, config_lib.with_unrecorded(begun.to_dict()))
    assert config_lib.differences(begun.to_dict(), kept) == []
    assert kept.dataset.to_dict() == begun.dataset.to_dict()


@pytest.mark.parametrize(
    ('name', 'argument', 'every'),
    [  # steps between log lines, evaluations and checkpoints of the source
        ('plain', 's16', (50, 2500, 1000)),
        ('augreg', 'b16', (50, 1000, 1000)),
        ('augreg', 'b16,imagenet2012', (50, 2500, 1000)),
        ('distill', 'imagenet2012', (50, 1000, 1000)),
        ('distill', 'oxford_iiit_pet', (100, 500, 2500)),
        ('bit_pretrain', 'r50x1', (50, 1000, 1000)),
    ],
)
def test_monitoring_has_the_periods_of_the_source(name, argument, every):
    config = load(name).get_config(argument)
    assert (config.log_every, config.eval_every, config.checkpoint_every) == every


def test_grid_of_imagenet_equals_table_4():
    finetune = load('finetune')
    for model in ('b16', 'r50_b16', 'r50x1'):
        grid = finetune.get_grid(f'{model},imagenet2012')
        assert grid == {'optimizer.learning_rate': (0.003, 0.01, 0.03, 0.06)}
    assert '--config.optimizer.learning_rate=0.003,0.01,0.03 ' in finetune.__doc__
