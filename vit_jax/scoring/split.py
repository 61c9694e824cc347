"""The split that weights are scored on, with their classes and their preprocessing."""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax

from vit_jax import config as config_lib
from vit_jax.errors import UserError, check_at_least, nearest_names, some
from vit_jax.evaluators import per_class
from vit_jax.evaluators.context import Devices, Split
from vit_jax.files import composed, read_json
from vit_jax.parallel import feeding, microbatch, sharding
from vit_jax.processes import consensus
from vit_jax.weights import Weights, description
from vit_jax.workdir import record

log = logging.getLogger(__name__)


def dataset_of(
    workdir: str | None, changes: Mapping[str, Any], pretrained: str | None = None
) -> dict[str, Any]:
    """The section `dataset` of the config of a run, or its defaults, with the values in `changes`.

    Args:
      workdir: the workdir of the run, or one of its checkpoints; None for weights.
      changes: values by field of `dataset`, including `name`; empty values have no effect.
      pretrained: address of the weights. If the weights are from a run, the split is sliced as in
        this run (dataset.stratify, dataset.heic).

    Raises:
      UserError: if the workdir has no run, or neither the workdir nor `changes` names a data set.
    """
    dataset = config_lib.base().dataset.to_dict()
    if workdir:
        place = record.find(workdir)
        if place is None:
            raise UserError(
                f'--workdir={workdir} is not the workdir of a run, nor a checkpoint of '
                'one (WORKDIR/checkpoints/STEP): for other weights, write '
                '--pretrained.',
                kind='content',
                field='--workdir',
                file=workdir,
            )
        dataset |= _recorded_dataset(place)
        if changes['name'] not in (None, dataset['name']):
            # The label and the subset of the run do not apply to another data set.
            dataset['label'] = ''
            dataset['subset'] = ''
    elif not (changes['name'] and changes['eval_split']):
        raise UserError(
            '--pretrained needs --dataset=NAME_OR_DIRECTORY and --split=SPLIT.',
            kind='missing',
            field='--split' if changes['name'] else '--dataset',
        )
    elif pretrained:
        place = record.find(pretrained)
        if place is not None:
            recorded = _recorded_dataset(place)
            dataset['stratify'] = recorded['stratify']
            dataset['heic'] = recorded['heic']
    return dataset | {field: value for field, value in changes.items() if value}


def _recorded_dataset(place):
    """The section `dataset` of the run that record.find has found."""
    config, _ = record.read(place[0])
    return config['dataset']


def open_labelled_source(
    dataset: dict[str, Any], loaded: Weights, labels: str | None, mapping: str | None
):
    """Opens the split, with other labels if a JSON file names them, and logs how it is scored.

    Args:
      dataset: the section `dataset` from `dataset_of`.
      loaded: the weights.
      labels: path of a JSON file with other labels; None for the labels of the data.
      mapping: path of a JSON file with other classes; None for the classes of the weights.

    Raises:
      UserError: if the weights have no classes, or the split or the file cannot be used.
    """
    from vit_jax.data.relabelled import relabelled

    if not loaded.num_classes:
        raise UserError(
            f'{loaded.source} has no head and therefore no classes: score its features '
            'by --fewshot=1,5, or fine-tune first (configs/finetune.py).',
            kind='inapplicable',
        )
    if mapping and labels:
        raise UserError(
            '--labels and --mapping both replace the labels: give one of them.',
            kind='value',
            field='--labels',
            value=labels,
        )
    if mapping:
        source = open_mapped_source(dataset, loaded, mapping)
    else:
        source = open_source(dataset, loaded)
    if labels:
        source = relabelled(source, read_json(labels, list), labels)
    elif not mapping:
        _warn_of_missing_classes(source, dataset)
    if source.multi_label and loaded.loss != 'sigmoid':
        log.info(
            'images have several labels and %s was trained for one: an image is right if the '
            'most probable class is one of its labels, and the loss spreads the target evenly over '
            'its labels',
            loaded.source,
        )
    elif dataset['multi_label'] and not source.multi_label:
        log.info(
            'images have one label and %s was trained for several: an image is right if the '
            'most probable class is its label',
            loaded.source,
        )
    check_equal_data(source)
    return source


def _warn_of_missing_classes(source, dataset):
    from vit_jax.data.sources import classes_without_examples  # imports TensorFlow

    empty_classes = classes_without_examples(source)
    if empty_classes:
        log.warning(
            '%s of %s has %s: accuracies say nothing about them',
            dataset['eval_split'],
            dataset['name'],
            per_class.missing_classes(empty_classes, len(source.class_names)),
        )


def open_mapped_source(dataset: dict[str, Any], loaded: Weights, path: str):
    """Opens a split whose classes a file maps to classes of the weights.

    Args:
      dataset: the section `dataset` from `dataset_of`.
      loaded: the weights.
      path: a JSON file, or the directory `mappings` of ObjectNet.

    Raises:
      UserError: if the weights or the split do not allow a mapping, or the file cannot be used.
    """
    from vit_jax.data.relabelled import mapped
    from vit_jax.data.sources import open_split

    mapping = _read_objectnet(path) if os.path.isdir(path) else read_json(path, dict)
    if not loaded.classes and loaded.num_classes != 1000:  # 1000 classes count as ImageNet's
        raise UserError(
            f'--mapping={path} needs names of classes, and {loaded.source} has '
            'none: add --classes=FILE.',
            kind='missing',
            field='--classes',
        )
    source = open_split(dataset, dataset['eval_split'])
    if source.multi_label:
        raise UserError(
            f'--mapping={path} is for images with one label, and images of '
            f'{dataset["name"]} have several.',
            kind='inapplicable',
            field='--mapping',
            value=path,
        )
    mapped_names = set(map(composed, mapping))
    known_names = set(map(composed, source.class_names))
    log.info(
        '%d of the %d classes of %s are classes of %s; images of the others are not scored',
        len(known_names.intersection(mapped_names)),
        len(source.class_names),
        dataset['name'],
        loaded.source,
    )
    unknown = sorted(mapped_names - known_names)
    if unknown:
        log.warning(
            '%s has %s, and %s has no images of them. %s',
            path,
            some(unknown),
            dataset['name'],
            nearest_names(unknown[0], source.class_names),
        )
    return mapped(source, mapping, description.class_names(loaded), path)


def _read_objectnet(directory: str) -> dict[str, Any]:
    """The classes of ImageNet for each folder of ObjectNet, from its directory `mappings`.

    One of the two files has the label of each folder. The other has the ImageNet classes of each
    label. A warning names the labels of the second file that no folder has.
    """
    classes_file = os.path.join(directory, 'objectnet_to_imagenet_1k.json')
    labels_file = os.path.join(directory, 'folder_to_objectnet_label.json')
    classes = read_json(classes_file, dict)
    labels = read_json(labels_file, dict)
    mapping = {}
    for folder, label in labels.items():
        if isinstance(label, str) and label in classes:
            mapping[folder] = classes[label]
    used = {label for label in labels.values() if isinstance(label, str)}
    unused = sorted(classes.keys() - used)
    if unused:
        log.warning(
            '%s has %s, and %s has no folder for them. %s',
            classes_file,
            some(unused),
            labels_file,
            nearest_names(unused[0], used),
        )
    return mapping


def check_equal_data(*sources: Any) -> None:
    """Raises UserError if processes have opened different numbers of images."""
    consensus.check_equal(
        'the data',
        {f'images of split {number}': source.num_examples for number, source in enumerate(sources)},
    )


def open_source(dataset: dict[str, Any], loaded: Weights):
    """Opens the split with the labels of the weights.

    Classes are matched by name if the names are comparable, else by order. A warning then reports
    that the order is used, because other programs may name the same classes differently.

    Raises:
      UserError: if the classes differ.
    """
    from vit_jax.data.sources import open_split  # imports TensorFlow

    source = open_split(dataset, dataset['eval_split'])
    names = tuple(loaded.classes or ())
    if description.names_tell(loaded, source.class_names) and source.class_names != names:
        source = open_split(dataset, dataset['eval_split'], names)
    description.check_classes(loaded, source.class_names, dataset['name'])
    return source


def broken(batches: Any) -> list[str]:
    """Sorted names of the broken images that any process has left out of pipeline.EvalBatches."""
    names = []
    for of_process in consensus.gather(batches.broken):
        names += of_process
    return sorted(names)


def broken_of_splits(splits: Iterable[Split]) -> list[str]:
    """Names of the broken images of several splits, sorted within each split."""
    names = []
    for split in splits:
        names += broken(split.batches)
    return names


def make_mesh(batch_size: int) -> jax.sharding.Mesh:
    """A mesh of all devices.

    Raises:
      UserError: unless --batch_size is divisible by the number of devices.
    """
    check_at_least('--batch_size', batch_size, 1)
    mesh = sharding.make_mesh(config_lib.base().mesh)
    sharding.check_batch(batch_size, 1, mesh)
    return mesh


def devices(
    model: nn.Module, mesh: jax.sharding.Mesh, batch_size: int, image_size: tuple[int, int]
) -> Devices:
    """The Devices for a mesh, with the fastest number of parts of a batch."""
    parts = microbatch.fastest(model, batch_size, image_size, sharding.batch_parts(mesh))
    return Devices(mesh, model.backend, parts)


def batch_settings(
    loaded: Weights, mesh: jax.sharding.Mesh, batch_size: int, files_at_once: int
) -> dict[str, Any]:
    """Arguments of pipeline.eval_batches for the weights, except the source."""
    return dict(
        batch_size=batch_size,
        image_size=loaded.image_size(),
        preprocess=description.complete_preprocess(loaded),
        share=feeding.data_share(mesh),
        files_at_once=files_at_once,
        max_broken_fraction=1.0,
    )
