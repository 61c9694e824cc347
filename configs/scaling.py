"""The shape of a transformer: depth, width, MLP and patches scaled one by one (ViT appendix D.2).

    python -m vit_jax.main --config=configs/scaling.py --config.dataset.name=DIR --workdir=DIR
    python -m vit_jax.main --config=configs/scaling.py:depth,64 --config.dataset.name=DIR \
        --workdir=DIR
    python -m vit_jax.plan --config=configs/scaling.py:all,2 --chip=v5p --devices=64 \
        --config.dataset.num_examples=303000000 --config.dataset.num_classes=18291

The argument is DIMENSION,VALUE, which changes one dimension of the base, or all,FACTOR. DIMENSION
is depth (layers), width (hidden_size), mlp (mlp_dim) or patch (pixels). Without an argument the
shape is the base, where all lines of figure 8 meet: 8 layers, width 1024, MLP 2048, patch 32. Every
evaluation measures few-shot accuracy on ImageNet with 5 examples of each class;
--config.evals.fewshot.shots= switches it off.

Figure 8 prints no numbers. According to the text, depth helps most, up to 64 layers, but less from
16 layers on; width helps least; and smaller patches help without additional parameters. These are
the FLOPs of the forward pass, relative to the base:
depth,16 2.05, depth,64 8.34, width,2048 2.97, mlp,8192 2.36, patch,16 3.92, all,2 32.0.

The appendix does not state the other values, the heads, the data, the training or the meaning of
"all". In this file each head has 64 dimensions, as in B and L. "all" multiplies layers, width and
MLP by FACTOR and divides the side of the patches by it. The data are JFT-300M, and every shape
trains like L/32, the nearest row of table 3. Few-shot examples are drawn from a twentieth of
ImageNet's training images.
"""

from vit_jax.config import base
from vit_jax.errors import UserError, check_choice

BASE = {'depth': 8, 'width': 1024, 'mlp': 2048, 'patch': 32}
HEAD_DIM = 64


def get_config(arg: str = ''):
    """Returns the config of DIMENSION,VALUE, as in 'depth,64', of all,FACTOR or of the base."""
    shape = scaled(arg)
    config = base('l32')
    config.recipe = f'ViT D.2, {arg or "the base"}'
    config.model.update(
        num_layers=shape['depth'],
        hidden_size=shape['width'],
        mlp_dim=shape['mlp'],
        patch_size=(shape['patch'], shape['patch']),
        num_heads=max(1, shape['width'] // HEAD_DIM),
        representation_size=shape['width'],
        head_bias_init=-10.0,
        dtype='auto',
    )
    # The training of configs/vit.py:l32,jft.
    config.batch_size = 4096
    config.num_epochs = 7.0
    config.dataset.update(name='jft', eval_split='test')
    config.preprocess.update(fit='squash', crop_ratio=1.0, antialias=False)
    config.loss.name = 'sigmoid'
    config.optimizer.update(
        name='adam',
        b1=0.9,
        b2=0.999,
        learning_rate=6e-4,
        warmup_steps=10_000,
        schedule='linear',
        end_learning_rate=1e-5,
        weight_decay=0.1,
    )
    config.evals.fewshot.update(
        shots=(5,), dataset='imagenet2012', train_split='train[:5%]', test_split='validation'
    )
    return config


def scaled(arg):
    """Returns depth, width, MLP and patch of an argument."""
    if not arg:
        return BASE
    dimension, _, text = arg.partition(',')
    check_choice('the scaled dimension', dimension, (*BASE, 'all'))
    value = 0
    if text.isdecimal():
        value = int(text)
    if not value or (dimension == 'all' and BASE['patch'] % value):
        raise UserError(
            f'the shape is {arg!r}: expected a dimension and a whole number, as in depth,64 or '
            'width,2048, or all,2, all,4 or all,8.',
            kind='value',
            field='the shape',
            value=arg,
        )
    if dimension != 'all':
        return BASE | {dimension: value}
    return {
        'depth': BASE['depth'] * value,
        'width': BASE['width'] * value,
        'mlp': BASE['mlp'] * value,
        'patch': BASE['patch'] // value,
    }
