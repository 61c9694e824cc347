"""Pre-training with augmentation and regularisation: "How to train your ViT?" (arXiv 2106.10270).

    python -m vit_jax.main --config=configs/augreg.py:b16 --config.dataset.name=DIR --workdir=DIR
    python -m vit_jax.main --config=configs/augreg.py:s16,imagenet2012 --workdir=DIR
    python -m vit_jax.main --config=configs/augreg.py:b16,imagenet21k,strong2 --workdir=DIR

The argument is MODEL[,DATASET[,LEVEL]]. DATASET is imagenet21k (default) or imagenet2012, and LEVEL
is one of the paper's seven levels of augmentation. On imagenet21k, the default level, weight decay,
dropout and stochastic depth come from the released checkpoint with the best pre-training metrics
(README of vision_transformer). On imagenet2012, the default level comes from big_vision's
configs/vit_i1k.py.

The paper also tries --config.model.dropout_rate=0.1 --config.model.stochastic_depth_rate=0.1, which
helps B and L on imagenet2012 (figure 4), and --config.optimizer.weight_decay=0.03.

Published ImageNet accuracy of the imagenet21k checkpoints, fine-tuned at 384 px: L/16 85.59, B/16
85.49, S/16 83.73, Ti/16 78.22, B/32 83.59, S/32 79.58, R50+L/32 85.99, R26+S/32 83.85, R+Ti/16
75.40.

`python -m benchmarks.certificate --fields --recipes=augreg_imagenet21k,augreg_imagenet2012` lists
every field of the sources, big_vision's vit_i21k.py and vit_i1k.py. These differ:
- vit_i21k.py is newer than the paper. It pools by averaging, --config.model.pool=gap, and has other
  levels for B/32, B/16 (light2) and L/16 (medium2). The released checkpoints, whose accuracy is
  above, have a class token and the levels of this file.
- MixUp mixes the whole batch, not the batch of each device.
- Evaluation resizes by bilinear interpolation, not by averaging areas, and learned position
  embeddings start with smaller values (docs/explanation/traps.md).
- Matrix products are in bfloat16 on machines that compute it faster.
- Few-shot accuracy is off. The sources measure it on six TFDS data sets every 25,000 and 10,000
  steps; config.evals.fewshot measures it on one data set at every evaluation.
- Training evaluates one split. `vit_jax.evaluate` scores the other splits of the sources
  afterwards.

The shuffle buffer of 250,000 examples of TFDS's tfrecord files takes up to 80 GB of host memory
(docs/reference/data.md, "Memory of the shuffle window"); --config.dataset.shuffle_buffer=16384
takes 5 GB.
"""

from vit_jax.config import base
from vit_jax.errors import UserError, check_choice

# By level: number and magnitude of RandAugment operations, alpha of MixUp.
LEVELS = {
    'none': (0, 0, 0.0),
    'light1': (2, 0, 0.0),
    'light2': (2, 10, 0.2),
    'medium1': (2, 15, 0.2),
    'medium2': (2, 15, 0.5),
    'strong1': (2, 20, 0.5),
    'strong2': (2, 20, 0.8),
}
# By data set and model: level, weight decay, rate of dropout and stochastic depth.
BEST = {
    'imagenet21k': {
        'l16': ('strong1', 0.1, 0.0),
        'b16': ('medium1', 0.1, 0.0),
        's16': ('light1', 0.03, 0.0),
        'ti16': ('none', 0.03, 0.0),
        'b32': ('light1', 0.1, 0.0),
        's32': ('none', 0.1, 0.0),
        'r50_l32': ('medium1', 0.1, 0.1),
        'r26_s32': ('light1', 0.1, 0.0),
        'r_ti16': ('none', 0.03, 0.0),
    },
    'imagenet2012': {
        'l16': ('medium2', 0.1, 0.0),
        'b16': ('medium2', 0.1, 0.0),
        's16': ('medium2', 0.1, 0.0),
        'ti16': ('light1', 0.1, 0.0),
        'b32': ('medium2', 0.1, 0.0),
        's32': ('medium1', 0.1, 0.0),
    },
}


def get_config(arg: str = 'b16'):
    """Returns the config of MODEL[,DATASET[,LEVEL]], for example 's16,imagenet2012,medium1'."""
    name, _, rest = arg.partition(',')
    dataset, _, level = rest.partition(',')
    dataset = dataset or 'imagenet21k'
    config = base(name)
    check_choice('the data set', dataset, BEST)
    if not level and name not in BEST[dataset]:
        raise UserError(
            f'no level of augmentation is published for {name} on {dataset}: choose one '
            f'of {", ".join(LEVELS)}, as in --config=configs/augreg.py:{name},'
            f'{dataset},medium1.',
            kind='missing',
            field='the level of augmentation',
        )
    best, weight_decay, rate = BEST[dataset].get(name, ('', 0.1, 0.0))
    level = level or best
    check_choice('the level of augmentation', level, LEVELS)
    config.recipe = f'AugReg {level}, {name} on {dataset}'
    config.num_epochs = 300.0
    config.batch_size = 4096
    config.model.update(dropout_rate=rate, stochastic_depth_rate=rate, dtype='auto')
    num_ops, magnitude, mixup = LEVELS[level]
    config.augment.update(mixup=mixup, mixup_with='next')
    config.augment.randaugment.update(num_ops=num_ops, magnitude=magnitude)
    config.preprocess.update(fit='cover', crop_ratio=0.875, antialias=False)
    config.loss.name = 'sigmoid'
    config.optimizer.update(
        name='adam',
        b1=0.9,
        b2=0.999,
        mu_dtype='bfloat16',
        clip_norm=1.0,
        learning_rate=1e-3,
        schedule='cosine',
        warmup_steps=10_000,
        weight_decay=weight_decay,
    )
    if dataset == 'imagenet21k':  # TFDS does not have it, see configs/vit.py
        config.dataset.update(
            name='imagenet21k',
            num_classes=21_843,
            num_examples=14_197_122 - 51_200,
            train_split='train[51200:]',
            eval_split='train[25600:51200]',
            test_split='train[:25600]',
        )
        config.model.head_bias_init = -10.0
        config.eval_every = 1000
    else:
        config.dataset.update(
            name='imagenet2012',
            train_split='train[:99%]',
            num_examples=1_268_355,
            eval_split='train[99%:]',
            test_split='validation',
            num_classes=1000,
        )
        config.model.update(head_bias_init=-6.9, representation_size=config.model.hidden_size)
        config.eval_every = 2500
    config.dataset.shuffle_buffer = 250_000
    config.log_every = 50
    return config
