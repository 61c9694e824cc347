"""The config of a run, resolved: pure functions (config, facts) -> config, in this order.

A file of configs/ and the command line leave fields open. `run.resolve` looks up the facts and
calls these functions one after the other, from the top of this file to its end:

    checked             by itself, and by the fields that the weights bring
    as_recorded         by the values with which the run of the workdir began
    with_paths          by where files are on this machine
    with_splits         by the splits that the data has
    with_host_devices   by how many devices the CPU is shown as
    with_device_defaults  by what is fastest on the devices
    with_data           by the numbers of the data
    with_teacher        by the weights of the teacher
    with_accum_steps    by how the devices compute the batch fastest

The result is frozen before a Program is made of it, and nothing changes it afterwards. A plan and
the benchmark, which read no data and resume no run, use `checked`, `with_data` and `for_mesh`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.objectives import registry
from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import microbatch, sharding
from vit_jax.training import device_defaults


def checked(config: ConfigDict, taken: Mapping[str, Any] | None = None) -> FrozenConfigDict:
    """The config with the fields that the weights bring, each of them with a possible value.

    Args:
      config: from the file and the command line.
      taken: values of `transfer.take` by dotted field, from pretrained.take_fields.

    Raises UserError if a value is impossible, or values do not fit together.
    """
    return FrozenConfigDict(config_lib.checked(config, taken))


def as_recorded(config: ConfigDict, recorded: Mapping[str, Any] | None) -> FrozenConfigDict:
    """The config with the values with which the run of the workdir began.

    They replace what the config leaves open, and what an earlier version had otherwise.

    Args:
      config: checked.
      recorded: config.json of the workdir; None if no run has begun there.
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


def with_paths(config: ConfigDict, paths: Mapping[str, str]) -> FrozenConfigDict:
    """The config with absolute paths: elsewhere the same name may be of other images or weights.

    Args:
      config: any.
      paths: by dotted field, from pretrained.absolute_paths and run.absolute_paths.
    """
    return _changed(config, paths)


def with_splits(config: ConfigDict, train_split: str, eval_split: str) -> FrozenConfigDict:
    """The config with the splits that it left open, from data.folders.choose_splits."""
    return _changed(config, {'dataset.train_split': train_split, 'dataset.eval_split': eval_split})


def with_host_devices(config: ConfigDict, shown: int) -> FrozenConfigDict:
    """The config with the number of devices that JAX shows the CPU as; 0 beside other devices."""
    return _changed(config, {'mesh.host_devices': shown})


def with_device_defaults(
    config: ConfigDict, platform: str, device: jax.Device, dtype: str
) -> FrozenConfigDict:
    """The config with the fields of models.OPEN that it leaves open chosen for the devices.

    Args:
      config: checked.
      platform: of the devices, which a mesh may only simulate.
      device: one of them, or one that simulates them.
      dtype: the fastest one, from device_defaults.fastest_dtype.
    """
    return device_defaults.for_platform(config, platform, device, dtype)


def with_data(
    config: ConfigDict,
    num_examples: int,
    num_classes: int,
    multi_label: bool = False,
    whole: int = 0,
    class_counts: Sequence[int] | None = None,
) -> FrozenConfigDict:
    """The config with the numbers of its data, and what follows from them.

    Args:
      config: checked.
      num_examples: of the training split or its subset.
      num_classes: of the data.
      multi_label: whether an image has any number of labels.
      whole: examples of the training split of which the subset is taken, which recipes state; 0
        without a subset.
      class_counts: training examples of each class, which make balanced loss.class_weights; without
        them, as in a plan, there are none.

    Raises UserError if the config states other numbers, or its loss does not fit the data.
    """
    dataset = config.dataset
    stated = {name: dataset[name] for name in ('num_examples', 'num_classes', 'multi_label')}
    known = dict(num_examples=num_examples, num_classes=num_classes, multi_label=multi_label)
    if whole and stated['num_examples'] == whole:
        stated['num_examples'] = num_examples
    wrong = [name for name in known if stated[name] not in (0, known[name])]
    if wrong:
        raise UserError(
            '; '.join(
                f'dataset.{name} is {stated[name]} in the config but '
                f'{dataset.name!r} '
                f'has {known[name]}'
                for name in wrong
            )
            + '. If the data is right, add '
            + ' '.join(f'--config.dataset.{name}={type(known[name])()}' for name in wrong)
            + ', which takes what the data have'
        )
    if multi_label and config.loss.name != 'sigmoid':
        raise UserError(
            f'loss.name is {config.loss.name}, whose targets sum to one, and the '
            f'images of {dataset.name!r} have several labels: add '
            '--config.loss.name=sigmoid, or, in a labels.csv of single labels, '
            'file,label as the first row.'
        )
    values: dict[str, int | tuple[float, ...]] = {
        f'dataset.{name}': value for name, value in known.items()
    }
    weights = config.loss.class_weights
    if 'balanced' in weights:
        values['loss.class_weights'] = tuple(
            num_examples / (num_classes * count) for count in class_counts or ()
        )
    elif len(weights) not in (0, num_classes):
        raise UserError(
            f'loss.class_weights are {len(weights)} and {dataset.name!r} has '
            f'{num_classes} classes: give one for each, in the order of the labels.'
        )
    config = _changed(config, values)
    if config.log_every:
        return config
    log_every = config_lib.default_log_every(config_lib.total_steps(config))
    return _changed(config, {'log_every': log_every})


def with_teacher(config: ConfigDict, checksum: int) -> FrozenConfigDict:
    """The config with the checksum of the teacher; 0 without one."""
    return _changed(config, {'teacher.checksum': checksum})


def with_accum_steps(
    config: ConfigDict, mesh: Mesh, platform: str = '', teacher: Teacher | None = None
) -> FrozenConfigDict:
    """The config with the number of parts in which the batch is computed fastest, if it is open.

    That is accum_steps=-1. With 0 the parts also have to fit in memory, which a compiled step
    tells: accumulation.choose.

    Args:
      config: with the numbers of its data and the defaults of the devices.
      mesh, platform, teacher: as for Program.

    Raises UserError if the batch cannot be split over the mesh, or the objective cannot be made.
    """
    if config.accum_steps != -1:
        return FrozenConfigDict(config)
    sharding.check_batch(config.batch_size, 1, mesh)
    model = models.build(config.model, config.dataset.num_classes)
    parts = microbatch.fastest(
        registry.build(config, model, teacher).module,
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
    """The config with everything that it leaves to the devices, except accum_steps=0.

    Args and errors are those of `with_accum_steps`.
    """
    device = mesh.devices.flat[0]
    platform = platform or device.platform
    dtype = device_defaults.fastest_dtype(platform)
    config = with_device_defaults(config, platform, device, dtype)
    return with_accum_steps(config, mesh, platform, teacher)


def _changed(config, values):
    """A frozen copy with other values of some dotted fields."""
    return FrozenConfigDict(config_lib.changed(config, values))
