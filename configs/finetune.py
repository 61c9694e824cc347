"""Transfer of pre-trained weights to a smaller data set: ViT (arXiv 2010.11929), table 4.

    python -m vit_jax.main --config=configs/finetune.py:b16,cifar10 --config.pretrained=WEIGHTS \
        --workdir=DIR
    python -m vit_jax.main --config=configs/finetune.py:ti16,directory --config.pretrained=WEIGHTS \
        --config.dataset.name=DATA --workdir=DIR

WEIGHTS is a file or directory of any layout in docs/reference/layouts.md, hf:ORGANISATION/NAME,
timm:NAME or a workdir. The argument is MODEL,DATASET[,SIZE]. Training uses SGD with momentum 0.9,
batch 512, a cosine schedule, no weight decay, gradients clipped at norm 1, and images of 384 px.
The head is new and starts at zero. The learning rate is one value of the table's grid; `python -m
vit_jax.sweep` with the same options tries the whole grid.

Published accuracy:
- B/16, pre-trained on ImageNet-21k, at 384 px: 98.95 on CIFAR-10, 91.67 on CIFAR-100, 83.97 on
  ImageNet.
- Pre-trained on JFT-300M, with Polyak averaging (table 2): 87.76 on ImageNet for L/16 at 512 px
  (l16,imagenet2012,512), 88.55 for H/14 at 518 px (h14,imagenet2012,518).

Images are prepared as in vision_transformer: training uses a random crop, and evaluation squashes
the whole image to a square, by bilinear interpolation without antialiasing. For a directory the
interpolation is Pillow's, antialiased and rounded, so that programs that run the exported model see
the same pixels.

The paper has two grids for ImageNet. This file has the grid of table 4: 0.003, 0.01, 0.03 and 0.06
for all models. Appendix B.1.1 adds 0.06 only for ResNets and hybrids: for a ViT,
--config.optimizer.learning_rate=0.003,0.01,0.03 gives `vit_jax.sweep` that grid. For ResNets the
appendix also runs BiT's setup (configs/bit.py) and reports the better of the two.

`python -m benchmarks.certificate --fields` compares every field of vision_transformer's configs
vit.py and augreg.py with this file. These differ:
- Learning rate and steps come from the paper.
- Momentum is in float32. vision_transformer keeps it in bfloat16.
- Evaluation is on held-out images, ten times in a run, and not on the test split every 100 steps.
- Dropout is off for all models, as in augreg.py; the paper states no rate. vit.py has a rate of 0.1
  for L/16, H/14 and R50+B/16: --config.model.dropout_rate=0.1.
"""

from vit_jax.config import base
from vit_jax.errors import UserError, check_choice, nearest_names

SIZES = ('384', '512', '518')
AVERAGED = ('512', '518')  # the sizes with Polyak averaging
GRIDS = {  # of learning rates, by data set
    'imagenet2012': (0.003, 0.01, 0.03, 0.06),  # table 4
    'vtab': (0.01,),
}
GRID = (0.001, 0.003, 0.01, 0.03)  # for all other data sets

# By data set: steps, warm-up steps, percentage of train that is held out, test split, learning
# rate. The learning rate is the second value of the grid, or the third for a directory. The paper
# does not state the warm-up. vision_transformer has 500 steps, and 100 for runs of 500 steps
# (configs/common.py, augreg.py).
DATASETS = {
    'imagenet2012': (20_000, 500, 1, 'validation', 0.01),
    'cifar10': (10_000, 500, 2, 'test', 0.003),
    'cifar100': (10_000, 500, 2, 'test', 0.003),
    'oxford_iiit_pet': (500, 100, 10, 'test', 0.003),
    'oxford_flowers102': (500, 100, 10, 'test', 0.003),
    # Any 1,000 examples; the user sets dataset.name. configs/vtab.py has the 19 tasks of VTAB.
    'vtab': (2_500, 0, 0, 'test', 0.01),
    # Any images; the user sets dataset.name. The folder val, valid or validation is held out, or a
    # tenth of the images.
    'directory': (500, 100, 0, 'test', 0.01),
}


def get_config(arg: str = 'b16,cifar10'):
    """Returns the config of MODEL,DATASET[,SIZE], as in 'l16,imagenet2012' or 'ti16,directory'."""
    name, _, rest = arg.partition(',')
    dataset, _, size = rest.partition(',')
    config = base(name)
    if dataset not in DATASETS:
        raise UserError(
            f'unknown data set {dataset!r}. {nearest_names(dataset, DATASETS)}'
            f'This file has recipes for {", ".join(DATASETS)}; for your own data use '
            'MODEL,directory and add --config.dataset.name=DIRECTORY_OR_TFDS_NAME.',
            kind='choice',
            field='the data set',
            value=dataset,
        )
    steps, warmup, _, _, learning_rate = DATASETS[dataset]
    config.recipe = f'ViT table 4, {name} on {dataset}'
    config.batch_size = 512
    config.accum_steps = 0  # 0: more parts if the batch does not fit in memory
    config.num_steps = steps
    size = size or '384'
    check_choice('the size of images', size, SIZES)
    config.image_size = (int(size), int(size))
    if size in AVERAGED:
        config.ema_decay = 0.9999
    if name.endswith('14'):  # 27 x 27 patches; vision_transformer also drops the other 6 pixels
        config.model.partial_patches = 'drop'
    _set_splits(config, dataset)
    # As in vision_transformer, except mean and standard deviation, which the weights record.
    config.preprocess.update(fit='squash', crop_ratio=1.0, resize='bilinear', antialias=False)
    if dataset == 'directory':  # programs that run the exported model resize with Pillow
        config.preprocess.update(antialias=True, uint8_resize=True)
    config.transfer.take = ('preprocess.mean', 'preprocess.std')
    if 'gelu' in config.model:
        config.transfer.take += ('model.gelu', 'model.layer_norm_epsilon')
    if config.model.get('resnet'):
        config.transfer.take += tuple(
            f'model.resnet.{field}'
            for field in ('group_norm_epsilon', 'weight_epsilon', 'weight_epsilon_on')
        )
    config.optimizer.update(
        name='sgd',
        momentum=0.9,
        learning_rate=learning_rate,
        warmup_steps=warmup,
        clip_norm=1.0,
        weight_decay=0.0,
    )
    config.dataset.shuffle_buffer = 50_000
    config.log_every = 10
    if dataset == 'directory':
        config.log_every = 0  # a twentieth of the run
    config.eval_every = max(steps // 10, 50)
    config.checkpoint_every = max(steps // 10, 50)
    config.keep_best = True  # small data sets overfit; predict, evaluate and convert use the best
    return config


def _set_splits(config, dataset):
    """Sets the name and the splits of a data set."""
    _, _, held_out, test_split, _ = DATASETS[dataset]
    config.dataset.update(name=dataset, train_split='train', eval_split='', test_split=test_split)
    if dataset in ('vtab', 'directory'):
        config.dataset.name = ''  # the user sets it
    if held_out:
        config.dataset.update(
            train_split=f'train[:{100 - held_out}%]', eval_split=f'train[{100 - held_out}%:]'
        )
    if dataset == 'vtab':  # the first 1,000 examples (arXiv 1910.04867)
        config.dataset.update(
            train_split='train[:800]', eval_split='train[800:1000]', final_split='train[:1000]'
        )


def get_grid(arg: str = 'b16,cifar10') -> dict[str, tuple[float, ...]]:
    """Returns the values of a sweep for MODEL,DATASET[,SIZE], by dotted field (table 4)."""
    dataset = arg.partition(',')[2].partition(',')[0]
    return {'optimizer.learning_rate': GRIDS.get(dataset, GRID)}
