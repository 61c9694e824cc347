"""A small ViT from scratch on CIFAR-10, in half an hour on 2 CPU cores.

    python -m vit_jax.main --config=configs/cifar10.py --config.dataset.name=DIR --workdir=DIR

The data are TFDS's cifar10, or a directory DIR/{train,test}/CLASS/*.jpg. The argument is hybrid
(default) or patches. The 64 tokens of hybrid come from the root of a ResNet; the tokens of patches
are patches of 4x4 pixels. Expected accuracy of hybrid on test: 76 %. RandAugment
(--config.augment.randaugment.num_ops=1) and MixUp (--config.augment.mixup=0.2) are off, because 16
epochs are too few for them. docs/results.md has the measured accuracies with and without them,
times and the curve.
"""

from vit_jax.config import base
from vit_jax.errors import check_choice
from vit_jax.models import variants


def get_config(tokens: str = 'hybrid'):
    """Returns the config of 'hybrid' or 'patches'."""
    check_choice('the argument', tokens, ('hybrid', 'patches'))
    config = base()
    config.recipe = f'CIFAR-10, a small ViT, {tokens}'
    config.batch_size = 128
    config.num_epochs = 16.0
    config.image_size = (32, 32)
    config.dataset.update(name='cifar10', eval_split='test')
    config.augment.update(crop='pad', pad=4, flip=True)
    config.augment.randaugment.update(magnitude=5.0, translate=14.0, cutout=6.0)  # for 32 px
    config.preprocess.crop_ratio = 1.0
    config.model.update(
        patch_size=(4, 4), hidden_size=128, num_layers=6, mlp_dim=256, num_heads=4, pool='gap'
    )
    if tokens == 'hybrid':
        root = dict(variants.hybrid_resnet(units=(), width=64), num_groups=8)
        config.model.update(patch_size=(1, 1), resnet=root)
    config.optimizer.update(learning_rate=2e-3, warmup_steps=300, weight_decay=0.05, clip_norm=1.0)
    config.eval_every = 800
    config.checkpoint_every = 500
    return config
