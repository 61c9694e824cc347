"""Distillation: "A good teacher is patient and consistent" (arXiv 2106.05237).

    python -m vit_jax.main --config=configs/distill.py --workdir=DIR
    python -m vit_jax.main --config=configs/distill.py:oxford_iiit_pet,fast \
        --config.teacher.weights=WEIGHTS --workdir=DIR

The argument is DATASET[,LENGTH]. DATASET is imagenet2012 (default), oxford_flowers102 or
oxford_iiit_pet; LENGTH, for the last two, is fast, medium (default) or long. The student, a BiT
ResNet-50x1, learns the probabilities of the teacher, a BiT ResNet-152x2, without labels. Both see
the same crop, mixed by MixUp with a uniform share. The teacher for ImageNet comes from the Hugging
Face hub. The teachers for the other data sets come from Google's public bucket, unless you
fine-tune your own. For another student, such as a ViT, add --config.teacher.weights=WEIGHTS to its
recipe, for example to --config=configs/plain.py:s16,300.

The numbers come from big_vision's configs/proj/distill (bit_i1k.py, bigsweep_flowers_pet.py).
Published accuracy on ImageNet: student 82.8, teacher 83.0 (README in the same folder; figure 1 and
table 1 of the paper have the epochs). 300 epochs take 15 hours on a TPU v3-32.

`python -m benchmarks.certificate --fields` lists every field of the sources. These differ:
- Evaluation resizes by bilinear interpolation, not by averaging areas (docs/explanation/traps.md).
- Activations are in bfloat16 on machines that compute it faster.
- Training evaluates the student on one split. The source also evaluates the teacher, the distance
  between the two, few-shot accuracy, and the student on other splits.

On imagenet2012 the shuffle buffer of 250,000 examples of TFDS's tfrecord files takes up to 80 GB of
host memory (docs/reference/data.md, "Memory of the shuffle window");
--config.dataset.shuffle_buffer=16384 takes 5 GB.
"""

from vit_jax.config import base
from vit_jax.errors import check_choice

TEACHER = 'timm:resnetv2_152x2_bit.goog_teacher_in21k_ft_in1k'
# By data set and length: epochs, temperature, learning rate, weight decay.
SMALL_SETS = {
    'oxford_flowers102': {
        'fast': (10_000, 10.0, 3e-3, 3e-4),
        'medium': (100_000, 1.0, 1e-3, 1e-4),
        'long': (1_000_000, 1.0, 3e-4, 1e-5),
    },
    'oxford_iiit_pet': {
        'fast': (1000, 5.0, 1e-2, 1e-3),
        'medium': (3000, 10.0, 3e-3, 3e-4),
        'long': (30_000, 2.0, 3e-3, 1e-5),
    },
}


def get_config(arg: str = 'imagenet2012'):
    """Returns the config of DATASET[,LENGTH], for example 'oxford_iiit_pet,fast'."""
    dataset, _, length = arg.partition(',')
    config = base('r50x1')
    config.recipe = f'patient and consistent teaching, {arg}'
    check_choice('the data set', dataset, ('imagenet2012', *SMALL_SETS))
    config.model.dtype = 'auto'
    config.augment.update(mixup=1.0, mixup_with='next')
    config.preprocess.update(fit='cover', antialias=False)
    config.optimizer.update(
        name='adam',
        b1=0.9,
        b2=0.999,
        mu_dtype='bfloat16',
        clip_norm=1.0,
        schedule='cosine',
        decay_scaling='schedule',
    )
    if dataset == 'imagenet2012':
        check_choice('the length', length, ('',))
        imagenet2012(config)
    else:
        length = length or 'medium'
        check_choice('the length', length, SMALL_SETS[dataset])
        small_set(config, dataset, *SMALL_SETS[dataset][length])
    config.teacher.image_size = config.get_oneway_ref(
        'image_size'
    )  # the teacher sees the same view
    return config


def imagenet2012(config):
    """Sets 1,200 epochs on 98 % of the training images at 224 px."""
    config.num_epochs = 1200.0
    config.batch_size = 4096
    config.image_size = (224, 224)
    config.teacher.update(weights=TEACHER, temperature=1.0)
    config.dataset.update(
        name='imagenet2012',
        train_split='train[:98%]',
        num_examples=1_255_544,
        eval_split='train[99%:]',
        test_split='validation',
        num_classes=1000,
        shuffle_buffer=250_000,
    )
    config.preprocess.crop_ratio = 224 / 256
    config.optimizer.update(learning_rate=0.03, weight_decay=3e-4, warmup_steps=5000)
    config.log_every = 50
    config.eval_every = 1000
    config.checkpoint_every = 1000
    config.keep_every = 20_000


def small_set(config, dataset, epochs, temperature, learning_rate, weight_decay):
    """Sets the fields of a small data set, with crops of 128 px."""
    config.num_epochs = float(epochs)
    config.batch_size = 512
    config.image_size = (128, 128)
    config.dataset.update(name=dataset, test_split='test', shuffle_buffer=50_000)
    if dataset == 'oxford_flowers102':
        teacher = 'R152x2_T_flowers128'
        config.dataset.update(train_split='train', eval_split='validation')
    else:
        teacher = 'R152x2_T_pet128'
        config.dataset.update(train_split='train[:90%]', eval_split='train[90%:]')
    config.teacher.update(weights=f'gs://bit_models/distill/{teacher}.npz', temperature=temperature)
    config.preprocess.crop_ratio = 128 / 160
    config.optimizer.update(
        learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=1500
    )
    config.log_every = 100
    config.eval_every = 500
    config.checkpoint_every = 2500
