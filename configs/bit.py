"""Fine-tuning by BiT-HyperRule (arXiv 1912.11370, section 3.3): a rule replaces a search.

    python -m vit_jax.main --config=configs/bit.py:r50x1,cifar10 --config.pretrained=WEIGHTS \
        --workdir=DIR
    python -m vit_jax.main --config=configs/bit.py:r50x1,directory,3000,224 \
        --config.pretrained=WEIGHTS --config.dataset.name=DATA --workdir=DIR

WEIGHTS is a file or directory of any layout in docs/reference/layouts.md, hf:ORGANISATION/NAME,
timm:NAME or a workdir. The argument is MODEL,DATASET, or MODEL,directory,IMAGES,SIDE with the
number of training images and their usual side in pixels (the root of the area, if they are not
square). The rule derives the resolution, the length and MixUp from these two numbers, as
big_transfer's bit_hyperrule.py does. The other settings are fixed: SGD with momentum 0.9, learning
rate 0.003, batch 512, no weight decay.

Published accuracy of BiT-M, fine-tuned in this way but with batch 128 and learning rate 0.001:
R50x1 97.3 on CIFAR-10 and 86.4 on CIFAR-100, R152x2 98.5 and 91.2 (README of big_transfer, JAX).

`python -m benchmarks.certificate --fields --recipes=bit` lists every setting of big_transfer. These
differ:
- big_transfer and this file resize large images to 512 px and crop 480 px. The paper uses 448 and
  384 px for all models except its largest; --config.image_size=384
  --config.augment.crop_ratio=0.857143 does the same.
- Images are mirrored at random, as in the paper and its PyTorch code; input_pipeline_tf2_or_jax.py
  mirrors all images.
- big_transfer evaluates only at the end, on the test split; this recipe evaluates a held-out part
  of train ten times.

On imagenet2012 the shuffle buffer of 200,000 examples of tfrecord files takes up to 65 GB of host
memory (docs/reference/data.md, "Memory of the shuffle window").
"""

from vit_jax.config import base
from vit_jax.errors import UserError, nearest_names

# By data set: number of images in train (TFDS); their side in pixels (bit_hyperrule.py); percentage
# of train held out (big_transfer for CIFAR and ImageNet, otherwise ViT table 4); test split.
DATASETS = {
    'cifar10': (50_000, 32, 2, 'test'),
    'cifar100': (50_000, 32, 2, 'test'),
    'oxford_iiit_pet': (3_680, 224, 10, 'test'),
    'oxford_flowers102': (1_020, 224, 10, 'test'),
    'imagenet2012': (1_281_167, 224, 1, 'validation'),
}
SMALL_SIDE = 96
# Upper limit of the number of images; steps; warm-up steps; shares of the run after which the
# learning rate falls to a tenth; alpha of MixUp.
SCHEDULES = (
    (20_000, 500, 100, (0.4, 0.6, 0.8), 0.0),
    (500_000, 10_000, 500, (0.3, 0.6, 0.9), 0.1),
    (float('inf'), 20_000, 500, (0.3, 0.6, 0.9), 0.1),
)


def get_config(arg: str = 'r50x1,cifar10'):
    """Returns the config of MODEL,DATASET or MODEL,directory,IMAGES,SIDE."""
    name, _, rest = arg.partition(',')
    dataset, *numbers = rest.split(',')
    config = base(name)
    config.recipe = f'BiT-HyperRule, {name} on {dataset}'
    num_examples, side = _set_data(config, name, dataset, numbers)
    resized = 512
    crop = 480
    if side < SMALL_SIDE:
        resized = 160
        crop = 128
    steps, warmup, boundaries, mixup = next(
        rest for limit, *rest in SCHEDULES if num_examples < limit
    )
    config.num_steps = steps
    config.batch_size = 512
    config.accum_steps = 0  # 0: more parts if the batch does not fit in memory
    config.image_size = (crop, crop)
    config.augment.update(crop='resize', crop_ratio=crop / resized, mixup=mixup)
    # Evaluation squashes the whole image; mean and standard deviation come from the weights.
    config.preprocess.update(fit='squash', crop_ratio=1.0, resize='bilinear', antialias=False)
    if dataset == 'directory':  # programs that run the exported model resize with Pillow
        config.preprocess.update(antialias=True, uint8_resize=True)
    config.transfer.take = ('preprocess.mean', 'preprocess.std')
    if 'gelu' in config.model:
        config.transfer.take += ('model.gelu', 'model.layer_norm_epsilon')
        if crop % config.model.patch_size[0]:
            config.model.partial_patches = 'drop'
    if config.model.get('resnet'):
        config.transfer.take += tuple(
            f'model.resnet.{field}'
            for field in ('group_norm_epsilon', 'weight_epsilon', 'weight_epsilon_on')
        )
    config.optimizer.update(
        name='sgd',
        momentum=0.9,
        learning_rate=0.003,
        weight_decay=0.0,
        clip_norm=0.0,
        warmup_steps=warmup,
        schedule='staircase',
        staircase_boundaries=boundaries,
        staircase_factor=0.1,
    )
    config.dataset.shuffle_buffer = 200_000
    config.log_every = 20
    if dataset == 'directory':
        config.log_every = 0  # a twentieth of the run
    config.eval_every = max(steps // 10, 50)
    config.checkpoint_every = max(steps // 10, 50)
    return config


def _set_data(config, name, dataset, numbers):
    """Sets the data set and its splits; returns the number of training images and their side."""
    if dataset == 'directory':  # the user gives its name and splits
        num_examples, side = _parse_sizes(numbers)
        config.dataset.update(name='', train_split='train', eval_split='', test_split='test')
        return num_examples, side
    if dataset not in DATASETS:
        raise UserError(
            f'unknown data set {dataset!r}. '
            f'{nearest_names(dataset, [*DATASETS, "directory"])}This file has recipes for '
            f'{", ".join(DATASETS)}; for other data use MODEL,directory,IMAGES,SIDE '
            'and add --config.dataset.name=DIRECTORY_OR_TFDS_NAME.',
            kind='choice',
            field='the data set',
            value=dataset,
        )
    if numbers:
        raise UserError(
            f'unexpected {",".join(numbers)!r} after {name},{dataset}: the recipe knows the '
            'sizes of this data set.',
            kind='value',
            field='the argument',
            value=','.join(numbers),
        )
    num_examples, side, held_out, test_split = DATASETS[dataset]
    config.dataset.update(
        name=dataset,
        train_split=f'train[:{100 - held_out}%]',
        eval_split=f'train[{100 - held_out}%:]',
        test_split=test_split,
    )
    return num_examples, side


def _parse_sizes(numbers):
    """Parses the number of images and their side."""
    if len(numbers) != 2 or not all(x.isdecimal() and int(x) for x in numbers):
        raise UserError(
            f'the sizes after MODEL,directory are {",".join(numbers)!r}: expected the number '
            'of training images and their side in pixels, as in '
            '--config=configs/bit.py:r50x1,directory,3000,224. The rule needs both.',
            kind='value',
            field='the argument',
            value=','.join(numbers),
        )
    num_examples, side = map(int, numbers)
    return num_examples, side
