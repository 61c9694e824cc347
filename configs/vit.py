"""Pre-training from scratch as in the paper: ViT (arXiv 2010.11929) section 4.1 and table 3.

    python -m vit_jax.main --config=configs/vit.py:b16 --workdir=DIR
    python -m vit_jax.main --config=configs/vit.py:l16,imagenet21k --workdir=DIR
    python -m vit_jax.main --config=configs/vit.py:b32,jft --config.dataset.name=DIR --workdir=DIR

The argument is MODEL[,DATASET]. Published ImageNet top-1 after fine-tuning at 384 px, which these
recipes lead up to (table 5): pre-trained on imagenet2012 B/16 77.91, L/16 76.53; on imagenet21k
B/16 83.97, L/16 85.15; on JFT-300M B/16 84.15, L/16 87.12, H/14 88.04.
Table 3 has no rows for Ti, S, g, G and So400m: they take the nearest row, and the log says so.
"""

import re

from vit_jax.config import base
from vit_jax.errors import UserError
from vit_jax.models import variants

DATASETS = ('imagenet2012', 'imagenet21k', 'jft')
# Which size's row a size without one takes.
NEAREST = {'ti': 'b', 's': 'b', 'g': 'h', 'G': 'h', 'so400m': 'h'}
# JFT-300M: epochs, peak learning rate. L/16 also ran for 7 epochs; 14 is the published best.
JFT = {'b': (7, 8e-4), 'l32': (7, 6e-4), 'l': (14, 4e-4), 'h': (14, 3e-4)}


def get_config(arg: str = 'b16'):
    """Config of MODEL[,DATASET], for example 'b16' or 'l16,imagenet21k'."""
    name, _, dataset = arg.partition(',')
    dataset = dataset or 'imagenet2012'
    numbers = variants.get(name)
    if dataset not in DATASETS:
        raise UserError(f'unknown data set {dataset!r}. '
                        f'{variants.nearest_names(dataset, list(DATASETS))}This file has recipes '
                        f'for {", ".join(DATASETS)}; for your own data take jft and add '
                        '--config.dataset.name=DIRECTORY_OR_TFDS_NAME.')
    size = re.match(r'so400m|\D+', name).group()
    row = NEAREST.get(size, size)
    config = base()
    config.recipe = f'ViT table 3, {row.upper()} on {dataset}'
    if row != size:
        config.recipe += f' (the table has no row for {name}, this is the nearest)'
    config.batch_size = 4096
    config.model.update(numbers, dtype='bfloat16', dropout_rate=0.1,
                        representation_size=numbers['hidden_size'])
    config.optimizer.update(name='adam', b1=0.9, b2=0.999, warmup_steps=10_000)
    {'imagenet2012': imagenet2012, 'imagenet21k': imagenet21k, 'jft': jft}[dataset](config)
    if dataset == 'jft':
        epochs, config.optimizer.learning_rate = JFT.get(name, JFT[row])
        config.num_epochs = float(epochs)
    return config


def imagenet2012(config):
    """ImageNet-1k: the same for every model."""
    config.num_epochs = 300.0
    config.dataset.update(name='imagenet2012', num_examples=1_281_167, num_classes=1000)
    config.optimizer.update(learning_rate=3e-3, schedule='cosine', weight_decay=0.3, clip_norm=1.0)


def imagenet21k(config):
    """ImageNet-21k, which is not in TFDS: prepare it yourself or give a directory as name.

    L also ran for 30 epochs. 51,200 examples are held out for evaluation.
    """
    config.num_epochs = 90.0
    config.dataset.update(name='imagenet21k', num_examples=14_197_122 - 51_200, num_classes=21_843,
                          train_split='train[51200:]', eval_split='train[:51200]')
    config.optimizer.update(learning_rate=1e-3, schedule='linear', end_learning_rate=1e-5,
                            weight_decay=0.03)
    config.loss.name = 'sigmoid'
    config.model.head_bias_init = -10.0


def jft(config):
    """JFT-300M, or any large set of the user's: its name, sizes and splits are theirs to give."""
    config.dataset.update(name='jft', eval_split='test')
    config.model.dropout_rate = 0.0
    config.optimizer.update(schedule='linear', weight_decay=0.1)
