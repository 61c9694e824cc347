"""Real training in minutes on a laptop: scikit-learn's handwritten digits.

    make quickstart
    python -m vit_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

1,437 training and 360 test images of 8x8 pixels, written by 43 people, shown at 16x16 with random
crops that move and stretch them; a ViT of 4 layers on 4x4 patches. Expected: 98 % eval accuracy
after two minutes of training on 2 CPU cores (measured: docs/results.md).
"""

from vit_jax.config import base


def get_config():
    """The quickstart run."""
    config = base()
    config.recipe = 'handwritten digits, a small ViT'
    config.batch_size = 128
    config.num_steps = 1600
    config.image_size = (16, 16)
    config.dataset.update(name='digits', eval_split='test')
    config.augment.update(crop='inception', min_area=0.5, flip=False)
    config.preprocess.crop_ratio = 1.0
    config.model.update(patch_size=(4, 4), hidden_size=64, num_layers=4, mlp_dim=128, num_heads=4)
    config.optimizer.update(learning_rate=3e-3, warmup_steps=80, weight_decay=0.05, clip_norm=1.0)
    config.log_every = 100
    config.eval_every = 400
    config.checkpoint_every = 400
    return config
