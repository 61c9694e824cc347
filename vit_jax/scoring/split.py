"""The split that weights are scored on, with labels in their order and images as they say."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from vit_jax import config as config_lib
from vit_jax.errors import UserError, check_at_least, nearest_names, some
from vit_jax.evaluators import per_class
from vit_jax.evaluators.context import Devices
from vit_jax.files import composed, read_json
from vit_jax.parallel import feeding, microbatch, sharding
from vit_jax.processes import consensus
from vit_jax.weights import Weights, description
from vit_jax.workdir import record

log = logging.getLogger(__name__)


def dataset_of(
    workdir: str | None, given: Mapping[str, Any], pretrained: str | None = None
) -> dict[str, Any]:
    """The section `dataset` of the config of a run, or the defaults.

    Where there is no `workdir` and the weights at `pretrained` are those of a run, slices are those
    of that run (dataset.stratify). Values of `given` that are not empty, by field of `dataset`,
    replace those of the config. Raises UserError where neither says what to score.
    """
    dataset = config_lib.base().dataset.to_dict()
    if workdir:
        if not (found := record.find(workdir)):
            raise UserError(
                f'--workdir={workdir} is not the workdir of a run, nor a checkpoint of '
                'one (WORKDIR/checkpoints/STEP): for other weights, write '
                '--pretrained.'
            )
        dataset |= record.read(found[0])[0]['dataset']
        if given['name'] not in (None, dataset['name']):
            dataset['label'] = dataset['subset'] = ''  # the run's are of its own data set
    elif not (given['name'] and given['eval_split']):
        raise UserError('--pretrained needs --dataset=NAME_OR_DIRECTORY and --split=SPLIT.')
    elif pretrained:
        run = record.find(pretrained)
        if run:
            dataset['stratify'] = record.read(run[0])[0]['dataset']['stratify']
    return dataset | {field: value for field, value in given.items() if value}


def open_labelled_source(
    dataset: dict[str, Any], loaded: Weights, labels: str | None, mapping: str | None
):
    """The split, with other labels if JSON files with them are named; says what is scored."""
    from vit_jax.data.relabelled import relabelled

    if not loaded.num_classes:
        raise UserError(
            f'{loaded.source} has no head and therefore no classes: score its features '
            'by --fewshot=1,5, or fine-tune first (configs/finetune.py).'
        )
    if mapping and labels:
        raise UserError('--labels and --mapping both replace the labels: give one of them.')
    source = (
        open_mapped_source(dataset, loaded, mapping) if mapping else open_source(dataset, loaded)
    )
    if labels:
        source = relabelled(source, read_json(labels, list), labels)
    elif not mapping:
        _warn_of_missing_classes(source, dataset)
    if source.multi_label and loaded.loss != 'sigmoid':
        log.info(
            'images have several labels and %s was trained for one: an image is right if the '
            'most probable class is one of its labels, and the loss is that of labels with '
            'equal shares',
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

    empty = classes_without_examples(source)
    if empty:
        log.warning(
            '%s of %s has %s: accuracies say nothing about them',
            dataset['eval_split'],
            dataset['name'],
            per_class.missing_classes(empty, len(source.class_names)),
        )


def open_mapped_source(dataset: dict[str, Any], loaded: Weights, path: str):
    """A split of other classes than the weights', which those in a mapping stand for.

    `path` is a JSON file, or the directory `mappings` that ObjectNet comes with.
    """
    from vit_jax.data.relabelled import mapped
    from vit_jax.data.sources import open_split

    mapping = _read_objectnet(path) if os.path.isdir(path) else read_json(path, dict)
    if not loaded.classes and loaded.num_classes != 1000:  # not taken for ImageNet's
        raise UserError(
            f'--mapping={path} goes by the names of classes, and {loaded.source} has '
            'none: add --classes=FILE.'
        )
    source = open_split(dataset, dataset['eval_split'])
    if source.multi_label:
        raise UserError(
            f'--mapping={path} is for images of one class, and those of '
            f'{dataset["name"]} have several labels.'
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
    if unknown := sorted(mapped_names - known_names):
        log.warning(
            '%s has %s, of which %s has no images. %s',
            path,
            some(unknown),
            dataset['name'],
            nearest_names(unknown[0], source.class_names),
        )
    return mapped(source, mapping, description.class_names(loaded), path)


def _read_objectnet(directory: str) -> dict[str, Any]:
    """What the folders of ObjectNet stand for, from the two files of its directory `mappings`.

    One file has the label of each folder, the other the classes of ImageNet of each label. The log
    names labels of the second file that no folder has, because nothing is scored by them.
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
    if unused := sorted(classes.keys() - used):
        log.warning(
            '%s has %s, which %s gives to no folder. %s',
            classes_file,
            some(unused),
            labels_file,
            nearest_names(unused[0], used),
        )
    return mapping


def check_equal_data(*sources: Any) -> None:
    """Raises UserError where processes have opened different data; classes are the weights'."""
    consensus.check_equal(
        'the data',
        {f'images of split {number}': source.num_examples for number, source in enumerate(sources)},
    )


def open_source(dataset: dict[str, Any], loaded: Weights):
    """The split, with the labels of the weights: by class name where names tell, else by order.

    Weights of other programs may name the same classes differently: then their order is trusted,
    and a warning says so. Raises UserError when the classes are not the same.
    """
    from vit_jax.data.sources import open_split  # imports TensorFlow

    source = open_split(dataset, dataset['eval_split'])
    names = tuple(loaded.classes or ())
    if description.names_tell(loaded, source.class_names) and source.class_names != names:
        source = open_split(dataset, dataset['eval_split'], names)
    description.check_classes(loaded, source.class_names, dataset['name'])
    return source


def broken(batches: Any) -> list[str]:
    """The sorted names of the images that all processes have left out of pipeline.EvalBatches."""
    return sorted(sum(consensus.gather(batches.broken), []))


def make_mesh(batch_size: int) -> jax.sharding.Mesh:
    """All devices; UserError unless --batch_size is divisible by their number."""
    check_at_least('--batch_size', batch_size, 1)
    mesh = sharding.make_mesh(config_lib.base().mesh)
    sharding.check_batch(batch_size, 1, mesh)
    return mesh


def devices(
    model: nn.Module, mesh: jax.sharding.Mesh, batch_size: int, image_size: tuple[int, int]
) -> Devices:
    """How the model computes batches of that size over the mesh: in the fastest parts."""
    parts = microbatch.fastest(model, batch_size, image_size, sharding.batch_parts(mesh))
    return Devices(mesh, model.backend, parts)


def batch_settings(
    loaded: Weights, mesh: jax.sharding.Mesh, batch_size: int, files_at_once: int
) -> dict[str, Any]:
    """Arguments of pipeline.eval_batches, besides the source, for images as the weights say."""
    return dict(
        batch_size=batch_size,
        image_size=loaded.image_size(),
        preprocess=description.complete_preprocess(loaded),
        share=feeding.data_share(mesh),
        files_at_once=files_at_once,
        max_broken_fraction=1.0,
    )
