"""The data of a run: the number of images of each class, and some images as the model sees them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import pipeline
from vit_jax.errors import UserError
from vit_jax.files import composed
from vit_jax.reporting import pictures
from vit_jax.training.run_data import open_data
from vit_jax.weights.apply import as_pixels

SAMPLES = 24  # images on the page
SIDE = 128  # pixels of the longer side of these images
BUFFER = 256  # a shuffle buffer as large as the run's would take long to fill


def describe(config: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Describes the data of a run.

    Args:
      config: the config of the run, by section.
      classes: the class names of the run.

    Returns:
      `name`; `splits`, each with `split`, `num_examples` and `counts`, the number of images of each
      class (None if labels are only known while reading); `samples`, each with `image` and `label`:
      the first training images after augmentation, before MixUp; and `mixup`, its alpha.

    Raises:
      UserError: if the data cannot be opened, or have other classes now.
    """
    dataset = config['dataset']
    train, evaluation, _ = open_data(ConfigDict(dataset))
    if [composed(name) for name in train.class_names] != [composed(name) for name in classes]:
        raise UserError(
            f'The classes of {dataset["name"]} are no longer the classes of the run.',
            kind='conflict',
            field='dataset.name',
            value=dataset['name'],
        )
    train_name = dataset['train_split']
    if dataset['subset']:
        train_name = f'{dataset["subset"]} of {train_name}'
    return {
        'name': dataset['name'],
        'mixup': config['augment']['mixup'],
        'splits': [
            _describe_split(train_name, train, len(classes)),
            _describe_split(dataset['eval_split'], evaluation, len(classes)),
        ],
        'samples': _samples(config, train, classes),
    }


def _describe_split(name, source, num_classes):
    counts = None
    if source.labels is not None:
        counts = np.bincount(source.labels, minlength=num_classes).tolist()
    return {'split': name, 'num_examples': source.num_examples, 'counts': counts}


def _samples(config, train, classes):
    """Returns the first images of the run after augmentation, with their labels."""
    dataset = config['dataset']
    settings = pipeline.TrainSettings(
        batch_size=SAMPLES,
        image_size=tuple(config['image_size']),
        seed=config['seed'],
        augment=config['augment'],
        preprocess=config['preprocess'],
        shuffle_buffer=min(BUFFER, dataset['shuffle_buffer']),
        balance=dataset['balance'],
        files_at_once=dataset['files_at_once'],
        max_broken_fraction=1.0,
    )
    batch = next(pipeline.train_batches(train, settings))
    images = as_pixels(batch['image'], config['preprocess'])
    samples = []
    for image, label in zip(images, batch['label'], strict=True):
        uri = pictures.uri(pictures.thumbnail(image, SIDE))
        samples.append({'image': uri, 'label': names_of(label, classes)})
    return samples


def names_of(label: np.ndarray, classes: Sequence[str]) -> str:
    """Returns the class of a label, or all classes of a label with several, as text."""
    numbers = np.flatnonzero(label).tolist() if np.ndim(label) else [int(label)]
    return ', '.join(classes[k] for k in numbers) or 'no class'
