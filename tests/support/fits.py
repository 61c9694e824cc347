"""The content of the page of an imaginary fit, with random predictions."""

import numpy as np
from PIL import Image

from vit_jax.fitting import outcome
from vit_jax.reporting.fit_page import Attempt, Content, Example

NUM_IMAGES = 60
TEMPERATURE = 1.5


def predictions(num_classes, multi_label=False, seed=0):
    """Targets of NUM_IMAGES photos, and calibrated logits that often agree with them."""
    rng = np.random.default_rng(seed)
    labels = np.arange(NUM_IMAGES) % num_classes
    targets = np.eye(num_classes, dtype=bool)[labels]
    if multi_label:
        targets |= rng.uniform(size=targets.shape) < 0.3
    return targets, 2 * targets + rng.normal(size=targets.shape)


def write_photo(path):
    """Writes a photo that is wider than a thumbnail, and returns its path."""
    Image.linear_gradient('L').resize((200, 100)).convert('RGB').save(path)
    return str(path)


def content(folder, names, multi_label=False, **changes):
    """The content of the page of a fit with these classes; photos are written to `folder`."""
    targets, logits = predictions(len(names), multi_label)
    files = [write_photo(folder / f'{k}.jpg') for k in range(NUM_IMAGES)]
    scored = outcome.score(files, targets, logits, names, multi_label, TEMPERATURE)
    suspects = [Example(file, names[0], 0.01, names[1], 0.97) for file in files[:30]]
    attempts = [
        Attempt('linear probe', None, False, None, 0.75, 2.5, '', False),
        Attempt('try lr=0.001', 0.001, False, 40, 0.8125, 12.0, '', False),
        Attempt('try lr=0.01', 0.01, True, 40, None, 11.0, '', False),
        Attempt('long run', 0.001, False, 400, 0.875, 120.0, 'run/report.html', True),
    ]
    values = {
        'name': 'fit-photos',
        'settings': {'data': 'photos', 'pretrained': 'w.safetensors', 'minutes': 30.0, 'seed': 0},
        'class_names': names,
        'splits': {'train': 80, 'val': 20, 'test': NUM_IMAGES},
        'scored_on': 'test',
        'chosen_on': 'val',
        'outcome': scored.as_json(),
        'mistakes': [Example(*mistake) for mistake in scored.mistakes],
        'suspects': suspects,
        'num_suspects': len(suspects),
        'scan': {
            'images_per_class': {name: 100 + k for k, name in enumerate(names)},
            'sides': [90, 300, 4000],
            'formats': {'.jpg': 1230, '.png': 4},
            'broken': {'/photos/broken.jpg': 'the file is empty'},
            'imbalance': 1.5,
            'copies': 7,
            'left_out': {'.cr2': 11},
        },
        'duplicates': {'pairs': 13, 'across_splits': [['/a.jpg', '/b.jpg', 0.99]]},
        'attempts': attempts,
        'comparison': 'tries/report.html',
        'files': ['photos.csv', 'suspects.csv', 'mistakes.csv', 'confusion.csv'],
        'commands': [('Classify photos.', "python -m vit_jax.predict '/my photos'")],
    }
    return Content(**(values | changes))
