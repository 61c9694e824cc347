"""Every field of the sources' configs, with our recipe's value.

    python -m benchmarks.certificate --fields [--recipes=plain,distill_pet]

source_configs.json has the fields of each source and their values. The configs of big_vision at
commit 0127fb6, vision_transformer at c6de1e5 and big_transfer at 140de6e were executed and
flattened. Other sources are numbers in the tables and appendices of the ViT paper. RECIPES accounts
for each field: our config has the same value (`equal`), an equivalent by another name or in another
unit (`converted`), or another value for a reason (`differs`). tests/certificate_test.py fails if a
field of a source has no account, or if our config has another value than the account.
"""

import fnmatch
import json
import pathlib
import runpy
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax import config as config_lib

SOURCES = json.loads(pathlib.Path(__file__).with_name('source_configs.json').read_text())
SAME = object()  # stands for the value of the source


class Account(NamedTuple):
    """The values of our config for a field of a source."""

    relation: str  # equal, converted or differs
    ours: Mapping[str, Any]  # values in JSON's types by dotted field; {}: we have no such field
    note: str  # the conversion, or the reason of the difference


class Recipe(NamedTuple):
    """A config of ours, a source, and the accounts of the fields of the source.

    A name in `accounts` may contain '*' for any characters. An exact name takes precedence.
    """

    config: str  # FILE:ARGUMENT in configs/
    source: str  # a key of SOURCES
    accounts: Mapping[str, Account]  # by field of the source


class Row(NamedTuple):
    """A field of a source, and the values of our config for it."""

    field: str
    value: Any
    account: Account
    ours: Mapping[str, Any]  # the values of the config


def equal(field: str, note: str = '', **also: Any) -> Account:
    """Our field has the same value; `also` are related fields of ours, with __ for dots."""
    return Account('equal', {field: SAME, **_dotted(also)}, note)


def converted(note: str, **ours: Any) -> Account:
    """Our fields have an equivalent value by another name or in another unit."""
    return Account('converted', _dotted(ours), note)


def differs(note: str, **ours: Any) -> Account:
    """Our fields have another value, or we have no such field."""
    return Account('differs', _dotted(ours), note)


def _dotted(values):
    return {name.replace('__', '.'): value for name, value in values.items()}


# Accounts that several sources share.
PREFETCH = differs('we have a fixed number of prefetched batches, which changes no result')
NOT_CACHED = differs('we read TFDS files again in each epoch, which changes no result')
AFTERWARDS = differs('training evaluates one split; vit_jax.evaluate scores other splits')
FEWSHOT = differs(
    'off; evals.fewshot has one data set, scored in every evaluation',
    evals__fewshot__shots=[],
)
SOFTMAX = converted('softmax cross-entropy', loss__name='softmax', loss__label_smoothing=0.0)
SIGMOID = converted('sigmoid cross-entropy', loss__name='sigmoid', loss__label_smoothing=0.0)
SQUARE = 'resize of the short side and central crop; the source averages areas ("Traps")'
CROP = 'equal crop, flip and scale; grey levels are rounded only with RandAugment ("Traps")'
UNIT_SCALE = {'preprocess__mean': [0.5] * 3, 'preprocess__std': [0.5] * 3}
INCEPTION = dict(
    augment__crop='inception', augment__min_area=0.05, augment__flip=True, **UNIT_SCALE
)


def evaluator(name: str, split: str = 'dataset.eval_split', **more: Account) -> dict[str, Account]:
    """Returns the accounts of the evaluator of big_vision that is our main evaluation."""
    return {
        f'{name}.data.name': equal('dataset.name'),
        f'{name}.data.split': equal(split),
        f'{name}.log_steps': equal('eval_every'),
        f'{name}.loss_name': converted('the loss of training'),
        f'{name}.type': converted('we always evaluate accuracy and loss'),
        f'{name}.cache': NOT_CACHED,
        f'{name}.pred': converted('we evaluate the student'),
        **{f'{name}.{field}': account for field, account in more.items()},
    }


def cover(size: int, resized: int) -> Account:
    """Returns the account of resize_small(resized)|central_crop(size)."""
    return differs(
        SQUARE,
        preprocess__fit='cover',
        preprocess__crop_ratio=size / resized,
        preprocess__resize='bilinear',
        preprocess__antialias=False,
        image_size=[size, size],
        **UNIT_SCALE,
    )


def transformer(patch: int, hidden: int, layers: int, mlp: int, heads: int) -> Account:
    """Returns the account of the sizes of a variant."""
    return converted(
        'sizes of the variant',
        model__patch_size=[patch, patch],
        model__hidden_size=hidden,
        model__num_layers=layers,
        model__mlp_dim=mlp,
        model__num_heads=heads,
    )


def randaugment(num_ops: int, magnitude: float) -> Account:
    """Returns the account of inception_crop(224)|flip_lr|randaug(num_ops,magnitude)."""
    return converted(
        'decoded JPEG pixels differ by one or two grey levels ("Traps")',
        augment__randaugment__num_ops=num_ops,
        augment__randaugment__magnitude=magnitude,
        image_size=[224, 224],
        **INCEPTION,
    )


BIG_VISION = {
    'seed': equal('seed', 'the random numbers differ'),
    'total_epochs': equal('num_epochs'),
    'num_classes': equal('dataset.num_classes'),
    'input.data.name': equal('dataset.name'),
    'input.data.split': equal('dataset.train_split'),
    'input.batch_size': equal('batch_size'),
    'input.shuffle_buffer_size': equal(
        'dataset.shuffle_buffer', 'a buffer in the source, windows here; only for tfrecord files'
    ),
    'input.cache*': NOT_CACHED,
    'input.prefetch': PREFETCH,
    'prefetch_to_device': PREFETCH,
    'pp_modules': converted('vit_jax contains RandAugment'),
    'log_training_steps': equal('log_every'),
    'ckpt_steps': equal('checkpoint_every'),
    'model_name': converted('a Vision Transformer', model__gelu='tanh'),
    'grad_clip_norm': equal('optimizer.clip_norm'),
    'optax_name': converted(
        'with the defaults of Optax', optimizer__name='adam', optimizer__b1=0.9, optimizer__b2=0.999
    ),
    'optax.mu_dtype': equal('optimizer.mu_dtype'),
    'lr': equal('optimizer.learning_rate'),
    'schedule.decay_type': equal('optimizer.schedule', optimizer__end_learning_rate=0.0),
    'schedule.warmup_steps': equal('optimizer.warmup_steps'),
    'mixup.p': equal('augment.mixup', augment__mixup_with='next'),
    'mixup.fold_in': differs('we mix the whole batch, the source the batch of each device'),
    'init_head_bias': equal('model.head_bias_init'),
}
WD_BY_SCHEDULE = equal(
    'optimizer.weight_decay',
    optimizer__decay_scaling='schedule',
    optimizer__decay_names=['kernel'],
)
WD_BY_RATE = converted(
    '1e-4 of the schedule is 0.1 of the learning rate 1e-3',
    optimizer__weight_decay=0.1,
    optimizer__decay_scaling='learning_rate',
    optimizer__decay_names=['kernel'],
)
OTHER_EVALUATORS = {
    f'evals.{name}.*': AFTERWARDS for name in ('train', 'val', 'test', 'v2', 'real')
}
IMAGENET_21K = {
    **BIG_VISION,
    'input.data.split': converted('full is our train', dataset__train_split='train[51200:]'),
    'loss': SIGMOID,
    **evaluator(
        'evals.val',
        split='dataset.eval_split',
        pp_fn=cover(224, 256),
    ),
    'evals.val.data.split': converted(
        'full is our train', dataset__eval_split='train[25600:51200]'
    ),
    'evals.test.data.split': converted(
        'full is our train; scored by vit_jax.evaluate or sweep',
        dataset__test_split='train[:25600]',
    ),
    'evals.test.*': AFTERWARDS,
    'evals.train.*': AFTERWARDS,
    'evals.fewshot.*': FEWSHOT,
}

PLAIN = {
    **BIG_VISION,
    **OTHER_EVALUATORS,
    **evaluator('evals.minival', pp_fn=cover(224, 256)),
    'evals.val.data.split': equal('dataset.test_split', 'scored by vit_jax.evaluate or sweep'),
    'input.pp': randaugment(2, 10),
    'loss': SOFTMAX,
    'model.variant': transformer(16, 384, 12, 1536, 6),
    'model.rep_size': converted('as wide as a token', model__representation_size=384),
    'model.pool_type': equal('model.pool'),
    'model.posemb': converted('fixed sines and cosines', model__position='sincos_2d'),
    'wd': WD_BY_SCHEDULE,
}
AUGREG_IMAGENET = {
    **BIG_VISION,
    **OTHER_EVALUATORS,
    **evaluator('evals.minival', pp_fn=cover(224, 256)),
    'evals.val.data.split': equal('dataset.test_split', 'scored by vit_jax.evaluate or sweep'),
    'fewshot.*': FEWSHOT,
    'input.pp': randaugment(2, 15),
    'loss': SIGMOID,
    'model.variant': transformer(16, 768, 12, 3072, 12),
    'model.rep_size': converted('as wide as a token', model__representation_size=768),
    'model.pool_type': converted('the class token', model__pool='cls'),
    'wd': WD_BY_RATE,
}
NEWER = 'this recipe follows the released checkpoints, which are older than that config'
AUGREG_IMAGENET_21K = {
    **IMAGENET_21K,
    'input.pp': differs(
        f'medium1 instead of light2: {NEWER}',
        augment__randaugment__num_ops=2,
        augment__randaugment__magnitude=15,
        image_size=[224, 224],
        **INCEPTION,
    ),
    'model.variant': transformer(16, 768, 12, 3072, 12),
    'model.pool_type': differs(NEWER, model__pool='cls', model__representation_size=0),
    'model.posemb': converted('learned; initial values differ', model__position='learned_1d'),
    'wd': WD_BY_RATE,
}
PAPER = 'the number of ViT, table 3'
VIT_IMAGENET_21K = {
    **AUGREG_IMAGENET_21K,
    'ckpt_steps': equal('checkpoint_every'),
    'total_epochs': differs(PAPER, num_epochs=90.0),
    'input.pp': differs(
        'no RandAugment in ViT', augment__randaugment__num_ops=0, image_size=[224, 224], **INCEPTION
    ),
    'input.shuffle_buffer_size': differs(
        'the paper states no number; 250,000 need up to 80 GB', dataset__shuffle_buffer=16_384
    ),
    'log_training_steps': differs('the paper states no number', log_every=0),
    'evals.val.log_steps': differs('the paper states no number', eval_every=5000),
    'evals.val.pp_fn': differs(
        'squashed to a square, like in vision_transformer',
        preprocess__fit='squash',
        preprocess__crop_ratio=1.0,
    ),
    'grad_clip_norm': differs('the paper clips only on ImageNet', optimizer__clip_norm=0.0),
    'mixup.p': differs('no MixUp in ViT', augment__mixup=0.0),
    'mixup.fold_in': differs('no MixUp in ViT'),
    'model.pool_type': differs('the paper has a class token', model__pool='cls'),
    'optax.mu_dtype': differs('the paper states no dtype', optimizer__mu_dtype='float32'),
    'schedule.decay_type': differs(PAPER, optimizer__schedule='linear'),
    'wd': differs(PAPER, optimizer__weight_decay=0.03, optimizer__decay_scaling='learning_rate'),
}

BIT_PAPER = 'the number of the BiT paper, section 3.3'
RESNET50 = converted('BiT R50x1', model__resnet__units=[3, 4, 6, 3], model__resnet__width=64)
WIDTH = converted('64 channels of the root', model__resnet__width=64)
BIT = {
    'optax_name': converted('momentum 0.9', optimizer__name='sgd', optimizer__momentum=0.9),
    'input.pp': converted(
        CROP, augment__randaugment__num_ops=0, image_size=[224, 224], **INCEPTION
    ),
    'model.depth': RESNET50,
    'model.width': WIDTH,
    'grad_clip_norm': differs('the BiT paper does not clip', optimizer__clip_norm=0.0),
    'wd': differs(BIT_PAPER, optimizer__weight_decay=1e-4, optimizer__decay_scaling='gradient'),
    'schedule.decay_type': differs(
        BIT_PAPER,
        optimizer__schedule='staircase',
        optimizer__staircase_factor=0.1,
        optimizer__staircase_boundaries=[30 / 90, 60 / 90, 80 / 90],
    ),
}
BIT_IMAGENET = {
    **BIG_VISION,
    **OTHER_EVALUATORS,
    **BIT,
    'evals.minival.*': differs(
        'the BiT paper trains on the whole train split; we evaluate validation',
        dataset__eval_split='validation',
    ),
    **evaluator('evals.val', pp_fn=cover(224, 256)),
    'input.data.split': differs(
        'the BiT paper trains on the whole train split', dataset__train_split='train'
    ),
    'loss': SOFTMAX,
    'lr': differs(BIT_PAPER, optimizer__learning_rate=0.03 * 4096 / 256),
    'model_name': differs(
        "the ResNet of the BiT paper, big_vision's bit_paper", model__resnet__preactivation=True
    ),
    'schedule.warmup_steps': differs(BIT_PAPER, optimizer__warmup_steps=5000),
}
BIT_IMAGENET_21K = {
    **IMAGENET_21K,
    **BIT,
    'model_name': converted('BiT', model__resnet__preactivation=True),
}

DISTILL = {
    **BIG_VISION,
    'distance': converted('only the KL divergence', teacher__share=1.0),
    'distance_kw.t': equal('teacher.temperature'),
    'evals.teacher_*': differs('the teacher is constant: vit_jax.evaluate scores it once'),
    'evals.student_*': AFTERWARDS,
    'evals.dist_*': differs('we log the distance to the teacher only as the training loss'),
    'evals.cka_*': differs('we have no such evaluator'),
    'evals.student_fewshot.*': FEWSHOT,
    'keep_ckpt_steps': equal('keep_every'),
    'optim_name': differs('no code of the source reads it'),
    'teachers': converted('one teacher'),
    'prof_m_name': converted('BiT, from the weights'),
    'prof_m.depth': converted('R152x2, from the weights'),
    'prof_m.width': converted('R152x2, from the weights'),
    'student_name': converted('BiT', model__resnet__preactivation=True),
    'student.depth': RESNET50,
    'student.width': WIDTH,
    'wd': WD_BY_SCHEDULE,
}
DISTILL_IMAGENET = {
    **DISTILL,
    'input.pp': converted(CROP, image_size=[224, 224], teacher__image_size=[224, 224], **INCEPTION),
    'prof_m_init': converted(
        "the same weights in timm's layout on the Hugging Face hub",
        teacher__weights='timm:resnetv2_152x2_bit.goog_teacher_in21k_ft_in1k',
    ),
    **evaluator('evals.student_minival', pp_fn=cover(224, 256)),
    'evals.student_val.data.split': equal(
        'dataset.test_split', 'scored by vit_jax.evaluate or sweep'
    ),
}
DISTILL_SMALL = {
    **DISTILL,
    'input.pp': converted(CROP, image_size=[128, 128], teacher__image_size=[128, 128], **INCEPTION),
    'prof_m_init': equal('teacher.weights'),
    'num_classes': converted('from the data', dataset__num_classes=0),
    **evaluator('evals.student_val', pp_fn=cover(128, 160)),
    'evals.student_test.data.split': equal(
        'dataset.test_split', 'scored by vit_jax.evaluate or sweep'
    ),
}

TABLE_4 = 'the number of ViT, table 4'
FINETUNE = {
    'accum_steps': differs('as many parts as fit in memory', accum_steps=0),
    'batch': equal('batch_size'),
    'batch_eval': converted('the batch of training', batch_size=512),
    'dataset': equal('dataset.name'),
    'decay_type': equal('optimizer.schedule', optimizer__end_learning_rate=0.0),
    'grad_norm_clip': equal('optimizer.clip_norm'),
    'model.classifier': converted('the class token', model__pool='cls'),
    'model.hidden_size': equal('model.hidden_size'),
    'model.model_name': converted('the argument b16'),
    'model.patches.size': equal('model.patch_size'),
    'model.representation_size': converted(
        'no hidden layer in the head', model__representation_size=0
    ),
    'model.transformer.attention_dropout_rate': equal('model.attention_dropout_rate'),
    'model.transformer.dropout_rate': equal('model.dropout_rate'),
    'model.transformer.mlp_dim': equal('model.mlp_dim'),
    'model.transformer.num_heads': equal('model.num_heads'),
    'model.transformer.num_layers': equal('model.num_layers'),
    'model_or_filename': converted('--config.pretrained', pretrained=''),
    'optim_dtype': differs('the paper states no dtype', optimizer__mu_dtype='float32'),
    'pp.crop': converted(
        'a random crop in training, the whole image squashed in evaluation',
        image_size=[384, 384],
        preprocess__fit='squash',
        preprocess__crop_ratio=1.0,
        preprocess__resize='bilinear',
        preprocess__antialias=False,
        **INCEPTION,
    ),
    'pp.test': equal('dataset.test_split', 'scored once at the end of a sweep'),
    'pp.train': equal('dataset.train_split'),
    'prefetch': PREFETCH,
    'pretrained_dir': converted('--config.pretrained', pretrained=''),
    'progress_every': equal('log_every'),
    'shuffle_buffer': equal(
        'dataset.shuffle_buffer', 'a buffer in the source, windows here; only for tfrecord files'
    ),
    'tfds_data_dir': converted("TFDS's default", dataset__data_dir=''),
    'tfds_manual_dir': differs('vit_jax prepares no TFDS sets'),
    'total_steps': equal('num_steps'),
    'trainer': converted('vit_jax.main'),
    'warmup_steps': equal('optimizer.warmup_steps'),
}
FINETUNE_PETS = {
    **FINETUNE,
    'dataset': differs('an argument of the source', dataset__name='oxford_iiit_pet'),
    'pp.train': differs(
        '10 % are held out to choose a rate, ViT table 4', dataset__train_split='train[:90%]'
    ),
    'pp.resize': differs('no code of the source reads it'),
}


def of_length(every: int, learning_rate: float) -> dict[str, Account]:
    """Returns the accounts of fine-tuning that depend on the data set."""
    checkpoints = equal('checkpoint_every')
    if every != 1000:
        checkpoints = differs('a tenth of the run, at least 50 steps', checkpoint_every=every)
    return {
        'base_lr': differs(
            'one rate of the grid in ViT, table 4; vit_jax.sweep tries all of them',
            optimizer__learning_rate=learning_rate,
            optimizer__name='sgd',
        ),
        'checkpoint_every': checkpoints,
        'eval_every': differs(
            'a tenth of the run, at least 50 steps, on held-out images; we keep the best',
            eval_every=every,
            keep_best=True,
        ),
    }


TABLE_3 = {
    'epochs': equal('num_epochs'),
    'base_lr': equal('optimizer.learning_rate'),
    'lr_decay': equal('optimizer.schedule'),
    'weight_decay': equal('optimizer.weight_decay', optimizer__decay_scaling='learning_rate'),
    'dropout': equal('model.dropout_rate'),
    'batch_size': equal('batch_size'),
    'warmup_steps': equal('optimizer.warmup_steps'),
    'resolution': converted('height and width', image_size=[224, 224]),
    'adam.b1': equal('optimizer.b1', optimizer__name='adam'),
    'adam.b2': equal('optimizer.b2'),
    'clip_norm': converted('0: no clipping', optimizer__clip_norm=0.0),
}
TABLE_4_ROW = {
    'steps': equal('num_steps'),
    'base_lr': converted('one rate; get_grid of configs/finetune.py has all rates'),
    'batch_size': equal('batch_size'),
    'momentum': equal('optimizer.momentum', optimizer__name='sgd'),
    'lr_decay': equal('optimizer.schedule'),
    'weight_decay': equal('optimizer.weight_decay'),
    'clip_norm': equal('optimizer.clip_norm'),
    'resolution': converted('height and width', image_size=[384, 384]),
}


def held_out(percent: int) -> Account:
    """Returns the account of the share of train that chooses the learning rate."""
    return converted(
        'the end of train',
        dataset__train_split=f'train[:{100 - percent}%]',
        dataset__eval_split=f'train[{100 - percent}%:]',
    )


BIT_HYPERRULE = {
    'name': converted('--workdir'),
    'logdir': converted('--workdir'),
    'model': converted('the argument of the config'),
    'bit_pretrained_dir': converted('--config.pretrained', pretrained=''),
    'tfds_manual_dir': differs('vit_jax prepares no TFDS sets'),
    'dataset': equal('dataset.name'),
    'batch': equal('batch_size'),
    'batch_split': differs('as many parts as fit in memory', accum_steps=0),
    'batch_eval': differs('the batch of training', batch_size=512),
    'base_lr': equal('optimizer.learning_rate'),
    'eval_every': differs('a tenth of the run, on held-out images', eval_every=1000),
    'examples_per_class': converted('all examples', dataset__subset=''),
    'examples_per_class_seed': differs('a fixed permutation selects a subset'),
    'known_dataset_sizes': converted('DATASETS of configs/bit.py'),
    'get_resolution': converted(
        'resized to 160, cropped to 128', image_size=[128, 128], augment__crop_ratio=128 / 160
    ),
    'get_mixup': equal('augment.mixup'),
    'get_schedule': converted(
        'warm-up, shares of the steps, steps',
        optimizer__warmup_steps=500,
        optimizer__staircase_boundaries=[0.3, 0.6, 0.9],
        num_steps=10_000,
    ),
    'get_lr.factor': equal('optimizer.staircase_factor', optimizer__schedule='staircase'),
    'DATASET_SPLITS.train': equal('dataset.train_split'),
    'DATASET_SPLITS.test': equal('dataset.test_split'),
    'MAX_IN_MEMORY': equal(
        'dataset.shuffle_buffer', 'a buffer in the source, windows here; only for tfrecord files'
    ),
    'train.resize': equal('preprocess.resize', preprocess__antialias=False),
    'train.crop': converted('of the squashed image', augment__crop='resize'),
    'train.flip': differs('half of the images, as in the BiT paper', augment__flip=True),
    'eval.resize': converted('', preprocess__fit='squash', preprocess__crop_ratio=1.0),
    'pixels': converted(
        'from the weights',
        transfer__take=[
            'preprocess.mean',
            'preprocess.std',
            'model.resnet.group_norm_epsilon',
            'model.resnet.weight_epsilon',
            'model.resnet.weight_epsilon_on',
        ],
    ),
    'mixup.with': converted('', augment__mixup_with='reversed'),
    'mixup.share': converted('', augment__mixup_with='reversed'),
    'prefetch': PREFETCH,
    'loss': SOFTMAX,
    'optimizer': converted('', optimizer__name='sgd', optimizer__momentum=0.9),
    'weight_decay': equal('optimizer.weight_decay'),
    'grad_clip': converted('0: no clipping', optimizer__clip_norm=0.0),
}

RECIPES = {
    'plain': Recipe('plain:s16', 'big_vision configs/vit_s16_i1k.py', PLAIN),
    'augreg_imagenet2012': Recipe(
        'augreg:b16,imagenet2012',
        'big_vision configs/vit_i1k.py:variant=B/16',
        AUGREG_IMAGENET,
    ),
    'augreg_imagenet21k': Recipe(
        'augreg:b16,imagenet21k',
        'big_vision configs/vit_i21k.py:variant=B/16',
        AUGREG_IMAGENET_21K,
    ),
    'bit_imagenet2012': Recipe('bit_pretrain:r50x1', 'big_vision configs/bit_i1k.py', BIT_IMAGENET),
    'bit_imagenet21k': Recipe(
        'bit_pretrain:r50x1,imagenet21k', 'big_vision configs/bit_i21k.py', BIT_IMAGENET_21K
    ),
    'distill_imagenet2012': Recipe(
        'distill:imagenet2012', 'big_vision configs/proj/distill/bit_i1k.py', DISTILL_IMAGENET
    ),
    'distill_flowers': Recipe(
        'distill:oxford_flowers102',
        'big_vision configs/proj/distill/bigsweep_flowers_pet.py:data=flowers',
        DISTILL_SMALL,
    ),
    'distill_pet': Recipe(
        'distill:oxford_iiit_pet',
        'big_vision configs/proj/distill/bigsweep_flowers_pet.py:data=pet',
        DISTILL_SMALL,
    ),
    'vit_imagenet2012': Recipe(
        'vit:b16',
        'ViT table 3, B/16 on ImageNet',
        TABLE_3 | {'clip_norm': equal('optimizer.clip_norm')},
    ),
    'vit_imagenet21k': Recipe('vit:b16,imagenet21k', 'ViT table 3, B/16 on ImageNet-21k', TABLE_3),
    'vit_imagenet21k_big_vision': Recipe(
        'vit:b16,imagenet21k', 'big_vision configs/vit_i21k.py:variant=B/16', VIT_IMAGENET_21K
    ),
    'vit_jft': Recipe('vit:b16,jft', 'ViT table 3, B/16 on JFT-300M', TABLE_3),
    'finetune_cifar10': Recipe(
        'finetune:b16,cifar10',
        'ViT table 4, CIFAR-10',
        TABLE_4_ROW | {'held_out_percent': held_out(2)},
    ),
    'finetune_imagenet2012': Recipe(
        'finetune:b16,imagenet2012',
        'ViT table 4, ImageNet',
        TABLE_4_ROW | {'held_out_percent': held_out(1)},
    ),
    'finetune_pets': Recipe(
        'finetune:b16,oxford_iiit_pet',
        'ViT table 4, Oxford-IIIT Pets',
        TABLE_4_ROW | {'held_out_percent': held_out(10)},
    ),
    'finetune_cifar10_code': Recipe(
        'finetune:b16,cifar10',
        'vision_transformer configs/vit.py:b16,cifar10',
        FINETUNE | of_length(1000, 0.003),
    ),
    'finetune_imagenet2012_code': Recipe(
        'finetune:b16,imagenet2012',
        'vision_transformer configs/vit.py:b16,imagenet2012',
        FINETUNE | of_length(2000, 0.01),
    ),
    'finetune_l16_code': Recipe(
        'finetune:l16,imagenet2012',
        'vision_transformer configs/vit.py:l16,imagenet2012',
        {
            'model.transformer.dropout_rate': differs(
                'the paper states no rate; the code has one for some models',
                model__dropout_rate=0.0,
            )
        },
    ),
    'finetune_pets_code': Recipe(
        'finetune:b16,oxford_iiit_pet',
        'vision_transformer configs/augreg.py:B_16',
        FINETUNE_PETS | of_length(50, 0.003),
    ),
    'vtab': Recipe(
        'vtab:b16,dtd',
        'ViT table 4, VTAB',
        TABLE_4_ROW
        | {
            'base_lr': converted('the only rate', optimizer__learning_rate=0.01),
            'train_examples': converted(
                'the first 800 of train and 200 of validation',
                dataset__final_split='train[:800]+validation[:200]',
            ),
        },
    ),
    'bit': Recipe(
        'bit:r50x1,cifar10',
        'big_transfer bit_hyperrule.py, bit_common.py, input_pipeline_tf2_or_jax.py:cifar10',
        BIT_HYPERRULE,
    ),
    'masked': Recipe(
        'masked:b16',
        'ViT appendix B.1.2',
        {
            'hidden_share': equal('masked.rate'),
            'mask_token_share': converted('fixed in models/masked.py'),
            'other_patch_share': differs('the other patch is of the same image'),
            'target': converted('', masked__target='mean_color'),
            'adam.lr': equal('optimizer.learning_rate', optimizer__name='adam'),
            'warmup_steps': equal('optimizer.warmup_steps'),
            'lr_decay': equal('optimizer.schedule'),
            'batch_size': equal('batch_size'),
            'steps': equal('num_steps'),
            'data': converted('', dataset__name='jft'),
        },
    ),
    'scaling': Recipe(
        'scaling:',
        'ViT appendix D.2',
        {
            'layers': equal('model.num_layers'),
            'width': equal('model.hidden_size'),
            'mlp': equal('model.mlp_dim'),
            'patch_size': converted('height and width', model__patch_size=[32, 32]),
            'fewshot.shots': converted('', evals__fewshot__shots=[5]),
            'fewshot.data': converted('', evals__fewshot__dataset='imagenet2012'),
        },
    ),
}
# Files of configs/ without a source.
OWN = ('cifar10', 'quickstart')


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields of the config of a recipe by dotted name, with values in JSON's types."""
    name, _, argument = recipe.config.partition(':')
    path = pathlib.Path(__file__).parents[1] / 'configs' / f'{name}.py'
    config = runpy.run_path(str(path))['get_config'](argument)
    return config_lib.flatten(config_lib.checked(config))


def rows(name: str) -> list[Row]:
    """Returns a row for each field of the source of a recipe.

    Raises:
      ValueError: a field has no account, or our config has other values than its account.
    """
    recipe = RECIPES[name]
    config = config_of(recipe)
    return [
        _row(name, field, value, _account(name, field, recipe.accounts), config)
        for field, value in SOURCES[recipe.source].items()
    ]


def _account(name, field, accounts):
    """The account of the exact name, or else of the longest pattern."""
    if field in accounts:
        return accounts[field]
    patterns = [pattern for pattern in accounts if fnmatch.fnmatch(field, pattern)]
    if not patterns:
        raise ValueError(f'{name}: {field} of {RECIPES[name].source} is not accounted for')
    return accounts[max(patterns, key=len)]


def _row(name, field, value, account, config):
    """The row of a field; raises ValueError unless our config has the values of the account."""
    our_values = {}
    for our_field, stated in account.ours.items():
        expected = value if stated is SAME else stated
        our_value = config.get(our_field, 'no such field')
        if our_value != expected:
            raise ValueError(
                f'{name}: {our_field} is {our_value!r}: expected {expected!r} by the account of '
                f'{field}'
            )
        is_only_field = len(account.ours) == 1
        if account.relation == 'differs' and is_only_field and our_value == value:
            raise ValueError(
                f'{name}: {our_field} is {value!r} like {field}: expected another value, because '
                'the account is `differs`'
            )
        our_values[our_field] = our_value
    return Row(field, value, account, our_values)


def without_source(name: str) -> dict[str, Any]:
    """Returns the fields of our config that differ from their defaults and are in no account."""
    fields_in_accounts = set()
    for row in rows(name):
        fields_in_accounts.update(row.ours)
    all_fields = config_lib.all_fields()
    changed_fields = {}
    for field, value in config_of(RECIPES[name]).items():
        if field == 'recipe' or field in fields_in_accounts or field not in all_fields:
            continue
        default = all_fields[field].default
        if isinstance(default, tuple):
            default = list(default)
        is_size = field.startswith('model.') and default in (None, [], '')
        if value != default and not is_size:
            changed_fields[field] = value
    return changed_fields


def markdown(name: str) -> str:
    """Returns the table of a recipe."""
    recipe = RECIPES[name]
    lines = [
        f'{name}: configs/{recipe.config.replace(":", ".py:", 1)} and {recipe.source}',
        '',
        "| source's field | its value | ours | relation | note |",
        '|---|---|---|---|---|',
    ]
    for row in rows(name):
        ours = ', '.join(f'{field}={value}' for field, value in row.ours.items())
        cells = [row.field, str(row.value), ours or '-', row.account.relation, row.account.note]
        lines.append('| ' + ' | '.join(cell.replace('|', r'\|') for cell in cells) + ' |')
    others = ', '.join(f'{field}={value}' for field, value in without_source(name).items())
    lines += ['', f'Fields that the source does not have: {others or "none"}']
    return '\n'.join(lines) + '\n'
