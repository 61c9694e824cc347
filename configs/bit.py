"""Fine-tuning by BiT-HyperRule (arXiv 1912.11370, section 3.3): a rule in place of a search.

    python -m vit_jax.main --config=configs/bit.py:r50x1,cifar10 --config.pretrained=WEIGHTS \
        --workdir=DIR
    python -m vit_jax.main --config=configs/bit.py:r50x1,directory,3000,224 \
        --config.pretrained=WEIGHTS --config.dataset.name=DATA --workdir=DIR

WEIGHTS is a file or directory of any layout of docs/conversion.md, hf:ORGANISATION/NAME, timm:NAME
or a workdir. The argument is MODEL,DATASET, or MODEL,directory,IMAGES,SIDE: the number of training
images, and the side in pixels that they usually have, the root of the area if they are not square.
From these two the rule takes resolution, length and MixUp, as big_transfer's bit_hyperrule.py does;
all else is fixed: SGD with momentum 0.9, learning rate 0.003, batch 512, no weight decay.
That code resizes large images to 512 px and crops 480, the paper to 448 and 384 but for its largest
model: --config.image_size=384 --config.augment.crop_ratio=0.857143 is the latter. Images are
mirrored at random, as in the paper and its PyTorch code; input_pipeline_tf2_or_jax.py mirrors all.
That code evaluates at the end alone, on the test split; here a held-out part of train is evaluated
ten times. `python -m benchmarks.certificate --fields --recipes=bit` lists all of its settings. On
imagenet2012 the window of 200,000 examples of tfrecord files takes up to 65 GB of host memory
(docs/training.md, "Data").
Published accuracy of BiT-M fine-tuned so, but with batch 128 and learning rate 0.001: R50x1 97.3 on
CIFAR-10 and 86.4 on CIFAR-100, R152x2 98.5 and 91.2 (README of big_transfer, JAX).
"""

from vit_jax.config import base
from vit_jax.errors import UserError, nearest_names

# Images of all of train (TFDS), their side in pixels (bit_hyperrule.py), the share of train that is
# held out (per cent: big_transfer's of CIFAR and ImageNet, of others ViT's table 4), test split.
DATASETS = {
    'cifar10': (50_000, 32, 2, 'test'),
    'cifar100': (50_000, 32, 2, 'test'),
    'oxford_iiit_pet': (3_680, 224, 10, 'test'),
    'oxford_flowers102': (1_020, 224, 10, 'test'),
    'imagenet2012': (1_281_167, 224, 1, 'validation'),
}
SMALL_SIDE = 96
# Up to so many images: steps, those of the warm-up, when the rate falls to a tenth, MixUp.
SCHEDULES = (
    (20_000, 500, 100, (0.4, 0.6, 0.8), 0.0),
    (500_000, 10_000, 500, (0.3, 0.6, 0.9), 0.1),
    (float('inf'), 20_000, 500, (0.3, 0.6, 0.9), 0.1),
)


def get_config(arg: str = 'r50x1,cifar10'):
    """The config of MODEL,DATASET or MODEL,directory,IMAGES,SIDE."""
    name, _, rest = arg.partition(',')
    dataset, *numbers = rest.split(',')
    config = base(name)
    config.recipe = f'BiT-HyperRule, {name} on {dataset}'
    if dataset == 'directory':  # which the user names, as its splits
        num_examples, side = _given(numbers)
        config.dataset.update(name='', train_split='train', eval_split='', test_split='test')
    elif dataset in DATASETS:
        if numbers:
            raise UserError(
                f'after {name},{dataset} stands {",".join(numbers)!r}: expected '
                'nothing, because the sizes of that set are known here.'
            )
        num_examples, side, held_out, test_split = DATASETS[dataset]
        config.dataset.update(
            name=dataset,
            train_split=f'train[:{100 - held_out}%]',
            eval_split=f'train[{100 - held_out}%:]',
            test_split=test_split,
        )
    else:
        raise UserError(
            f'unknown data set {dataset!r}. '
            f'{nearest_names(dataset, [*DATASETS, "directory"])}This file knows '
            f'{", ".join(DATASETS)}; for other data take MODEL,directory,IMAGES,SIDE '
            'and add --config.dataset.name=DIRECTORY_OR_TFDS_NAME.'
        )
    larger, crop = (160, 128) if side < SMALL_SIDE else (512, 480)
    steps, warmup, boundaries, mixup = next(
        rest for limit, *rest in SCHEDULES if num_examples < limit
    )
    config.num_steps = steps
    config.batch_size = 512
    config.accum_steps = 0  # in as few parts as fit in memory; on a CPU no fewer than are fastest
    config.image_size = (crop,) * 2
    config.augment.update(crop='resize', crop_ratio=crop / larger, mixup=mixup)
    # The whole image is squashed in evaluation; mean and standard deviation are the weights'.
    config.preprocess.update(fit='squash', crop_ratio=1.0, resize='bilinear', antialias=False)
    if dataset == 'directory':  # as Pillow and transformers, for models that others run
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
    config.log_every = 0 if dataset == 'directory' else 20
    config.eval_every = max(steps // 10, 50)
    config.checkpoint_every = max(steps // 10, 50)
    return config


def _given(numbers):
    """(images, side) from their texts."""
    if len(numbers) != 2 or not all(x.isdecimal() and int(x) for x in numbers):
        raise UserError(
            f'after MODEL,directory stands {",".join(numbers)!r}: expected the number '
            'of training images and their side in pixels, as in '
            '--config=configs/bit.py:r50x1,directory,3000,224, by which the rule '
            'decides.'
        )
    return map(int, numbers)
