"""BiT's own pre-training of ResNets with SGD: arXiv 1912.11370, section 3.3.

    python -m vit_jax.main --config=configs/bit_pretrain.py:r50x1 --workdir=DIR
    python -m vit_jax.main --config=configs/bit_pretrain.py:r152x4,imagenet21k \
        --config.dataset.name=DATA --workdir=DIR
    python -m vit_jax.main --config=configs/bit_pretrain.py:r50x1,jft --config.num_epochs=7 \
        --config.dataset.name=DATA --workdir=DIR

The argument is MODEL[,DATASET]: imagenet2012 (default, BiT-S), imagenet21k (BiT-M) or jft (BiT-L).
configs/bit.py fine-tunes the result. Published ImageNet accuracy: R50x1 76.0 after training on
imagenet2012 alone (table 4); fine-tuned, R152x4 81.30, 85.39 and 87.54 from the three data sets
(tables 1 and 2), and R50x1 80.68 from imagenet21k (README of big_transfer). R152x4 on JFT-300M took
9,900 core-days of TPUv3 (ViT, table 2).

The ViT paper pre-trains ResNets with Adam instead, configs/vit.py:MODEL,jft, because Adam is better
on average after 7 epochs of JFT-300M and fine-tuning (appendix D.1, table 7):

                  R50x1: Adam    SGD    R152x2: Adam    SGD
    ImageNet            77.54  78.24           84.97  84.37
    CIFAR-10            97.67  97.46           99.06  99.07
    CIFAR-100           86.07  85.17           92.05  91.06
    Pets                91.11  91.00           95.37  94.79
    Flowers-102         94.26  92.06           98.62  99.32
    average             89.33  88.79           94.01  93.72

SGD used the hyperparameters of BiT. The paper does not state the boundaries of the schedule for 7
epochs; here they are at the same shares of a run of any length.

The BiT paper does not describe loss and evaluation. They come from big_vision's bit_i1k.py and
bit_i21k.py. JFT-300M uses the loss of ImageNet-21k, because its images may have several labels.
`python -m benchmarks.certificate --fields --recipes=bit_imagenet2012,bit_imagenet21k` lists every
field of these two files. If the paper and big_vision differ, this file has the number of the paper:
learning rate, boundaries, warm-up and weight decay, no gradient clipping, all training images of
ImageNet. Matrix products are in bfloat16 on machines that compute it faster. Few-shot accuracy is
off; big_vision measures it on six TFDS data sets every 25,000 steps.

The shuffle buffer of 250,000 examples of TFDS's tfrecord files takes up to 80 GB of host memory
(docs/reference/data.md, "Memory of the shuffle window"); --config.dataset.shuffle_buffer=16384
takes 5 GB.
"""

from vit_jax.config import base
from vit_jax.errors import check_choice

# By data set: epochs, and the epochs after which the learning rate falls to a tenth.
EPOCHS = {
    'imagenet2012': (90, (30, 60, 80)),
    'imagenet21k': (90, (30, 60, 80)),
    'jft': (40, (10, 23, 30, 37)),
}


def get_config(arg: str = 'r50x1'):
    """Returns the config of MODEL[,DATASET], for example 'r152x4,imagenet21k'."""
    name, _, dataset = arg.partition(',')
    dataset = dataset or 'imagenet2012'
    check_choice('the data set', dataset, EPOCHS)
    config = base(name)
    config.recipe = f'BiT pre-training, {name} on {dataset}'
    epochs, falls = EPOCHS[dataset]
    config.num_epochs = float(epochs)
    config.batch_size = 4096
    config.model.dtype = 'auto'
    config.preprocess.update(fit='cover', crop_ratio=0.875, antialias=False)
    config.optimizer.update(
        name='sgd',
        momentum=0.9,
        learning_rate=0.03 * 4096 / 256,
        warmup_steps=5000,
        schedule='staircase',
        staircase_factor=0.1,
        staircase_boundaries=tuple(epoch / epochs for epoch in falls),
        weight_decay=1e-4,
        decay_scaling='gradient',
    )
    config.dataset.shuffle_buffer = 250_000
    config.log_every = 50
    config.eval_every = 1000
    if dataset == 'imagenet2012':
        config.dataset.update(name=dataset, num_examples=1_281_167, num_classes=1000)
        return config
    config.loss.name = 'sigmoid'
    config.model.head_bias_init = -10.0
    if dataset == 'jft':  # or any large data set of the user
        config.dataset.update(name=dataset, eval_split='test')
    else:  # TFDS does not have imagenet21k, see configs/vit.py
        config.dataset.update(
            name=dataset,
            num_examples=14_197_122 - 51_200,
            num_classes=21_843,
            train_split='train[51200:]',
            eval_split='train[25600:51200]',
            test_split='train[:25600]',
        )
    return config
