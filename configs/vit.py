"""Pre-training from scratch as in the paper: ViT (arXiv 2010.11929) section 4.1 and table 3.

    python -m vit_jax.main --config=configs/vit.py:b16 --workdir=DIR
    python -m vit_jax.main --config=configs/vit.py:l16,imagenet21k --workdir=DIR
    python -m vit_jax.main --config=configs/vit.py:b32,jft --config.dataset.name=DIR --workdir=DIR

The argument is MODEL[,DATASET]. Published ImageNet top-1 accuracy after fine-tuning at 384 px
(table 5): pre-trained on imagenet2012 B/16 77.91, L/16 76.53; on imagenet21k B/16 83.97, L/16
85.15; on JFT-300M B/16 84.15, L/16 87.12, H/14 88.04.

Images are prepared as in vision_transformer: training uses a random crop, and evaluation squashes
the whole image to a square, by bilinear interpolation without antialiasing. Average pooling instead
of a class token, --config.model.pool=gap, needs --config.optimizer.learning_rate=3e-4 on JFT
(appendix D.3).

MODEL is any name in vit_jax/models/variants.py: ViTs, hybrids such as r50_b16, BiT ResNets such as
r50x1, axial_b16, axial_r50. Models without a row in table 3 use the nearest row, and the log says
so. Figure 13 compares the axial models with b16, b32 and r50x1 on JFT-300M by few-shot accuracy on
ImageNet (config.evals.fewshot, 5 shots).

`python -m benchmarks.certificate --fields` compares every number of the paper's table with this
file, and every field of big_vision's vit_i21k.py. The loss, the bias of the head and the held-out
images of imagenet21k come from vit_i21k.py, because the paper does not print them. The paper does
not state how images are shuffled or how often it evaluates; these fields have their defaults, not
big_vision's values.
"""

import re

from vit_jax.config import base
from vit_jax.errors import UserError, nearest_names
from vit_jax.models import variants

DATASETS = ('imagenet2012', 'imagenet21k', 'jft')
# JFT-300M: epochs and peak learning rate. L/16 and R50+L/16 also ran for 7 epochs, with lower
# accuracy.
JFT = {
    'b16': (7, 8e-4),
    'b32': (7, 8e-4),
    'l32': (7, 6e-4),
    'l16': (14, 4e-4),
    'h14': (14, 3e-4),
    'r50x1': (7, 1e-3),
    'r50x2': (7, 1e-3),
    'r101x1': (7, 8e-4),
    'r152x1': (7, 6e-4),
    'r152x2': (7, 6e-4),
    'r50_b16': (7, 8e-4),
    'r50_b32': (7, 8e-4),
    'r50_l32': (7, 2e-4),
    'r50_l16': (14, 4e-4),
}
# Epochs of a model that is not in table 3; R152x2 ran for 7 and for 14 epochs.
TABLE_6 = {'r200x3': 14}
# B/16 needs a smaller learning rate with average pooling than with a class token (appendix D.3).
GAP_LEARNING_RATE = 3e-4
# The models with a row in table 3. On ImageNet, one row covers all ViTs of the paper.
ROWS = {
    'imagenet2012': ('b16', 'b32', 'l16', 'l32', 'h14'),
    'imagenet21k': ('b16', 'b32', 'l16', 'l32'),
    'jft': tuple(JFT),
}
# A model without a row on JFT-300M uses the row of another model, by the size in its name.
NEAREST = {
    'ti': 'b16',
    's': 'b16',
    'b': 'b16',
    'l': 'l16',
    'h': 'h14',
    'g': 'h14',
    'G': 'h14',
    'so400m': 'h14',
    'r_ti': 'r50_b16',
    'r26_s': 'r50_b32',
    'r152x4': 'r152x2',
    'r200x3': 'r152x2',
    'axial_b': 'b16',
    'axial_r': 'r50x1',
}


def get_config(arg: str = 'b16'):
    """Returns the config of MODEL[,DATASET], for example 'b16' or 'r50_l32,imagenet21k'."""
    name, _, dataset = arg.partition(',')
    dataset = dataset or 'imagenet2012'
    config = base(name)
    if dataset not in DATASETS:
        raise UserError(
            f'unknown data set {dataset!r}. {nearest_names(dataset, DATASETS)}'
            f'This file has recipes for {", ".join(DATASETS)}; for your own data use '
            'jft and add --config.dataset.name=DIRECTORY_OR_TFDS_NAME.',
            kind='choice',
            field='the data set',
            value=dataset,
        )
    config.recipe = f'ViT table 3, {name} on {dataset}'
    if name not in ROWS[dataset]:
        config.recipe = f'ViT table 3, the nearest row for {name} on {dataset}, which has none'
    config.batch_size = 4096
    config.model.dtype = 'auto'
    config.preprocess.update(fit='squash', crop_ratio=1.0, antialias=False)
    if 'hidden_size' in config.model:
        config.model.update(dropout_rate=0.1, representation_size=config.model.hidden_size)
    config.optimizer.update(name='adam', b1=0.9, b2=0.999, warmup_steps=10_000)
    if dataset == 'imagenet2012':
        imagenet2012(config)
    elif dataset == 'imagenet21k':
        imagenet21k(config)
    else:
        jft(config, name)
    return config


def imagenet2012(config):
    """Sets the fields of ImageNet-1k, equal for every model."""
    config.num_epochs = 300.0
    config.dataset.update(name='imagenet2012', num_examples=1_281_167, num_classes=1000)
    config.optimizer.update(learning_rate=3e-3, schedule='cosine', weight_decay=0.3, clip_norm=1.0)


def imagenet21k(config):
    """Sets the fields of ImageNet-21k, which TFDS does not have.

    Prepare it yourself, or give a directory as dataset.name. L also ran for 30 epochs. 51,200
    examples are held out, as in big_vision's vit_i21k.py: half for evaluation during training, half
    for the end.
    """
    config.num_epochs = 90.0
    config.dataset.update(
        name='imagenet21k',
        num_examples=14_197_122 - 51_200,
        num_classes=21_843,
        train_split='train[51200:]',
        eval_split='train[25600:51200]',
        test_split='train[:25600]',
    )
    config.optimizer.update(
        learning_rate=1e-3, schedule='linear', end_learning_rate=1e-5, weight_decay=0.03
    )
    config.loss.name = 'sigmoid'
    config.model.head_bias_init = -10.0


def jft(config, name):
    """Sets the fields of JFT-300M, or of any large data set; the user gives its name and splits.

    Images may have several labels. Loss, bias of the head and the final learning rate are equal to
    ImageNet-21k.
    """
    config.dataset.update(name='jft', eval_split='test')
    config.optimizer.update(schedule='linear', end_learning_rate=1e-5, weight_decay=0.1)
    config.loss.name = 'sigmoid'
    config.model.head_bias_init = -10.0
    epochs, learning_rate = JFT[_nearest(name)]
    config.num_epochs = float(TABLE_6.get(name, epochs))
    config.optimizer.learning_rate = learning_rate
    if 'dropout_rate' in config.model:
        config.model.dropout_rate = 0.0
    if config.model.get('pool') == 'gap':
        config.optimizer.learning_rate = GAP_LEARNING_RATE


def _nearest(name):
    """Returns the model with a row on JFT-300M whose size is nearest."""
    if name in JFT:
        return name
    if name in variants.RESNETS:
        return NEAREST[name]
    size = re.match(r'so400m|.*[a-zG]', name).group()
    return NEAREST[size]
