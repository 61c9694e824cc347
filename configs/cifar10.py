"""A small ViT from scratch on CIFAR-10, in 20 minutes on 2 CPU cores.

    python -m vit_jax.main --config=configs/cifar10.py --config.dataset.name=DIR --workdir=DIR

The data is TFDS's cifar10, or a directory DIR/{train,test}/CLASS/*.jpg. Expected: 61 % test
accuracy; measured time and curve in docs/results.md.
"""

from vit_jax.config import base


def get_config():
    """CIFAR-10 from scratch."""
    config = base()
    config.recipe = 'CIFAR-10, a small ViT'
    config.batch_size = 128
    config.num_epochs = 6.0
    config.image_size = (32, 32)
    config.dataset.update(name='cifar10', eval_split='test')
    config.augment.update(crop='pad', pad=4, flip=True)
    config.preprocess.crop_ratio = 1.0
    config.model.update(patch_size=(4, 4), hidden_size=128, num_layers=4, mlp_dim=256, num_heads=4,
                        unroll=4)  # on CPU faster than one layer at a time
    config.optimizer.update(learning_rate=2e-3, warmup_steps=300, weight_decay=0.05, clip_norm=1.0)
    config.log_every = 50
    config.eval_every = 800
    config.checkpoint_every = 500
    return config
