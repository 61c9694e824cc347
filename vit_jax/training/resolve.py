"""The config of a run: pure functions (config, facts) -> config.

A file of configs/ and the command line leave fields open. `run.resolve` finds the facts and calls
these functions one after the other:

    config.checked    the fields of the weights; every value is possible
    as_recorded       the values that the run of the workdir started with
    with_machine      the devices, the paths and the splits; the fastest choices for the devices
    with_data         the numbers of the data, and the checksum of the teacher
    with_accum_steps  the fastest number of parts of a batch

Every function returns a frozen config, and a Program takes the last one. Only accum_steps=0 is
still open then: accumulation.choose replaces it after compiling steps. A plan and the benchmark
read no data and resume no run: they use `with_data` and `for_mesh`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.objectives import registry
from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import microbatch, sharding
from vit_jax.training import device_defaults


def as_recorded(config: ConfigDict, recorded: Mapping[str, Any] | None) -> FrozenConfigDict:
    """The config with recorded values where it leaves a field open or an earlier version differs.

    Args:
      config: checked.
      recorded: config.json of the workdir; None for a new run.
    """
    if recorded is None:
        return FrozenConfigDict(config)
    config = config_lib.as_begun(config, recorded)
    values = device_defaults.kept(config.model, recorded['model'])
    if not config.dataset.eval_split:
        values['dataset.eval_split'] = recorded['dataset']['eval_split']
        if '[' not in config.dataset.train_split:
            values['dataset.train_split'] = recorded['dataset']['train_split']
    if config.accum_steps < 1:
        values['accum_steps'] = recorded['accum_steps'] or config.accum_steps
    if not config.log_every:
        values['log_every'] = recorded.get('log_every', 0)
    return _changed(config, values)


def with_machine(
    config: ConfigDict,
    platform: str,
    device: jax.Device,
    dtype: str,
    values: Mapping[str, Any] | None = None,
) -> FrozenConfigDict:
    """The config with the fastest choices for the fields of models.OPEN that it leaves open.

    Args:
      config: checked.
      platform: the platform of the devices, which a mesh may only simulate.
      device: one of the devices, real or simulated.
      dtype: the fastest model.dtype, from device_defaults.fastest_dtype.
      values: other fields that depend on the machine, by dotted field: mesh.host_devices, absolute
        paths, and the splits from data.folders.choose_splits.
    """
    choices = device_defaults.for_platform(config.model, platform, device, dtype)
    return _changed(config, {**choices, **(values or {})})


def with_data(
    config: ConfigDict,
    num_examples: int,
    num_classes: int,
    multi_label: bool = False,
    whole: int = 0,
    class_counts: Sequence[int] | None = None,
    teacher_checksum: int | None = None,
) -> FrozenConfigDict:
    """The config with the numbers of its data, balanced class weights, and `log_every`.

    Args:
      config: checked.
      num_examples: the number of examples of the training split or its subset.
      num_classes: the number of classes of the data.
      multi_label: whether an image may have any number of labels.
      whole: number of examples in the whole training split if a subset is used, else 0. Recipes
        state the number for the whole split.
      class_counts: number of training examples of each class, for balanced loss.class_weights.
        None, as in a plan, leaves out the weights.
      teacher_checksum: the checksum of the teacher, 0 without one; None keeps the config's.

    Raises:
      UserError: if the config states other numbers, or its loss does not fit the data.
    """
    known = dict(num_examples=num_examples, num_classes=num_classes, multi_label=multi_label)
    _check_numbers(config.dataset, known, whole)
    _check_loss(config, num_classes, multi_label)
    values: dict[str, int | tuple[float, ...]] = {
        f'dataset.{name}': value for name, value in known.items()
    }
    if 'balanced' in config.loss.class_weights:
        values['loss.class_weights'] = tuple(
            num_examples / (num_classes * count) for count in class_counts or ()
        )
    if teacher_checksum is not None:
        values['teacher.checksum'] = teacher_checksum
    config = _changed(config, values)
    if config.log_every:
        return config
    log_every = config_lib.default_log_every(config_lib.total_steps(config))
    return _changed(config, {'log_every': log_every})


def _check_numbers(dataset, known, whole):
    """Raises UserError if the config states numbers of the data that differ from `known`."""
    stated = {name: dataset[name] for name in known}
    if whole and stated['num_examples'] == whole:
        stated['num_examples'] = known['num_examples']
    wrong = [name for name in known if stated[name] not in (0, known[name])]
    if not wrong:
        return
    problems = [
        f'dataset.{name} is {stated[name]} in the config but {dataset.name!r} has {known[name]}'
        for name in wrong
    ]
    options = [f'--config.dataset.{name}={type(known[name])()}' for name in wrong]
    raise UserError(
        f'{"; ".join(problems)}. If the data is right, add {" ".join(options)}, which uses the '
        'numbers of the data.',
        kind='value',
        field=f'dataset.{wrong[0]}',
        value=stated[wrong[0]],
    )


def _check_loss(config, num_classes, multi_label):
    """Raises UserError if the loss or its class weights do not fit the labels."""
    dataset = config.dataset
    if multi_label and config.loss.name != 'sigmoid':
        raise UserError(
            f'loss.name is {config.loss.name}, whose targets sum to one, and the '
            f'images of {dataset.name!r} have several labels. Add --config.loss.name=sigmoid. If '
            'labels.csv has one label for each image, make file,label its first row.',
            kind='value',
            field='loss.name',
            value=config.loss.name,
        )
    weights = config.loss.class_weights
    if 'balanced' not in weights and len(weights) not in (0, num_classes):
        raise UserError(
            f'loss.class_weights are {len(weights)} and {dataset.name!r} has '
            f'{num_classes} classes: expected one for each, in the order of the labels.',
            kind='value',
            field='loss.class_weights',
            value=weights,
        )


def with_accum_steps(
    config: ConfigDict, module: nn.Module, mesh: Mesh, platform: str = ''
) -> FrozenConfigDict:
    """The config with the fastest number of parts of a batch, if accum_steps is -1.

    Args:
      config: a config with the numbers of its data and the choices for its devices.
      module: the Flax module of the objective.
      mesh: the devices.
      platform: the platform of the devices if the mesh only simulates them.

    Raises:
      UserError: if the batch cannot be spread evenly over the devices.
    """
    if config.accum_steps != -1:
        return FrozenConfigDict(config)
    sharding.check_batch(config.batch_size, 1, mesh)
    parts = microbatch.fastest(
        module,
        config.batch_size,
        config.image_size,
        sharding.batch_parts(mesh),
        platform or mesh.devices.flat[0].platform,
        train=True,
    )
    return _changed(config, {'accum_steps': parts})


def for_mesh(
    config: ConfigDict, mesh: Mesh, platform: str = '', teacher: Teacher | None = None
) -> FrozenConfigDict:
    """The config with the choices for the devices of a mesh, without the data of a run.

    Args:
      config: a config with the numbers of its data.
      mesh: the devices.
      platform: the platform of the devices if the mesh only simulates them.
      teacher: the teacher of `config.teacher`.
    """
    device = mesh.devices.flat[0]
    platform = platform or device.platform
    dtype = device_defaults.fastest_dtype(platform)
    config = with_machine(config, platform, device, dtype)
    module = registry.of_config(config, teacher).module
    return with_accum_steps(config, module, mesh, platform)


def _changed(config, values):
    """A frozen copy of a config with new values of some dotted fields."""
    changed = ConfigDict(config).copy_and_resolve_references()
    changed.update_from_flattened_dict(values)
    return FrozenConfigDict(changed)
