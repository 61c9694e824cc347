"""A real training run in minutes on a laptop: scikit-learn's handwritten digits.

    make quickstart
    python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
    python -m vit_jax.main --config=configs/quickstart.py:hybrid --workdir=runs/hybrid

The data are 1,437 training and 360 test images of 8x8 pixels, written by 43 people. They are shown
at 16x16 pixels, with random crops that move and stretch them. The model is a ViT of 4 layers on 4x4
patches. Expected: 98 % accuracy on test after two minutes on 2 CPU cores (measured:
docs/results.md). The argument is a family of models: vit, hybrid, resnet, axial or axial_resnet,
each with a model small enough for a laptop.
"""

from vit_jax.config import base
from vit_jax.errors import check_choice
from vit_jax.models import variants

# By family: the name of a model, and the fields that get smaller values.
TRANSFORMER = dict(hidden_size=64, num_layers=4, mlp_dim=128, num_heads=4)
FAMILIES = {
    'vit': ('b16', dict(TRANSFORMER, patch_size=(4, 4))),
    'hybrid': (
        'r_ti16',
        dict(
            TRANSFORMER,
            patch_size=(1, 1),
            resnet=dict(variants.hybrid_resnet(units=(2,), width=32), num_groups=8),
        ),
    ),
    'resnet': (
        'r50x1',
        dict(resnet=dict(variants.bit_resnet(units=(1, 2), width=32), num_groups=8)),
    ),
    'axial': ('axial_b16', dict(TRANSFORMER, num_layers=2, patch_size=(4, 4))),
    'axial_resnet': (
        'axial_r50',
        dict(resnet=dict(variants.axial_resnet(units=(1, 2), width=32), num_groups=8)),
    ),
}


def get_config(family: str = 'vit'):
    """Returns the config of a family in FAMILIES."""
    check_choice('the model family', family, FAMILIES)
    name, smaller = FAMILIES[family]
    config = base(name)
    config.model.update(smaller)
    config.recipe = f'handwritten digits, a small {family}'
    config.batch_size = 128
    config.num_steps = 1600
    config.image_size = (16, 16)
    config.dataset.update(name='digits', eval_split='test')
    config.augment.update(crop='inception', min_area=0.5, flip=False)
    config.preprocess.crop_ratio = 1.0
    config.optimizer.update(learning_rate=3e-3, warmup_steps=80, weight_decay=0.05, clip_norm=1.0)
    config.eval_every = 400
    config.checkpoint_every = 400
    return config
