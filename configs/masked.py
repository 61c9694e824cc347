"""Self-supervised pre-training by masked patch prediction: ViT section 4.6 and appendix B.1.2.

    python -m vit_jax.main --config=configs/masked.py:b16 --config.dataset.name=DIR --workdir=DIR
    python -m vit_jax.main --config=configs/finetune.py:b16,imagenet2012 --config.model.pool=gap \
        --config.pretrained=DIR --workdir=OTHER

The argument is MODEL. Half of the patches are masked, and the model predicts the mean colour of
each masked patch, with 3 bits for each channel. The paper's other targets are
--config.masked.target=small_patch and pixels, and its other rate is --config.masked.rate=0.15. The
paper trains on JFT-300M for 1,000,000 steps; 100,000 steps are nearly as good
(--config.num_steps=100000). The paper states no weight decay. Published accuracy of B/16 on
ImageNet after fine-tuning: 79.9, 2 points above training from scratch and 4 below pre-training with
labels.

This recipe differs in two ways. There is no class token, so fine-tuning uses the mean of the
tokens. A masked patch may be replaced by another patch of the same image; the paper does not state
the image. As for every data set, the images are in class folders, but their labels are not used.
"""

from vit_jax.config import base


def get_config(name: str = 'b16'):
    """Returns the config of a model."""
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
