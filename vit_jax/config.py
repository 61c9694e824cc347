"""Configs of runs: builds them from the table of fields, changes, checks and compares them.

A file in configs/ starts from `base()` and overrides some fields. The fields are declared in
config_fields.py, and the fields of the model next to the code that reads them: models/vit.py,
encoder.py and resnet.py. Nothing else has defaults.
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
# A run may resume with other values of these fields; every other field decides the result.
# (model.linear_kernel also decides which random numbers dropout draws.)
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
    'transfer.take',  # the fields that it sets are compared themselves
    'teacher.weights',  # teacher.checksum is compared
)

# A resumed run keeps its values if a later version has other values. UNRECORDED has, for each field
# that earlier versions lack, the value that reproduces their runs.
UNRECORDED: dict[str, Any] = {
    'dataset.stratify': False,
    'dataset.heic': False,
    'preprocess.uint8_resize': False,
}
# CHANGED_VALUES has pairs of a recipe's value in an earlier version and its value now, as JSON
# represents them.
CHANGED_VALUES: dict[str, list[tuple[Any, Any]]] = {
    # The recipes now use the buffer sizes of their sources.
    'dataset.shuffle_buffer': [(16_384, 250_000), (16_384, 200_000), (16_384, 50_000)],
    # ImageNet-21k: half of the held-out images are for the end, as in big_vision.
    'dataset.eval_split': [('train[:51200]', 'train[25600:51200]')],
    'dataset.test_split': [('', 'train[:25600]')],
    # configs/finetune.py and configs/bit.py, for a directory.
    'preprocess.antialias': [(False, True)],
    'preprocess.uint8_resize': [(False, True)],
}

_PILLOW_FILTERS = (
    'rounding as in Pillow needs an antialiased filter (bilinear, bicubic or lanczos3).'
)
# An evaluator cannot have these names, which are prefixes of other numbers in metrics.jsonl.
_RESERVED_EVALUATORS = ('eval', 'train')


def base(model: str = 'b16') -> ml_collections.ConfigDict:
    """Returns a config with the default of every field and the sizes of a model.

    Args:
      model: a name of variants.names().
    """
    defaults = {name: field.default for name, field in FIELDS.items()}
    return ml_collections.ConfigDict(
        traverse_util.unflatten_dict(defaults, sep='.') | {'model': models.fields(model)}
    )


def likely_field(name: str, known: Collection[str]) -> str | None:
    """Returns the field that other code bases call `name`, or that has it in one section only."""
    alias = ALIASES.get(name.rpartition('.')[-1])
    if alias in known:
        return alias
    in_sections = [field for field in known if field.endswith(f'.{name}')]
    if len(in_sections) == 1:
        return in_sections[0]
    return None


def unknown_field(name: str, known: Collection[str], whose: str = 'this config') -> UserError:
    """Returns the error for a field that does not exist; it suggests the nearest known field."""
    field = likely_field(name, known)
    suggestion = nearest_names(name, known)
    if field is not None:
        suggestion = f'Did you mean {field}? '
    return UserError(
        f'{whose} has no field {name!r}. {suggestion}All fields are in docs/reference/config.md.',
        kind='unknown',
        field=name,
    )


def all_fields() -> dict[str, fields.Field]:
    """Returns the fields of the configs of every kind of model, by dotted name."""
    table = dict(FIELDS)
    for fields_of_model in models.tables().values():
        table |= fields_of_model
    return table


def parse_value(field: str, text: str, known: Collection[str]) -> Any:
    """Parses the value of a field; the value is not checked.

    Args:
      field: dotted name.
      text: the text of the value on the command line.
      known: the fields of the config.

    Raises:
      UserError: if the config has no such field, or the text has no value of its type.
    """
    declared = field_named(field)
    if field not in known or declared is None:
        raise unknown_field(field, known)
    return fields.parse(field, declared.values, text)


def evaluator_names(evals: Mapping[str, Any] | ml_collections.ConfigDict) -> list[str]:
    """Returns the names of the additional evaluators: the sections of `evals` except fewshot."""
    return [name for name in evals if name != 'fewshot']


def evaluator_fields(name: str) -> dict[str, fields.Field]:
    """Returns the fields of the section of one additional evaluator, by dotted name."""
    return {f'evals.{name}.{field}': declared for field, declared in EVALUATOR_FIELDS.items()}


def field_named(name: str) -> fields.Field | None:
    """Returns the field of a dotted name, also of an additional evaluator; None if unknown."""
    section, _, field = name.rpartition('.')
    if re.fullmatch(r'evals\.\w+', section) and section != 'evals.fewshot':
        return EVALUATOR_FIELDS.get(field)
    return all_fields().get(name)


def complete_evaluators(config: ml_collections.ConfigDict, names: Collection[str] = ()) -> None:
    """Adds missing fields, with their defaults, to each additional evaluator of a config.

    Args:
      config: the config, which is changed.
      names: further evaluators to add.
    """
    defaults = {field: declared.default for field, declared in EVALUATOR_FIELDS.items()}
    with config.unlocked():
        for name in dict.fromkeys([*evaluator_names(config.evals), *names]):
            section = config.evals.get(name, {})
            if isinstance(section, Mapping | ml_collections.ConfigDict):
                config.evals[name] = defaults | dict(section)


def help_text() -> str:
    """Returns every field with its meaning, for --help."""
    sections = [
        'fields of the config (a file in configs/ sets some of them):\n' + fields.text(FIELDS),
        'fields of each additional evaluator NAME:\n' + fields.text(evaluator_fields('NAME')),
    ]
    for kinds_of_model, table in models.tables().items():
        sections.append(f'fields of the model, for {kinds_of_model}:\n{fields.text(table)}')
    return '\n\n'.join(sections)


def markdown() -> str:
    """Returns the text of docs/reference/config.md, which `python -m vit_jax.config` prints."""
    lines = [
        '# Every field of a config',
        '',
        'This page is for people who change a run. It has every field with its type, default and',
        'its meaning. Set a field once, with `--config.FIELD=VALUE` or in a file of `configs/`.',
        '',
        f'A number that is not whole is 0, or its magnitude is from {fields.SMALLEST:g} to',
        f'{fields.LARGEST:g}, so that float32 can compute with it.',
        '',
        '`python -m vit_jax.config > docs/reference/config.md` writes this page.',
        '',
        *fields.markdown(FIELDS),
    ]
    lines += ['', '## An additional evaluator NAME', '']
    lines += fields.markdown(evaluator_fields('NAME'))
    for kinds_of_model, table in models.tables().items():
        lines += ['', f'## The model: {kinds_of_model}', '', *fields.markdown(table)]
    return '\n'.join(lines) + '\n'


def changed(
    config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """Returns a copy of a config with new values of some dotted fields."""
    config = ml_collections.ConfigDict(config).copy_and_resolve_references()
    config.update_from_flattened_dict(values)
    return config


def with_values(
    config: ml_collections.ConfigDict, values: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """Returns a copy with new values of some dotted fields; references to these fields follow."""
    config = copy.deepcopy(config)
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(values)
    return config


def with_values_read(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns a copy with each value in the form that its field declares.

    Lists of texts become tuples of texts without commas. Undeclared fields stay as they are.
    Additional evaluators get all of their fields.
    """
    config = ml_collections.ConfigDict(config).copy_and_resolve_references()
    complete_evaluators(config)
    changes = {}
    for name, value in traverse_util.flatten_dict(config.to_dict(), sep='.').items():
        field = field_named(name)
        if field is None:
            continue
        normalized = field.values.normalize(value)
        if normalized != value:
            changes[name] = normalized
    with config.ignore_type():  # a text becomes a tuple
        config.update_from_flattened_dict(changes)
    return config


def final(config: ml_collections.ConfigDict, split: str, seed: int) -> ml_collections.ConfigDict:
    """Returns the config of a final run: trained on `split`, scored once on dataset.test_split."""
    return changed(
        config,
        {
            'seed': seed,
            'dataset.train_split': split,
            'dataset.num_examples': 0,  # the config may state the number of a part of the split
            'dataset.eval_split': config.dataset.test_split,
            'dataset.final_split': '',  # only sweeps read it
            'eval_every': 0,
            'keep_best': False,
            'patience': 0,
        },
    )


def check_fields(config: ml_collections.ConfigDict, whose: str = 'this config') -> None:
    """Checks the names of the fields.

    Args:
      config: the config from a config file.
      whose: the owner of the config, for messages.

    Raises:
      UserError: unless the config has exactly the fields of `base` for its kind of model.
    """
    names = flatten(config)
    required = flatten(base(_model_like(names)))
    of_evaluators: dict[str, fields.Field] = {}
    if 'evals' in config:
        for evaluator in evaluator_names(config.evals):
            of_evaluators |= evaluator_fields(evaluator)
    known = required | of_evaluators
    for name in names:
        # A section may be replaced by a single value: its fields are then reported as missing.
        is_section = any(field.startswith(f'{name}.') for field in required)
        if name not in known and not is_section:
            raise unknown_field(name, known, whose)
    missing = [name for name in required if name not in names]
    if missing:
        raise UserError(
            f'{whose} is missing {some(missing, 3)}: start from vit_jax.config.base() and change '
            'its fields, several fields of a section with config.SECTION.update(FIELD=VALUE).',
            kind='missing',
            field=missing[0],
        )


def _model_like(config):
    """Returns the name of a model with the same fields as the model of a flattened config."""
    has_resnet = any(
        name.startswith('model.resnet') and value is not None for name, value in config.items()
    )
    if not has_resnet:
        return 'b16'
    if 'model.hidden_size' in config:
        return 'r50_b16'
    return 'r50x1'


def checked(
    config: ml_collections.ConfigDict, values: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict:
    """Checks a config without reading any data.

    Args:
      config: the config, which is not changed.
      values: values by dotted field that replace values of the config.

    Returns:
      A copy with the values, and with sizes as pairs (height, width).

    Raises:
      UserError: if a value is impossible.
    """
    check_fields(config)
    config = with_values_read(changed(config, values or {}))
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
    values = flatten(config)
    table = {name: field for name, field in all_fields().items() if name in values}
    fields.check(table, values)
    for name in evaluator_names(config.evals):
        _check_evaluator(name, config.evals[name], values)
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
            'model.pool is none: expected cls, gap or map. With none the model returns logits for '
            'every token, but an image has one label.',
            kind='value',
            field='model.pool',
            value='none',
        )


def _check_length(config):
    """Raises UserError unless the steps, their batches and their learning rates are possible."""
    optimizer = config.optimizer
    if optimizer.end_learning_rate > 1e30 * optimizer.learning_rate:
        raise UserError(
            f'optimizer.end_learning_rate is {optimizer.end_learning_rate}: expected at '
            f'most 1e30 times optimizer.learning_rate, {optimizer.learning_rate}.',
            kind='value',
            field='optimizer.end_learning_rate',
            value=optimizer.end_learning_rate,
        )
    if bool(config.num_steps) == bool(config.num_epochs):
        raise UserError(
            f'num_steps is {config.num_steps} and num_epochs is {config.num_epochs}: '
            'set exactly one of them and the other to 0.',
            kind='value',
            field='num_steps',
            value=config.num_steps,
        )
    if config.num_steps:  # the length of an epoch is not known before the data are opened
        total_steps(config)
    if config.patience and not config.eval_every:
        raise UserError(
            f'patience is {config.patience} and eval_every is 0, so the run is evaluated only at '
            'its end: set eval_every to a number of steps, or patience to 0.',
            kind='value',
            field='patience',
            value=config.patience,
        )
    if config.accum_steps > 0 and config.batch_size % config.accum_steps:
        raise UserError(
            f'accum_steps is {config.accum_steps}: expected a divisor of batch_size, '
            f'{config.batch_size}.',
            kind='value',
            field='accum_steps',
            value=config.accum_steps,
        )


def _check_pixels(config):
    """Raises UserError unless images can be prepared as the config describes."""
    shorter_side = min(config.image_size)
    if config.augment.pad > shorter_side:
        raise UserError(
            f'augment.pad is {config.augment.pad}: expected at most the shorter side of '
            f'image_size, {shorter_side}.',
            kind='value',
            field='augment.pad',
            value=config.augment.pad,
        )
    cache_size = config.dataset.cache_size
    longer_side = max(config.image_size)
    if cache_size and (cache_size < longer_side or config.dataset.cache == 'none'):
        raise UserError(
            f'dataset.cache_size is {cache_size}: expected 0, or with dataset.cache=disk at '
            f'least the longer side of image_size, {longer_side}.',
            kind='value',
            field='dataset.cache_size',
            value=cache_size,
        )
    check_uint8_resize(config.preprocess)
    if config.preprocess.uint8_resize and config.augment.resize == 'area':
        raise UserError(
            f'augment.resize is area and preprocess.uint8_resize is True: {_PILLOW_FILTERS} Set '
            '--config.preprocess.uint8_resize=False, or another filter.',
            kind='value',
            field='augment.resize',
            value='area',
        )


def _check_masked(config, model):
    """Raises UserError unless the model can predict masked patches, without any label."""
    target = config.masked.target
    masked.check(model, target)
    for field, value, off in (
        ('augment.mixup', config.augment.mixup, 0),
        ('loss.class_weights', config.loss.class_weights, '()'),
    ):
        if value:
            raise UserError(
                f'{field} is {value} and masked.target is {target}: masked patch prediction uses '
                f"no labels. Set '--config.{field}={off}'",
                kind='value',
                field=field,
                value=value,
            )


def _check_evaluator(name, section, values):
    """Raises UserError unless a section of `evals` describes an evaluator."""
    if not re.fullmatch(r'[A-Za-z]\w*', name) or name in _RESERVED_EVALUATORS:
        raise UserError(
            f'evals has a section {name!r}: expected a name of letters, digits and underscores, '
            'other than eval and train, which are prefixes of other metrics.',
            kind='value',
            field=f'evals.{name}',
            value=name,
        )
    fields.check(evaluator_fields(name), values)
    if not section.type:
        raise UserError(
            f"evals.{name}.type is '': expected classification, fewshot, knn, linear_probe or "
            f'PACKAGE.MODULE:FUNCTION. {nearest_names(name, ["fewshot"])}'.strip(),
            kind='missing',
            field=f'evals.{name}.type',
        )


def check_uint8_resize(preprocess: Mapping[str, Any], whose: str = 'this config') -> None:
    """Checks that Pillow has the filter of a preprocessing record with `uint8_resize`.

    Args:
      preprocess: the fields of the section `preprocess`; missing ones have their defaults.
      whose: the owner of the record, for messages.

    Raises:
      UserError: if `uint8_resize` is set for a filter that Pillow does not have.
    """
    values = {
        name: preprocess.get(name, FIELDS[f'preprocess.{name}'].default)
        for name in ('uint8_resize', 'antialias', 'resize')
    }
    if not values['uint8_resize']:
        return
    for name, impossible in (('antialias', False), ('resize', 'area')):
        if values[name] == impossible:
            raise UserError(
                f'preprocess.{name} is {impossible} and preprocess.uint8_resize is True in '
                f'{whose}: {_PILLOW_FILTERS} Set preprocess.uint8_resize=False as well.',
                kind='value',
                field=f'preprocess.{name}',
                value=impossible,
            )


def _check_teacher(config):
    """Raises UserError if another field rules out distillation."""
    weights = f'teacher.weights is {config.teacher.weights!r}'
    if config.masked.target != 'none':
        raise UserError(
            f'{weights} and masked.target is {config.masked.target}: masked patch prediction does '
            "not predict the teacher's classes. Leave out one of them.",
            kind='value',
            field='masked.target',
            value=config.masked.target,
        )
    if config.loss.name != 'softmax':
        raise UserError(
            f'{weights} and loss.name is {config.loss.name}: distillation compares '
            'probabilities that sum to one. Set loss.name=softmax.',
            kind='value',
            field='loss.name',
            value=config.loss.name,
        )
    if config.teacher.share == 1 and config.loss.class_weights:
        raise UserError(
            f'{weights} and teacher.share is 1: the loss uses no labels, and loss.class_weights '
            'would have no effect. Lower teacher.share, or leave out the weights.',
            kind='value',
            field='loss.class_weights',
            value=config.loss.class_weights,
        )


def default_log_every(num_steps: int) -> int:
    """Returns a twentieth of the run, so that a short run has a curve, but at most 100 steps."""
    return min(max(num_steps // 20, 1), 100)


def total_steps(config: ml_collections.ConfigDict) -> int:
    """Returns the number of training steps; only this function converts epochs to steps.

    Args:
      config: a config that states num_steps or dataset.num_examples.

    Raises:
      UserError: if there are no steps, too many to count, or too few for warm-up and cooldown.
    """
    steps = config.num_steps
    if not steps:
        steps = round(config.num_epochs * config.dataset.num_examples / config.batch_size)
    if not 1 <= steps <= fields.MOST:
        raise UserError(
            f'num_epochs is {config.num_epochs}, which is {steps} steps with '
            f'{config.dataset.num_examples} images and batch_size {config.batch_size}: expected at '
            f'least 1 and at most {fields.MOST:,} steps.',
            kind='value',
            field='num_epochs',
            value=config.num_epochs,
        )
    warmup_steps = config.optimizer.warmup_steps
    cooldown_steps = config.optimizer.cooldown_steps
    if warmup_steps >= steps:
        raise UserError(
            f'optimizer.warmup_steps is {warmup_steps}: expected fewer than the {steps} steps of '
            'the run. Train longer, or warm up for less, as in '
            f'--config.optimizer.warmup_steps={steps // 10}',
            kind='value',
            field='optimizer.warmup_steps',
            value=warmup_steps,
        )
    if warmup_steps + cooldown_steps > steps:
        raise UserError(
            f'optimizer.cooldown_steps is {cooldown_steps}: expected at most '
            f'{steps - warmup_steps}, the steps of the run after its warm-up.',
            kind='value',
            field='optimizer.cooldown_steps',
            value=cooldown_steps,
        )
    return steps


def flatten(config: Mapping | ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns {'model.hidden_size': 768, ...}, with tuples as lists, as in JSON."""
    nested = config
    if isinstance(config, ml_collections.ConfigDict):
        nested = config.to_dict()
    flat = {}
    for field, value in traverse_util.flatten_dict(nested, sep='.').items():
        if isinstance(value, tuple):
            value = list(value)
        flat[field] = value
    return flat


def check_recorded(config: Mapping[str, Any], path: str) -> None:
    """Checks the recorded fields of a run that its readers use.

    Args:
      config: the content of config.json; fields that are newer than the run are missing.
      path: the path of the file, for messages.

    Raises:
      UserError: if a value is impossible.
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
                    f'{name} is not a field. {nearest_names(name, known)}',
                    kind='unknown',
                    field=name,
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
    """Raises UserError if a size of a transformer is missing; sizes have no defaults."""
    is_resnet = 'model.resnet.units' in values and 'model.hidden_size' not in values
    if is_resnet:
        return
    missing = [
        name
        for name, field in models.tables()['transformers'].items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise UserError(f'missing {some(missing)}.', kind='missing', field=missing[0])


def of_weights(config: Mapping | ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the fields that are needed to use the parameters of a run, by dotted name.

    The shapes of the arrays do not determine all of them.
    """
    needed = {}
    for name, value in flatten(config).items():
        of_model = name.partition('.')[0] in ('model', 'preprocess') and name not in PER_MACHINE
        if of_model or name in (
            'image_size',
            'loss.name',
            'masked.target',
            'dataset.num_classes',
        ):
            needed[name] = value
    return needed


def with_unrecorded(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recorded config of a run, completed by the fields of UNRECORDED.

    A section that the run does not record at all stays missing.
    """
    completed: dict[str, Any] = {}
    for name, value in recorded.items():
        if isinstance(value, Mapping):
            value = dict(value)
        completed[name] = value
    for field, value in UNRECORDED.items():
        section, _, name = field.rpartition('.')
        if section in completed:
            completed[section].setdefault(name, value)
    return completed


def as_begun(
    config: ml_collections.ConfigDict, recorded: Mapping[str, Any]
) -> ml_collections.ConfigDict:
    """Returns a config that resumes a run of an earlier version with the run's own values.

    A field of UNRECORDED or CHANGED_VALUES gets the recorded value if the config has the current
    default or the recipe's current value. Each such field is logged.

    Args:
      config: the config from the file and the command line.
      recorded: the config in the workdir, from `with_unrecorded`.
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
        if (old[field], new[field]) not in pairs:
            continue
        values[field] = old[field]
        if isinstance(old[field], list):
            values[field] = tuple(old[field])
        log.info(
            '%s stays %s, the initial value of this run; new runs use %s',
            field,
            old[field],
            new[field],
        )
    values |= _decay_names_as_begun(old, new)
    return changed(config, values)


def _decay_names_as_begun(old, new):
    """Returns {field: value} if an earlier version has read 'kernel,bias' as one name."""
    field = 'optimizer.decay_names'
    recorded = tuple(old.get(field, new[field]))
    current = tuple(new[field])
    if recorded == current or fields.split_at_commas(recorded) != current:
        return {}
    log.warning(
        '%s stays %s, the initial value of this run: these names match no parameter, so '
        'no parameter decays. New runs split names at commas',
        field,
        list(recorded),
    )
    return {field: recorded}


def differences(
    old: Mapping | ml_collections.ConfigDict, new: Mapping | ml_collections.ConfigDict
) -> list[str]:
    """Compares the recorded config of a run with the config that would resume it.

    Returns:
      One line for each field that must not differ but does.
    """
    new_values = flatten(new)
    defaults = flatten(base('r50x1')) | flatten(base())
    old_values = {
        field: default for field, default in defaults.items() if field in new_values
    }  # the values of fields that are newer than the run
    old_values |= flatten(old)
    lines = []
    for field in sorted(old_values.keys() | new_values.keys()):
        before = old_values.get(field, 'absent')
        now = new_values.get(field, 'absent')
        if before != now and not _may_differ(field, before, now):
            lines.append(f'{field}: {before!r} in the workdir, {now!r} now')
    return lines


def _may_differ(field, before, now):
    """Tells whether a run may resume although this field has changed."""
    if field in ('dataset.name', 'pretrained') and may_have_moved(before, now):
        return True
    if field == 'accum_steps' and now in (-1, 0):  # the run keeps its first choice
        return True
    return any(fnmatch.fnmatch(field, pattern) for pattern in MAY_DIFFER)


def may_have_moved(a: str, b: str) -> bool:
    """Tells whether two paths may be the same directory, moved: their last parts are equal.

    A name of a TFDS data set only matches itself; '.' matches the name of the current directory.
    """
    if not a or not b:
        return False
    return os.path.basename(os.path.abspath(a)) == os.path.basename(os.path.abspath(b))


if __name__ == '__main__':
    print(markdown(), end='')
