"""The fields of a run: defaults, checks, and which of them may change when a run continues.

A file in configs/ takes `base()` and overrides what its recipe needs. Nothing else has defaults.
"""

import fnmatch
import os
from collections.abc import Mapping
from typing import Any

import ml_collections
from flax import traverse_util

from vit_jax import models
from vit_jax.errors import UserError, check_at_least, check_choice, check_rate
from vit_jax.models.vit import as_pair

# A run may continue with other values of these; every other field decides the result.
MAY_DIFFER = ('recipe', 'num_steps', 'num_epochs', '*_every', 'keep_*', 'mesh.*', 'model.unroll',
              'model.remat_policy', 'dataset.data_dir', 'dataset.max_broken_fraction')

CHOICES = {
    'loss.name': ('softmax', 'sigmoid'),
    'optimizer.name': ('adam', 'sgd'),
    'optimizer.schedule': ('cosine', 'linear', 'constant'),
    'augment.crop': ('inception', 'pad', 'none'),
    'transfer.position_resize': ('bilinear', 'bicubic'),
    'preprocess.resize': ('bilinear', 'bicubic', 'lanczos3'),
}
LEAST = {'batch_size': 1, 'log_every': 1, 'keep_checkpoints': 1, 'accum_steps': 0,
         'dataset.shuffle_buffer': 1, 'dataset.files_at_once': 1, 'augment.pad': 0,
         'optimizer.warmup_steps': 0}
RATES = ('optimizer.b1', 'optimizer.b2', 'optimizer.momentum')  # at least 0 and below 1


def base(model: str = 'b16') -> ml_collections.ConfigDict:
    """Every field with a neutral value. Sizes are (height, width) in pixels; 0 switches off.

    The name of a model, one of variants.names(), decides which fields `config.model` has.
    """
    return ml_collections.ConfigDict(dict(
        recipe='',  # where the numbers come from; logged at start
        seed=0,
        batch_size=4096,  # over all devices
        accum_steps=1,  # gradient accumulation; 0: the fewest that fit in device memory
        num_steps=0,  # either this
        num_epochs=0.0,  # or this
        image_size=(224, 224),
        dataset=dict(
            name='imagenet2012',  # a TFDS name, a directory of SPLIT/CLASS/images, or 'digits'
            data_dir='',  # where TFDS sets are; '' is TFDS's own default
            train_split='train',
            eval_split='validation',  # '': val, valid or validation of a directory, else a tenth
            test_split='',  # scored once at the end by vit_jax.sweep
            num_examples=0,  # of train_split; 0: ask the data
            num_classes=0,  # 0: ask the data
            max_broken_fraction=0.01,  # more unreadable images than this stop the run
            shuffle_buffer=16_384,  # sequential TFDS files: examples mixed with each other
            files_at_once=16,  # sequential TFDS files: how many are read interleaved
        ),
        augment=dict(
            crop='inception',  # 'inception' | 'pad' and random crop | 'none'
            min_area=0.05,  # inception: smallest share of the image
            pad=0,  # pad: pixels on each side
            flip=True,  # left-right
        ),
        preprocess=dict(  # also what evaluation and inference do to an image
            resize='bilinear',
            crop_ratio=0.875,  # central crop, share of the resized short side
            mean=(0.5, 0.5, 0.5),  # of values in [0, 1]
            std=(0.5, 0.5, 0.5),
        ),
        pretrained='',  # weights to start from: a file, a workdir, hf:ORG/NAME, timm:NAME
        transfer=dict(  # how pretrained weights are fitted to the model
            take=(),  # fields of this config whose values come from the weights
            position_resize='bilinear',  # as in the paper's code | 'bicubic' antialiased as in timm
            resize_patches=False,  # to another patch size (FlexiViT, arXiv 2212.08013)
        ),
        model=models.fields(model),  # each with its meaning: models/vit.py, models/resnet.py
        loss=dict(name='softmax', label_smoothing=0.0),
        optimizer=dict(
            name='adam',  # 'adam' | 'sgd'
            learning_rate=1e-3,  # peak
            b1=0.9,
            b2=0.999,
            momentum=0.9,  # sgd
            weight_decay=0.0,  # decoupled, multiplied by the learning rate
            decay_names=('kernel',),  # parameters of these names decay
            clip_norm=0.0,  # of the global gradient norm
            lr_factors='',  # REGEX=FACTOR,... of parameter paths, the first that fits; 0 freezes
            schedule='cosine',  # 'cosine' | 'linear' | 'constant', after the warm-up
            warmup_steps=0,
            end_learning_rate=0.0,
        ),
        ema_decay=0.0,  # Polyak averaging; evaluation then uses the average
        mesh=dict(  # devices per axis; -1 takes what is left
            data=-1,  # each device has other examples
            fsdp=1,  # the same, and parameters, gradients and optimizer state are split
            tensor=1,  # attention heads and MLPs are split
        ),
        log_every=100,  # in steps, as all of these
        eval_every=5000,
        checkpoint_every=1000,
        keep_checkpoints=2,  # the newest ones
        keep_best=False,  # also the one of the highest eval/accuracy
    ))


def changed(config: ml_collections.ConfigDict, fields: Mapping[str, Any]
            ) -> ml_collections.ConfigDict:
    """A copy of a config with other values of some dotted fields."""
    config = ml_collections.ConfigDict(config).copy_and_resolve_references()
    config.update_from_flattened_dict(fields)
    return config


def checked(config: ml_collections.ConfigDict, taken: Mapping[str, Any] | None = None
            ) -> ml_collections.ConfigDict:
    """A copy with sizes as pairs; raises UserError if a value is impossible. Reads no data.

    The values in `taken`, by dotted field, replace those of the config.
    """
    config = changed(config, taken or {})
    with config.unlocked():
        config.image_size = as_pair(config.image_size, 'image_size')
        if 'patch_size' in config.model:
            config.model.patch_size = as_pair(config.model.patch_size, 'model.patch_size')
    _check(config)
    return config


def _check(config):
    values = flatten(config)
    for field, valid in CHOICES.items():
        check_choice(field, values[field], valid)
    if bool(config.num_steps) == bool(config.num_epochs):
        raise UserError(f'num_steps is {config.num_steps} and num_epochs is {config.num_epochs}: '
                        'set exactly one of them and the other to 0.')
    for field, least in LEAST.items():
        check_at_least(field, values[field], least)
    for field in RATES:
        check_rate(field, values[field])
    if config.optimizer.learning_rate <= 0:
        raise UserError(f'optimizer.learning_rate is {config.optimizer.learning_rate}: expected '
                        'more than 0.')
    if not 0 <= (config.ema_decay or 0) <= 1:
        raise UserError(f'ema_decay is {config.ema_decay}: expected at least 0, which means no '
                        'average, and at most 1, as in 0.999.')
    if config.augment.pad > min(config.image_size):
        raise UserError(f'augment.pad is {config.augment.pad}: expected at most the side of the '
                        f'image, {min(config.image_size)}.')
    models.build(config.model, num_classes=1).grid(config.image_size)
    if config.model.get('pool') == 'none':
        raise UserError('model.pool is none, which gives logits for every token, and an image has '
                        'one label: set model.pool to cls, gap or map.')
    if config.accum_steps and config.batch_size % config.accum_steps:
        raise UserError(f'batch_size {config.batch_size} is not divisible by accum_steps '
                        f'{config.accum_steps}.')


def complete(config: ml_collections.ConfigDict, num_examples: int, num_classes: int,
             accum_steps: int = 0) -> ml_collections.FrozenConfigDict:
    """The immutable config of a run: one from `checked`, with the numbers of its data.

    `num_examples` is counted in the training split. `accum_steps`, which a continued run has
    chosen, is used where the config leaves the choice.
    """
    config = config.copy_and_resolve_references()
    for name, found in (('num_examples', num_examples), ('num_classes', num_classes)):
        stated = config.dataset[name]
        if stated not in (0, found):
            raise UserError(
                f'dataset.{name} is {stated} in the config but {config.dataset.name!r} has '
                f'{found}. If the data is right, add --config.dataset.{name}={found}')
        config.dataset[name] = found
    config.accum_steps = config.accum_steps or accum_steps
    return ml_collections.FrozenConfigDict(config)


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Training steps of a complete config; the one place where durations become steps.

    Raises UserError when the warm-up is not shorter than the run.
    """
    steps = config.num_steps or round(
        config.num_epochs * config.dataset.num_examples / config.batch_size)
    if config.optimizer.warmup_steps >= steps:
        raise UserError(f'optimizer.warmup_steps is {config.optimizer.warmup_steps} but the run '
                        f'has {steps} steps in all: train longer or warm up for less.')
    return steps


def flatten(config: Mapping | ml_collections.ConfigDict) -> dict[str, Any]:
    """{'model.hidden_size': 768, ...} with tuples as lists, as JSON has them."""
    nested = config if isinstance(config, dict) else config.to_dict()
    return {field: list(value) if isinstance(value, tuple) else value
            for field, value in traverse_util.flatten_dict(nested, sep='.').items()}


def differences(old, new) -> list[str]:
    """Fields of two configs that differ and must not if a run is to continue, one line each."""
    old, new = flatten(old), flatten(new)
    old = {k: v for k, v in flatten(base()).items() if k in new} | old  # a field newer than the run
    lines = []
    for field in sorted(old.keys() | new.keys()):
        a, b = old.get(field, 'absent'), new.get(field, 'absent')
        # A directory that has moved keeps its name; a TFDS name is its own base name.
        moved = field in ('dataset.name', 'pretrained') and (
            os.path.basename(os.path.normpath(a)) == os.path.basename(os.path.normpath(b)))
        chosen = field == 'accum_steps' and b == 0  # 'automatic' keeps what was chosen first
        if a != b and not (moved or chosen or any(fnmatch.fnmatch(field, p) for p in MAY_DIFFER)):
            lines.append(f'{field}: {a!r} in the workdir, {b!r} now')
    return lines
