"""The fields of a run: defaults, values, meanings, and which may change when a run continues.

A file in configs/ takes `base()` and overrides what its recipe needs. Nothing else has defaults.
Those of the model stand beside the code that reads them: models/vit.py, encoder.py and resnet.py.
"""

import fnmatch
import os
from collections.abc import Mapping
from typing import Any

import ml_collections
from flax import traverse_util

from vit_jax import fields, models
from vit_jax.errors import UserError
from vit_jax.fields import RATE, SIDES, SWITCH, TEXT, TEXTS, Field, number, one_of, several, whole
from vit_jax.models import representation
from vit_jax.models.vit import as_pair

# A run may continue with other values of these; every other field decides the result.
MAY_DIFFER = ('recipe', 'num_steps', 'num_epochs', '*_every', 'keep_*', 'mesh.*', 'model.unroll',
              'model.remat_policy', 'evals.*', 'dataset.data_dir', 'dataset.max_broken_fraction',
              'transfer.take')  # the values that were taken are compared themselves

FIELDS = {  # by dotted name: the neutral value, the possible ones, the meaning
    'recipe': Field('', TEXT, 'where the numbers come from; logged at the start'),
    'seed': Field(0, whole(-2**63, 2**63 - 1)._replace(words='a whole number of 64 bits'),
                  'of parameters, order of images, crops and dropout'),
    'batch_size': Field(4096, whole(1), 'images of a step, over all devices'),
    'accum_steps': Field(1, whole(0), 'parts of a batch that are computed one after another '
                         '(gradient accumulation); 0: the fewest that fit in memory'),
    'num_steps': Field(0, whole(0), 'length of the run: either this'),
    'num_epochs': Field(0.0, number(least=0), 'or this; the other is 0'),
    'image_size': Field((224, 224), SIDES, 'height and width in pixels'),

    'dataset.name': Field('imagenet2012', TEXT,
                          "a TFDS name, a directory of SPLIT/CLASS/images, or 'digits'"),
    'dataset.data_dir': Field('', TEXT, "where TFDS sets are; empty: TFDS's own default"),
    'dataset.label': Field('', TEXT, 'of a TFDS set: a feature that is a class, as label_azimuth; '
                           'FEATURE/N, its classes merged to N groups; or clevr_count, '
                           'clevr_distance, kitti_distance, kitti_object_distance; empty: the '
                           "set's own"),
    'dataset.train_split': Field('train', TEXT, 'as in train or train[:90%]'),
    'dataset.eval_split': Field('validation', TEXT, 'scored during training; empty: the folder '
                                'val, valid or validation of a directory, else a tenth of train'),
    'dataset.test_split': Field('', TEXT, 'scored once at the end by vit_jax.sweep'),
    'dataset.final_split': Field('', TEXT, 'what vit_jax.sweep trains the winner on; empty: all of '
                                 'the split of which train_split is a part'),
    'dataset.num_examples': Field(0, whole(0), 'of train_split; 0: ask the data'),
    'dataset.num_classes': Field(0, whole(0), '0: ask the data'),
    'dataset.multi_label': Field(False, SWITCH, 'any number of labels for an image, which needs '
                                 'the loss sigmoid; False: ask the data'),
    'dataset.max_broken_fraction': Field(0.01, number(least=0, most=1),
                                         'more unreadable images than this stop the run'),
    'dataset.shuffle_buffer': Field(16_384, whole(1),
                                    'sequential TFDS files: examples mixed with each other'),
    'dataset.files_at_once': Field(16, whole(1),
                                   'sequential TFDS files: how many are read interleaved'),

    'augment.crop': Field('inception', one_of('inception', 'pad', 'resize', 'none'),
                          'inception: a random part, pad: the padded image moved at random, '
                          'resize: a random part of the squashed image, none: the whole image'),
    'augment.min_area': Field(0.05, number(above=0, most=1),
                              'inception: smallest share of the image'),
    'augment.pad': Field(0, whole(0), 'pad: pixels on each side'),
    'augment.crop_ratio': Field(0.9375, number(least=0.01, most=1),
                                'resize: share of the sides that is cut out; BiT takes 480 px of '
                                '512 and 128 of 160'),
    'augment.flip': Field(True, SWITCH, 'left-right, of every second image at random'),

    'preprocess.fit': Field('cover', one_of('cover', 'squash', 'torchvision', 'transformers'),
                            'evaluation and prediction: the short side is resized and the middle '
                            'cut out, as in big_vision; the whole is squashed to the size, as in '
                            'vision_transformer; as cover, with the rounding of those'),
    'preprocess.crop_ratio': Field(0.875, number(least=0.01, most=1),
                                   'central crop, share of the resized side'),
    'preprocess.resize': Field('bilinear', one_of('bilinear', 'bicubic', 'lanczos3'),
                               'the filter; this and the following are for training, too'),
    'preprocess.antialias': Field(True, SWITCH,
                                  'average over all pixels of a larger image; '
                                  'vision_transformer and big_vision do not'),
    'preprocess.mean': Field((0.5, 0.5, 0.5), several(
        number(0, 1), 'three numbers (red, green, blue) from 0 to 1', 3), 'is subtracted'),
    'preprocess.std': Field((0.5, 0.5, 0.5), several(
        number(least=0.001, most=1), 'three numbers (red, green, blue) from 0.001 to 1', 3),
        'divides what is left'),

    'pretrained': Field('', TEXT,
                        'weights to start from: a file, a workdir, hf:ORG/NAME, timm:NAME'),
    'transfer.take': Field((), TEXTS, 'fields of this config whose values come from the weights'),
    'transfer.position_resize': Field(
        'bilinear', one_of('bilinear', 'bicubic'),
        "of position embeddings: as in the paper's code, or antialiased as in timm"),
    'transfer.resize_patches': Field(
        False, SWITCH, 'to another patch size (FlexiViT, arXiv 2212.08013)'),

    'loss.name': Field('softmax', one_of('softmax', 'sigmoid'), 'of the cross-entropy'),
    'loss.label_smoothing': Field(0.0, RATE, 'share of the label that all classes have in common'),

    'optimizer.name': Field('adam', one_of('adam', 'sgd'), 'the algorithm'),
    'optimizer.learning_rate': Field(1e-3, number(above=0), 'at its peak'),
    'optimizer.b1': Field(0.9, RATE, 'adam: decay of the mean of gradients'),
    'optimizer.b2': Field(0.999, RATE, 'adam: decay of the mean of their squares'),
    'optimizer.momentum': Field(0.9, RATE, 'sgd'),
    'optimizer.weight_decay': Field(0.0, number(least=0),
                                    'decoupled, multiplied by the learning rate'),
    'optimizer.decay_names': Field(('kernel',), TEXTS, 'parameters of these names decay'),
    'optimizer.clip_norm': Field(0.0, number(least=0), 'of the global gradient norm; 0: none'),
    'optimizer.lr_factors': Field(
        '', TEXT, 'REGEX=FACTOR,... of parameter paths, the first that fits; 0 freezes'),
    'optimizer.schedule': Field('cosine', one_of('cosine', 'linear', 'constant'),
                                'of the learning rate after the warm-up'),
    'optimizer.warmup_steps': Field(0, whole(0), 'in which the learning rate rises from 0'),
    'optimizer.end_learning_rate': Field(0.0, number(least=0), 'at the last step'),
    'ema_decay': Field(0.0, number(least=0, most=1), 'Polyak averaging, as in 0.999; evaluation '
                       'then uses the average; 0: none'),

    'mesh.data': Field(-1, whole(1, or_else=-1), 'devices that have other examples; -1: the rest'),
    'mesh.fsdp': Field(1, whole(1, or_else=-1), 'the same, and parameters, gradients and optimizer '
                       'state are split'),
    'mesh.tensor': Field(1, whole(1, or_else=-1),
                         'devices over which attention heads and MLPs are split'),

    'evals.fewshot.shots': Field((), several(
        whole(1), 'whole numbers, at least 1, with commas between them, as in 1,5,10'),
        'few-shot accuracy (section 4.1) at every evaluation, with so many examples of each '
        'class; empty: none'),
    'evals.fewshot.seeds': Field(3, whole(1), 'how often they are drawn; the mean is logged'),
    'evals.fewshot.l2': Field(1024.0, number(above=0), 'regularisation of the least squares'),
    'evals.fewshot.representation': Field('pre_logits', one_of(*representation.NAMES),
                                          'features that they are classified by'),
    'evals.fewshot.dataset': Field('', TEXT, "as dataset.name; empty: the run's"),
    'evals.fewshot.train_split': Field('', TEXT, 'where they are drawn; features of all of it are '
                                       "computed each time; empty: the run's"),
    'evals.fewshot.test_split': Field('', TEXT, "scored; empty: the run's dataset.eval_split"),

    'log_every': Field(100, whole(1), 'steps from one line of the log to the next'),
    'eval_every': Field(5000, whole(0), 'steps; 0: only at the end'),
    'checkpoint_every': Field(1000, whole(0), 'steps; 0: only at the end'),
    'keep_checkpoints': Field(2, whole(1), 'the newest ones'),
    'keep_best': Field(False, SWITCH, 'also the checkpoint of the highest eval/accuracy'),
}


def base(model: str = 'b16') -> ml_collections.ConfigDict:
    """Every field with its value in FIELDS, and those of a model of variants.names()."""
    defaults = {name: field.default for name, field in FIELDS.items()}
    return ml_collections.ConfigDict(
        traverse_util.unflatten_dict(defaults, sep='.') | {'model': models.fields(model)})


def all_fields() -> dict[str, fields.Field]:
    """The fields of configs of all kinds of models."""
    return FIELDS | {name: field for table in models.tables().values()
                     for name, field in table.items()}


def help_text() -> str:
    """Every field with its meaning, for --help."""
    return '\n\n'.join([
        'fields of the config (a file of configs/ sets some of them):\n' + fields.text(FIELDS),
        *(f'of the model, for {models_of}:\n{fields.text(table)}'
          for models_of, table in models.tables().items())])


def markdown() -> str:
    """docs/config.md: `python -m vit_jax.config > docs/config.md` writes it."""
    lines = ['# Every field of a config', '',
             'Written by `python -m vit_jax.config > docs/config.md` from the tables that configs '
             'are checked by.',
             'A field is set by `--config.FIELD=VALUE`, or in a file of `configs/`.', '',
             *fields.markdown(FIELDS)]
    for models_of, table in models.tables().items():
        lines += ['', f'## The model: {models_of}', '', *fields.markdown(table)]
    return '\n'.join(lines) + '\n'


def changed(config: ml_collections.ConfigDict, values: Mapping[str, Any]
            ) -> ml_collections.ConfigDict:
    """A copy of a config with other values of some dotted fields."""
    config = ml_collections.ConfigDict(config).copy_and_resolve_references()
    config.update_from_flattened_dict(values)
    return config


def final(config: ml_collections.ConfigDict, split: str, seed: int) -> ml_collections.ConfigDict:
    """That of a run on a split which is scored on dataset.test_split once, at its end."""
    return changed(config, {
        'seed': seed,
        'dataset.train_split': split,
        'dataset.num_examples': 0,  # the config may state that of a part
        'dataset.eval_split': config.dataset.test_split,
        'dataset.final_split': '',  # a run has nothing to do with it
        'eval_every': 0,
        'keep_best': False})


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
    fields.check(FIELDS, flatten(config))
    if bool(config.num_steps) == bool(config.num_epochs):
        raise UserError(f'num_steps is {config.num_steps} and num_epochs is {config.num_epochs}: '
                        'set exactly one of them and the other to 0.')
    if config.num_steps:  # the length of epochs is known with the data
        total_steps(config)
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
             multi_label: bool = False, accum_steps: int = 0) -> ml_collections.FrozenConfigDict:
    """The immutable config of a run: one from `checked`, with what is known of its data.

    `num_examples` is counted in the training split. `accum_steps`, which a continued run has
    chosen, is used where the config leaves the choice.
    """
    config = config.copy_and_resolve_references()
    for name, found in (('num_examples', num_examples), ('num_classes', num_classes),
                        ('multi_label', multi_label)):
        stated = config.dataset[name]
        if stated not in (0, found):
            raise UserError(
                f'dataset.{name} is {stated} in the config but {config.dataset.name!r} has '
                f'{found}. If the data is right, add --config.dataset.{name}={found}')
        config.dataset[name] = found
    if multi_label and config.loss.name != 'sigmoid':
        raise UserError(f'loss.name is {config.loss.name}, whose targets sum to one, and the '
                        f'images of {config.dataset.name!r} have several labels: add '
                        '--config.loss.name=sigmoid')
    config.accum_steps = config.accum_steps or accum_steps
    return ml_collections.FrozenConfigDict(config)


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Training steps of a complete config; the one place where durations become steps.

    Raises UserError when there are none, too many to count, or no more than those of the warm-up.
    """
    steps = config.num_steps or round(
        config.num_epochs * config.dataset.num_examples / config.batch_size)
    if not 1 <= steps <= fields.MOST:
        raise UserError(f'num_epochs {config.num_epochs} of {config.dataset.num_examples} images '
                        f'in batches of {config.batch_size} are {steps} steps: expected at least '
                        f'1 and at most {fields.MOST:,}.')
    if config.optimizer.warmup_steps >= steps:
        raise UserError(f'optimizer.warmup_steps is {config.optimizer.warmup_steps} but the run '
                        f'has {steps} steps in all: train longer, or warm up for less, as in '
                        f'--config.optimizer.warmup_steps={steps // 10}')
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


if __name__ == '__main__':
    print(markdown(), end='')
