"""Real training in about a minute on a laptop: scikit-learn's handwritten digits.

    make quickstart
    python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

1,437 training and 360 test images of 8x8 pixels, written by 43 people. A ViT of 6 layers on 2x2
patches. Expected: above 97 % eval accuracy.
"""

from vit_jax.config import base


def get_config():
    """The quickstart run."""
    config = base()
    config.recipe = 'digits, a small ViT on 2x2 patches'
    config.batch_size = 128
    config.num_steps = 800
    config.image_size = (8, 8)
    config.dataset.update(name='digits', eval_split='test')
    config.augment.update(crop='pad', pad=1, flip=False)
    config.preprocess.crop_ratio = 1.0
    config.model.update(patch_size=(2, 2), hidden_size=96, num_layers=6, mlp_dim=192, num_heads=3)
    config.optimizer.update(learning_rate=1e-3, warmup_steps=80, weight_decay=0.05, clip_norm=1.0)
    config.log_every = 50
    config.eval_every = 200
    config.checkpoint_every = 200
    return config
