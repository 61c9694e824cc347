"""The shape of a transformer: depth, width, MLP and patches scaled one by one (ViT appendix D.2).

    python -m vit_jax.main --config=configs/scaling.py --config.dataset.name=DIR --workdir=DIR
    python -m vit_jax.main --config=configs/scaling.py:depth,64 --config.dataset.name=DIR \
        --workdir=DIR
    python -m vit_jax.plan --config=configs/scaling.py:all,2 --chip=v5p --devices=64 \
        --config.dataset.num_examples=303000000 --config.dataset.num_classes=18291

The argument is DIMENSION,VALUE: one of depth (layers), width (numbers of a token), mlp (hidden
numbers of the MLP) and patch (pixels), the others being those of the base; or all,FACTOR. Without
an argument it is the base, where all lines of figure 8 meet: 8 layers, width 1024, MLP 2048, patch
32. Few-shot accuracy on ImageNet, 5 examples of each class, is measured at every evaluation, and
--config.evals.fewshot.shots= leaves it out.
Figure 8 prints no numbers. The text states that depth helps most, up to 64 layers, but less from 16
on, and width least, and that smaller patches help without further parameters. FLOPs of the forward
pass, of the base's: depth,16 2.05, depth,64 8.34, width,2048 2.97, mlp,8192 2.36, patch,16 3.92,
all,2 32.0.
The appendix states neither the other values nor the heads, the data, the training and what "all"
is. Here a head has 64 numbers, as in B and L; "all" multiplies layers, width and MLP by FACTOR and
divides the side of the patches by it; the data are JFT-300M and the training of every shape is that
of L/32, the nearest in table 3; the examples of few-shot are drawn from a twentieth of ImageNet's
training images.
"""

from vit_jax.config import base
from vit_jax.errors import UserError, check_choice

BASE = {'depth': 8, 'width': 1024, 'mlp': 2048, 'patch': 32}
HEAD_DIM = 64


def get_config(arg: str = ''):
    """The config of DIMENSION,VALUE, for example 'depth,64', of 'all,FACTOR' or of the base."""
    shape = scaled(arg)
    config = base('l32')
    config.recipe = f'ViT D.2, {arg or "the base"}'
    config.model.update(
        num_layers=shape['depth'],
        hidden_size=shape['width'],
        mlp_dim=shape['mlp'],
        patch_size=(shape['patch'],) * 2,
        num_heads=max(1, shape['width'] // HEAD_DIM),
        representation_size=shape['width'],
        head_bias_init=-10.0,
        dtype='auto',
    )
    # As configs/vit.py:l32,jft.
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
    """Depth, width, MLP and patch of an argument."""
    if not arg:
        return BASE
    dimension, _, text = arg.partition(',')
    check_choice('what is scaled', dimension, (*BASE, 'all'))
    value = int(text) if text.isdecimal() else 0
    if not value or (dimension == 'all' and BASE['patch'] % value):
        raise UserError(
            f'{arg!r} is no shape: expected a whole number of layers, numbers or '
            'pixels, as in depth,64 or width,2048, or all,2, all,4 or all,8.'
        )
    if dimension == 'all':
        return {name: x // value if name == 'patch' else x * value for name, x in BASE.items()}
    return BASE | {dimension: value}
