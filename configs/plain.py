"""ImageNet-1k from scratch: "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580).

    python -m vit_jax.main --config=configs/plain.py --workdir=DIR
    python -m vit_jax.main --config=configs/plain.py:s16,300 --workdir=DIR

The argument is MODEL[,EPOCHS]: 90 (default), 150 or 300 epochs. Published accuracy of S/16 on
validation: 76.5, 78.5 and 80.0 %. big_vision states 6 to 7 hours on a TPU v3-8 for 90 epochs. The
numbers come from big_vision's configs/vit_s16_i1k.py. Differences from table 3 of the ViT paper
(configs/vit.py): batch 1024, average pooling instead of a class token, fixed sine-cosine position
embeddings, RandAugment and MixUp, less weight decay, no dropout.

`python -m benchmarks.certificate --fields --recipes=plain` lists every field of the source. These
differ:
- Evaluation resizes by bilinear interpolation, not by averaging areas (docs/explanation/traps.md).
- MixUp mixes the whole batch, not the batch of each device.
- Matrix products are in bfloat16 on machines that compute it faster.
- Training evaluates train[99%:] only. The source also evaluates train[:2%], validation, ImageNet-v2
  and ReaL; `vit_jax.evaluate` scores them afterwards.

The shuffle buffer of 250,000 examples of TFDS's tfrecord files takes up to 80 GB of host memory
(docs/reference/data.md, "Memory of the shuffle window"); --config.dataset.shuffle_buffer=16384
takes 5 GB.
"""

from vit_jax.config import base
from vit_jax.errors import check_choice

EPOCHS = ('90', '150', '300')


def get_config(arg: str = 's16,90'):
    """Returns the config of MODEL[,EPOCHS], for example 's16,300'."""
    name, _, epochs = arg.partition(',')
    config = base(name)
    config.recipe = f'Better plain ViT baselines, {name}'
    epochs = epochs or '90'
    check_choice('the number of epochs', epochs, EPOCHS)
    config.num_epochs = float(epochs)
    config.batch_size = 1024
    config.dataset.update(
        name='imagenet2012',
        train_split='train[:99%]',
        num_examples=1_268_355,
        eval_split='train[99%:]',
        test_split='validation',
        num_classes=1000,
        shuffle_buffer=250_000,
    )
    config.model.update(
        pool='gap',
        position='sincos_2d',
        dtype='auto',
        representation_size=config.model.hidden_size,
    )
    config.augment.update(mixup=0.2, mixup_with='next')
    config.augment.randaugment.update(num_ops=2, magnitude=10)
    config.preprocess.update(fit='cover', crop_ratio=0.875, antialias=False)
    config.optimizer.update(
        name='adam',
        b1=0.9,
        b2=0.999,
        mu_dtype='bfloat16',
        clip_norm=1.0,
        learning_rate=1e-3,
        schedule='cosine',
        warmup_steps=10_000,
        weight_decay=1e-4,
        decay_scaling='schedule',
    )
    config.log_every = 50
    config.eval_every = 2500
    return config
