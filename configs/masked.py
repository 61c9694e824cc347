"""Self-supervised pre-training by masked patch prediction: ViT section 4.6 and appendix B.1.2.

    python -m vit_jax.main --config=configs/masked.py:b16 --config.dataset.name=DIR --workdir=DIR
    python -m vit_jax.main --config=configs/finetune.py:b16,imagenet2012 --config.model.pool=gap \
        --config.pretrained=DIR --workdir=OTHER

The argument is MODEL. Half of the patches are hidden, and the mean colour of each is
predicted, 3 bits for each channel; the paper's other targets are --config.masked.target=small_patch
and pixels, its other rate --config.masked.rate=0.15. It trained on JFT-300M for 1,000,000 steps, of
which 100,000 gave nearly as much (--config.num_steps=100000), and names no decay. Published
accuracy of B/16 on ImageNet, fine-tuned: 79.9, which is 2 points above training from scratch and 4
below pre-training with labels.
Ours differs in two ways: there is no class token, so fine-tuning takes the mean of the tokens, and
another patch that takes the place of a hidden one is of the same image, where the paper does not
say which. The images need class folders, as any data set here, whose labels are not used.
"""

from vit_jax.config import base


def get_config(name: str = 'b16'):
    """The config of a model."""
    config = base(name)
    config.recipe = f'ViT B.1.2, masked patches, {name}'
    config.batch_size = 4096
    config.num_steps = 1_000_000
    config.masked.update(target='mean_color', rate=0.5)
    config.model.update(pool='gap', dtype='auto')
    config.dataset.update(name='jft', eval_split='test')
    config.preprocess.update(fit='squash', crop_ratio=1.0, antialias=False)
    config.optimizer.update(
        name='adam',
        b1=0.9,
        b2=0.999,
        learning_rate=2e-4,
        warmup_steps=10_000,
        schedule='cosine',
        weight_decay=0.0,
    )
    return config
