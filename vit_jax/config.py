"""Configs of runs: made from the table of fields, changed, checked, compared.

A file in configs/ takes `base()` and overrides what its recipe needs. The fields are in
config_fields.py, those of the model beside the code that reads them: models/vit.py, encoder.py and
resnet.py. Nothing else has defaults.
"""

import copy
import dataclasses
import fnmatch
import logging
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections
from flax import traverse_util

from vit_jax import fields, models
from vit_jax.config_fields import ALIASES, EVALUATOR_FIELDS, FIELDS
from vit_jax.errors import UserError, nearest_names, some
from vit_jax.models import masked
from vit_jax.models.vit import as_pair

log = logging.getLogger(__name__)

PER_MACHINE = [f'model.{field}' for field in models.PER_MACHINE]
# A run may continue with other values of these; every other field decides the result.
# Of these model.linear_kernel decides which numbers dropout draws.
MAY_DIFFER = (
    'recipe',
    'report',
    'num_steps',
    'num_epochs',
    '*_every',
    'keep_*',
    'best_metric',
    'patience',
    'mesh.*',
    *PER_MACHINE,
    'evals.*',
    'dataset.*_dir',
    'dataset.max_broken_fraction',
    'trackers',
    'transfer.take',  # the values that were taken are compared themselves
    'teacher.weights',
)  # so is teacher.checksum

# A run keeps the values that it began with when a later version has others. By dotted field:
# the value that reproduces a run which does not record the field, because the field is newer;
UNRECORDED: dict[str, Any] = {
    'dataset.stratify': False,
    'preprocess.uint8_resize': False,
}
# and pairs of a recipe's value in an earlier version and its value now, as JSON has them.
CHANGED_VALUES: dict[str, list[tuple[Any, Any]]] = {
    # The recipes have their sources' sizes since then.
    'dataset.shuffle_buffer': [(16_384, 250_000), (16_384, 200_000), (16_384, 50_000)],
    # ImageNet-21k: half of the held-out images are for the end, as in big_vision.
    'dataset.eval_split': [('train[:51200]', 'train[25600:51200]')],
    'dataset.test_split': [('', 'train[:25600]')],
    # Of configs/finetune.py and configs/bit.py for a directory.
    'preprocess.antialias': [(False, True)],
    'preprocess.uint8_resize': [(False, True)],
}

_PILLOW_FILTERS = 'which needs an antialiased filter: bilinear, bicubic or lanczos3.'


def base(model: str = 'b16') -> ml_collections.ConfigDict:
    """Every field with its value in FIELDS, and those of a model of variants.names()."""
    defaults = {name: field.default for name, field in FIELDS.items()}
    return ml_collections.ConfigDict(
        traverse_util.unflatten_dict(defaults, sep='.') | {'model': models.fields(model)}
    )


def meant(name: str, known: Collection[str]) -> str | None:
    """The field that has another name elsewhere, or that stands in a section; None if unknown."""
    field = ALIASES.get(name.rpartition('.')[-1])
    in_sections = [x for x in known if x.endswith(f'.{name}')]
    return field if field in known else in_sections[0] if len(in_sections) == 1 else None


def no_field(name: str, known: Collection[str], whose: str = 'this config') -> str:
    """What to say of a field that is none of the known."""
    field = meant(name, known)
    nearest = f'Did you mean {field}? ' if field else nearest_names(name, known)
    return f'{whose} has no field {name!r}. {nearest}All fields: docs/config.md.'


def all_fields() -> dict[str, fields.Field]:
    """The fields of configs of all kinds of models."""
    return FIELDS | {
        name: field for table in models.tables().values() for name, field in table.items()
    }


def parse_value(field: str, text: str, known: Collection[str]) -> Any:
    """The value that a text has for a field, which need not be a possible one.

    Args:
      field: dotted name.
      text: as on the command line.
      known: the fields of the config.

    Raises UserError if the config has no such field, or the text no such value.
    """
    declared = field_named(field)
    if field not in known or declared is None:
        raise UserError(no_field(field, known))
    return fields.parse(field, declared.values, text)


def evaluator_names(config: Mapping[str, Any] | ml_collections.ConfigDict) -> list[str]:
    """The names of the further evaluators of a config: the sections of `evals` but fewshot."""
    return [name for name in config['evals'] if name != 'fewshot']


def evaluator_fields(name: str) -> dict[str, fields.Field]:
    """The fields of the section of one further evaluator, by dotted name."""
    return {f'evals.{name}.{field}': about for field, about in EVALUATOR_FIELDS.items()}


def field_named(name: str) -> fields.Field | None:
    """The field of that dotted name, also of a further evaluator; None if there is none."""
    section, _, field = name.rpartition('.')
    if re.fullmatch(r'evals\.\w+', section) and section != 'evals.fewshot':
        return EVALUATOR_FIELDS.get(field)
    return all_fields().get(name)


def complete_evaluators(config: ml_collections.ConfigDict, names: Collection[str] = ()) -> None:
    """Gives each further evaluator of a config, and those of `names`, all of their fields."""
    defaults = {field: about.default for field, about in EVALUATOR_FIELDS.items()}
    with config.unlocked():
        for name in dict.fromkeys([*evaluator_names(config), *names]):
            given = config.evals.get(name, {})
            if isinstance(given, Mapping | ml_collections.ConfigDict):
                config.evals[name] = defaults | dict(given)


def help_text() -> str:
    """Every field with its meaning, for --help."""
    return '\n\n'.join(
        [
            'fields of the config (a file of configs/ sets some of them):\n' + fields.text(FIELDS),
            'of each further evaluator, by any NAME:\n' + fields.text(evaluator_fields('NAME')),
            *(
                f'of the model, for {models_of}:\n{fields.text(table)}'
                for models_of, table in models.tables().items()
            ),
        ]
    )


def markdown() -> str:
    """docs/config.md: `python -m vit_jax.config > docs/config.md` writes it."""
    lines = [
        '# Every field of a config',
        '',
        'Written by `python -m vit_jax.config > docs/config.md` from the tables that configs '
        'are checked by.',
        'A field is set by `--config.FIELD=VALUE`, once, or in a file of `configs/`. Numbers that '
        'are not whole are',
        f'0 or of a size from {fields.SMALLEST:g} to {fields.LARGEST:g}, with which float32 can '
        'compute.',
        '',
        *fields.markdown(FIELDS),
    ]
    lines += ['', '## A further evaluator, by any NAME', '']
    lines += fields.markdown(evaluator_fields('NAME'))
    for models_of, table in models.tables().items():
        lines += ['', f'## The model: {models_of}', '', *fields.markdown(table)]
    return '\n'.join(lines) + '\n'


def changed(
    config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """A copy of a config with other values of some dotted fields."""
    config = ml_collections.ConfigDict(config).copy_and_resolve_references()
    config.update_from_flattened_dict(values)
    return config


def with_values(
    config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """A copy with other values of some dotted fields, which fields that refer to them have, too."""
    config = copy.deepcopy(config)
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(values)
    return config


def with_values_read(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """A copy in which each field has the form that its declaration gives to the value.

    Lists of texts become tuples of texts without commas. Fields that are not declared stay. Further
    evaluators have all of their fields.
    """
    config = ml_collections.ConfigDict(config).copy_and_resolve_references()
    complete_evaluators(config)
    given = traverse_util.flatten_dict(config.to_dict(), sep='.')
    values = {}
    for name, value in given.items():
        field = field_named(name)
        if field is not None:
            values[name] = field.values.normalize(value)
    changes = {name: value for name, value in values.items() if value != given[name]}
    with config.ignore_type():  # a text becomes a tuple
        config.update_from_flattened_dict(changes)
    return config


def final(config: ml_collections.ConfigDict, split: str, seed: int) -> ml_collections.ConfigDict:
    """That of a run on a split which is scored on dataset.test_split once, at its end."""
    return changed(
        config,
        {
            'seed': seed,
            'dataset.train_split': split,
            'dataset.num_examples': 0,  # the config may state that of a part
            'dataset.eval_split': config.dataset.test_split,
            'dataset.final_split': '',  # a run has nothing to do with it
            'eval_every': 0,
            'keep_best': False,
            'patience': 0,
        },
    )


def check_fields(config: ml_collections.ConfigDict, whose: str = 'this config') -> None:
    """Raises UserError unless it has all fields of `base`, for such a model, and no others."""
    given = flatten(config)
    resnet = any(x.startswith('model.resnet') and given[x] is not None for x in given)
    kind = 'b16' if not resnet else 'r50_b16' if 'model.hidden_size' in given else 'r50x1'
    needed = flatten(base(kind))
    further: dict[str, fields.Field] = {}
    for evaluator in evaluator_names(config) if 'evals' in config else ():
        further |= evaluator_fields(evaluator)
    for name in given:  # of what should be a section, and is not, fields are lacking
        if name in further:
            continue
        if name not in needed and not any(x.startswith(f'{name}.') for x in needed):
            raise UserError(no_field(name, needed | further, whose))
    if lacking := [name for name in needed if name not in given]:
        raise UserError(
            f'{whose} lacks {some(lacking, 3)}: start from '
            'vit_jax.config.base() and change fields of it, of a whole section by '
            'config.SECTION.update(FIELD=VALUE).'
        )


def checked(
    config: ml_collections.ConfigDict, taken: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict:
    """A copy with sizes as pairs; raises UserError if a value is impossible. Reads no data.

    The values in `taken`, by dotted field, replace those of the config.
    """
    check_fields(config)
    config = with_values_read(changed(config, taken or {}))
    with config.unlocked():
        config.image_size = as_pair(config.image_size, 'image_size')
        if 'patch_size' in config.model:
            config.model.patch_size = as_pair(config.model.patch_size, 'model.patch_size')
        if config.transfer.image_size:
            config.transfer.image_size = as_pair(config.transfer.image_size, 'transfer.image_size')
        if config.teacher.image_size:
            config.teacher.image_size = as_pair(config.teacher.image_size, 'teacher.image_size')
    _check(config)
    return config


def _check(config):
    given = flatten(config)
    fields.check({name: x for name, x in all_fields().items() if name in given}, given)
    for name in evaluator_names(config):
        _check_evaluator(name, config.evals[name], given)
    _check_length(config)
    _check_pixels(config)
    model = models.build(config.model, num_classes=1)
    model.grid(config.image_size)
    if config.masked.target != 'none':
        _check_masked(config, model)
    if config.teacher.weights:
        _check_teacher(config)
    if config.model.get('pool') == 'none':
        raise UserError(
            'model.pool is none, which gives logits for every token, and an image has '
            'one label: set model.pool to cls, gap or map.'
        )


def _check_length(config):
    """Raises UserError unless the steps, their batches and their learning rates are possible."""
    optimizer = config.optimizer
    if optimizer.end_learning_rate > 1e30 * optimizer.learning_rate:
        raise UserError(
            f'optimizer.end_learning_rate is {optimizer.end_learning_rate}: expected at '
            f'most 1e30 times optimizer.learning_rate, {optimizer.learning_rate}.'
        )
    if bool(config.num_steps) == bool(config.num_epochs):
        raise UserError(
            f'num_steps is {config.num_steps} and num_epochs is {config.num_epochs}: '
            'set exactly one of them and the other to 0.'
        )
    if config.num_steps:  # the length of epochs is known with the data
        total_steps(config)
    if config.patience and not config.eval_every:
        raise UserError(
            f'patience is {config.patience} and eval_every 0, which evaluates only at '
            'the end: set eval_every to a number of steps, or patience to 0.'
        )
    if config.accum_steps > 0 and config.batch_size % config.accum_steps:
        raise UserError(
            f'batch_size {config.batch_size} is not divisible by accum_steps {config.accum_steps}.'
        )


def _check_pixels(config):
    """Raises UserError unless images can be prepared as the config says."""
    if config.augment.pad > min(config.image_size):
        raise UserError(
            f'augment.pad is {config.augment.pad}: expected at most the side of the '
            f'image, {min(config.image_size)}.'
        )
    size = config.dataset.cache_size
    side = max(config.image_size)
    if size and (size < side or config.dataset.cache == 'none'):
        raise UserError(
            f'dataset.cache_size is {size}: expected 0, or with dataset.cache=disk at '
            f'least the longer side of image_size, {side}.'
        )
    check_uint8_resize(config.preprocess)
    if config.preprocess.uint8_resize and config.augment.resize == 'area':
        raise UserError(
            f'augment.resize is area and preprocess.uint8_resize True, {_PILLOW_FILTERS} Set '
            '--config.preprocess.uint8_resize=False, or another filter.'
        )


def _check_masked(config, model):
    """Raises UserError unless the model can predict hidden patches, without any label."""
    target = config.masked.target
    masked.check(model, target)
    for field, value, off in (
        ('augment.mixup', config.augment.mixup, 0),
        ('loss.class_weights', config.loss.class_weights, '()'),
    ):
        if value:
            raise UserError(
                f'{field} is {value} and masked.target {target}, '
                f"which uses no labels: set '--config.{field}={off}'"
            )


def _check_evaluator(name, section, given):
    """Raises UserError unless a section of `evals` describes an evaluator."""
    if not re.fullmatch(r'[A-Za-z]\w*', name) or name in ('eval', 'train'):
        raise UserError(
            f'evals has {name!r}: expected a name of letters, digits and underscores other than '
            'eval and train, which begin the names of other numbers.'
        )
    fields.check(evaluator_fields(name), given)
    if not section.type:
        raise UserError(
            f"evals.{name}.type is '': expected classification, fewshot, knn, linear_probe or "
            f'PACKAGE.MODULE:FUNCTION. {nearest_names(name, ["fewshot"])}'.strip()
        )


def check_uint8_resize(preprocess: Mapping[str, Any], whose: str = 'this config') -> None:
    """Raises UserError if `preprocess.uint8_resize` is set for filters that Pillow does not have.

    Fields that are missing are as in FIELDS.
    """
    values = {
        name: preprocess.get(name, FIELDS[f'preprocess.{name}'].default)
        for name in ('uint8_resize', 'antialias', 'resize')
    }
    if not values['uint8_resize']:
        return
    for name, wrong in (('antialias', False), ('resize', 'area')):
        if values[name] == wrong:
            raise UserError(
                f'preprocess.{name} is {wrong} and preprocess.uint8_resize True in {whose}, '
                f'{_PILLOW_FILTERS} Set preprocess.uint8_resize=False as well.'
            )


def _check_teacher(config):
    name = f'teacher.weights is {config.teacher.weights!r}'
    if config.masked.target != 'none':
        raise UserError(
            f'{name} and masked.target {config.masked.target}: a teacher '
            'knows classes, which are not predicted then. Leave out one of them.'
        )
    if config.loss.name != 'softmax':
        raise UserError(
            f'{name} and loss.name {config.loss.name}: distillation compares '
            'probabilities that sum to one. Set loss.name=softmax.'
        )
    if config.teacher.share == 1 and config.loss.class_weights:
        raise UserError(
            f'{name} and teacher.share 1: labels, for which loss.class_weights are, '
            'are not used. Lower teacher.share, or leave out the weights.'
        )


def default_log_every(num_steps: int) -> int:
    """A twentieth of the run, so that a short one has a curve, and at most 100 steps."""
    return min(max(num_steps // 20, 1), 100)


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Training steps of a complete config; the one place where durations become steps.

    Raises UserError when there are none, too many to count, or no more than those of the warm-up.
    """
    steps = config.num_steps or round(
        config.num_epochs * config.dataset.num_examples / config.batch_size
    )
    if not 1 <= steps <= fields.MOST:
        raise UserError(
            f'num_epochs {config.num_epochs} of {config.dataset.num_examples} images '
            f'in batches of {config.batch_size} are {steps} steps: expected at least '
            f'1 and at most {fields.MOST:,}.'
        )
    if config.optimizer.warmup_steps >= steps:
        raise UserError(
            f'optimizer.warmup_steps is {config.optimizer.warmup_steps} but the run '
            f'has {steps} steps in all: train longer, or warm up for less, as in '
            f'--config.optimizer.warmup_steps={steps // 10}'
        )
    if config.optimizer.warmup_steps + config.optimizer.cooldown_steps > steps:
        raise UserError(
            f'optimizer.cooldown_steps is {config.optimizer.cooldown_steps}, and the '
            f'run of {steps} steps has {steps - config.optimizer.warmup_steps} after '
            'its warm-up: expected at most these.'
        )
    return steps


def flatten(config: Mapping | ml_collections.ConfigDict) -> dict[str, Any]:
    """{'model.hidden_size': 768, ...} with tuples as lists, as JSON has them."""
    nested = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    return {
        field: list(value) if isinstance(value, tuple) else value
        for field, value in traverse_util.flatten_dict(nested, sep='.').items()
    }


def check_recorded(config: Mapping[str, Any], path: str) -> None:
    """Raises UserError if what a run has recorded of its data, loss and choices cannot be.

    `path` is that of the file. Fields that are newer than the run are missing.
    """
    values = {
        name: value
        for name, value in flatten(dict(config)).items()
        if name.partition('.')[0] in ('dataset', 'preprocess', 'loss', 'masked', 'model')
        or name in ('accum_steps', 'image_size', 'log_every', 'mesh.host_devices')
    }
    if values.get('model.resnet', '') is None:  # a transformer on patches of pixels
        del values['model.resnet']
    known = all_fields()
    try:
        _check_sizes_recorded(values)
        for name in values:
            if name not in known:
                raise UserError(
                    f'{name} is no field. {nearest_names(name, known)}', kind='unknown', field=name
                )
        fields.check({name: known[name] for name in values}, values, recorded=True)
    except UserError as error:
        raise UserError(
            f'{path}: {str(error).strip()} Restore the file.',
            kind=error.kind,
            file=path,
            field=error.field,
            value=error.value,
        ) from error


def _check_sizes_recorded(values):
    """Raises UserError if a transformer, which has no default sizes, does not state one."""
    if 'model.resnet.units' in values and 'model.hidden_size' not in values:
        return  # a ResNet
    lacking = [
        name
        for name, field in models.tables()['transformers'].items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    if lacking:
        raise UserError(f'it lacks {some(lacking)}.')


def of_weights(config: Mapping | ml_collections.ConfigDict) -> dict[str, Any]:
    """The fields without which the parameters of a run cannot be used, by dotted name.

    The shapes of arrays do not show all of them.
    """
    return {
        name: value
        for name, value in flatten(config).items()
        if (name.partition('.')[0] in ('model', 'preprocess') and name not in PER_MACHINE)
        or name in ('image_size', 'loss.name', 'masked.target', 'dataset.num_classes')
    }


def with_unrecorded(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded config of a run, with the fields of UNRECORDED that it lacks.

    A section that the run does not record at all stays missing.
    """
    completed = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in recorded.items()
    }
    for field, value in UNRECORDED.items():
        section, _, name = field.rpartition('.')
        if section in completed:
            completed[section].setdefault(name, value)
    return completed


def as_begun(
    config: ml_collections.ConfigDict, recorded: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """A copy of the config that resumes a run of an earlier version with the values of that run.

    Args:
      config: from the file and the command line.
      recorded: the config in the workdir, from `with_unrecorded`.

    A field of UNRECORDED or CHANGED_VALUES takes the recorded value if the config has the value
    that is the default or the recipe's now. Each such field is logged.
    """
    old = flatten(dict(recorded))
    new = flatten(config)
    defaults = flatten(base())
    values = {}
    for field in UNRECORDED.keys() | CHANGED_VALUES.keys():
        if field not in old or field not in new or old[field] == new[field]:
            continue
        pairs = [*CHANGED_VALUES.get(field, [])]
        if field in UNRECORDED:
            pairs.append((UNRECORDED[field], defaults[field]))
        if (old[field], new[field]) in pairs:
            values[field] = tuple(old[field]) if isinstance(old[field], list) else old[field]
            log.info(
                '%s stays %s, with which this run began; it is %s in new runs',
                field,
                old[field],
                new[field],
            )
    values |= _decay_names_as_begun(old, new)
    return changed(config, values)


def _decay_names_as_begun(old, new):
    """{field: value} for a run of an earlier version, which took 'kernel,bias' as one name."""
    field = 'optimizer.decay_names'
    begun_with = tuple(old.get(field, new[field]))
    now = tuple(new[field])
    if begun_with == now or fields.split_at_commas(begun_with) != now:
        return {}
    log.warning(
        '%s stays %s, as this run began: these names match no parameter, so nothing decays. '
        'A new run reads commas as the ends of names',
        field,
        list(begun_with),
    )
    return {field: begun_with}


def differences(old, new) -> list[str]:
    """Fields of two configs that differ and must not if a run is to continue, one line each."""
    old, new = flatten(old), flatten(new)
    defaults = flatten(base('r50x1')) | flatten(base())
    old = {k: v for k, v in defaults.items() if k in new} | old  # a field newer than the run
    lines = []
    for field in sorted(old.keys() | new.keys()):
        a, b = old.get(field, 'absent'), new.get(field, 'absent')
        moved = field in ('dataset.name', 'pretrained') and may_have_moved(a, b)
        chosen = field == 'accum_steps' and b in (-1, 0)  # which keeps what was chosen first
        if a != b and not (moved or chosen or any(fnmatch.fnmatch(field, p) for p in MAY_DIFFER)):
            lines.append(f'{field}: {a!r} in the workdir, {b!r} now')
    return lines


def may_have_moved(a: str, b: str) -> bool:
    """A directory that has moved keeps its name, which '.' has too; a TFDS name is its own."""
    return bool(a and b) and os.path.basename(os.path.abspath(a)) == (
        os.path.basename(os.path.abspath(b))
    )


if __name__ == '__main__':
    print(markdown(), end='')
