"""The data set of a run: how many images of each class, and some as the model is shown them."""

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

SAMPLES, SIDE = 24, 128  # images, and pixels of their longer side
BUFFER = 256  # of a source that is read in sequence: mixing as many as the run does would take long


def describe(config: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """The data set of a config, by section, whose classes are those of the workdir.

    Returns `name`, `splits`, each with `split`, `num_examples` and `counts`, the images of each
    class, None where labels are known only when they are read; `samples`, with `image` and
    `label`, the first examples of the run after augmentation, as training reads them, but for
    MixUp, which `mixup` tells.

    Raises UserError if the data set cannot be opened, or is another by now.
    """
    dataset = config['dataset']
    train, evaluation, _ = open_data(ConfigDict(dataset))
    if list(map(composed, train.class_names)) != list(map(composed, classes)):
        raise UserError(f'The classes of {dataset["name"]} are no longer those of the run.')
    taken = (
        f'{dataset["subset"]} of {dataset["train_split"]}'
        if dataset['subset']
        else (dataset['train_split'])
    )
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
    return {
        'name': dataset['name'],
        'mixup': config['augment']['mixup'],
        'splits': [
            {
                'split': name,
                'num_examples': source.num_examples,
                'counts': None
                if source.labels is None
                else np.bincount(source.labels, minlength=len(classes)).tolist(),
            }
            for name, source in ((taken, train), (dataset['eval_split'], evaluation))
        ],
        'samples': [
            {
                'image': pictures.uri(pictures.thumbnail(image, SIDE)),
                'label': names_of(label, classes),
            }
            for image, label in zip(images, batch['label'], strict=True)
        ],
    }


def names_of(label: np.ndarray, classes: Sequence[str]) -> str:
    """The class of a label, or all classes of one that has several."""
    numbers = np.flatnonzero(label).tolist() if np.ndim(label) else [int(label)]
    return ', '.join(classes[k] for k in numbers) or 'no class'
