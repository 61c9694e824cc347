"""VTAB-1k: 19 tasks of 1,000 examples each (arXiv 1910.04867), as in ViT section 4.1 and table 4.

    python -m vit_jax.vtab --config=configs/vtab.py:b16 --config.pretrained=WEIGHTS --workdir=DIR
    python -m vit_jax.main --config=configs/vtab.py:b16,dtd --config.pretrained=WEIGHTS \
        --workdir=DIR

The first command runs all tasks, or the tasks of --tasks=dtd,svhn: it trains on the 1,000 examples
and scores the test split once. The second command, whose argument is MODEL,TASK, trains on the
first 800 examples and evaluates the other 200, to choose settings.

All tasks have the settings of configs/finetune.py:MODEL,vtab: 2,500 steps of 512 images, learning
rate 0.01, 384 px (appendix B.1.1). Published mean of 19 tasks, pre-trained on JFT-300M: H/14 77.63,
L/16 76.28; L/16 on ImageNet-21k 72.72 (table 2).

Images are prepared as in BiT (arXiv 1912.11370, section 3.3): they are resized to 448 px, cropped
at random to 384 px, and flipped at random. Evaluation squashes them to 384 px. BiT leaves out crop
and flip where they destroy the label, but does not list these tasks. In this file, images of
Structured tasks are only resized, because their labels are places, orientations, distances and
counts. Images of all other tasks, including the digits of SVHN, are cropped and flipped.

Names, labels, splits and numbers of classes come from data/*.py of google-research/task_adaptation.
Its train800val200 consists of the first 800 examples of the training split, in TFDS's order, and
the first 200 examples of `validation`. Without a `validation`, the 200 examples come from a
held-out part of train. Nothing is drawn at random.
"""

import os
import runpy

from vit_jax.errors import check_choice

# By task: group, TFDS name, label, 200 held-out examples, test split, number of classes.
TASKS = {
    'caltech101': ('Natural', 'caltech101:3.*.*', '', 'train[2754:2954]', 'test', 102),
    'cifar100': ('Natural', 'cifar100:3.*.*', '', 'train[45000:45200]', 'test', 100),
    'dtd': ('Natural', 'dtd:3.*.*', '', 'validation[:200]', 'test', 47),
    'oxford_flowers102': (
        'Natural',
        'oxford_flowers102:2.*.*',
        '',
        'validation[:200]',
        'test',
        102,
    ),
    # task_adaptation uses 3.*.*, which has corrupt images and which TFDS can no longer prepare.
    'oxford_iiit_pet': ('Natural', 'oxford_iiit_pet:4.*.*', '', 'train[2944:3144]', 'test', 37),
    'sun397': ('Natural', 'sun397/tfds:4.*.*', '', 'validation[:200]', 'test', 397),
    'svhn': ('Natural', 'svhn_cropped:3.*.*', '', 'train[65931:66131]', 'test', 10),
    'patch_camelyon': ('Specialized', 'patch_camelyon:2.*.*', '', 'validation[:200]', 'test', 2),
    'eurosat': ('Specialized', 'eurosat/rgb:2.*.*', '', 'train[16200:16400]', 'train[21600:]', 10),
    'resisc45': ('Specialized', 'resisc45:3.*.*', '', 'train[18900:19100]', 'train[25200:]', 45),
    'diabetic_retinopathy': (
        'Specialized',
        'diabetic_retinopathy_detection/btgraham-300:3.*.*',
        'label',
        'validation[:200]',
        'test',
        5,
    ),
    # The labels of CLEVR's test split are secret.
    'clevr_count': (
        'Structured',
        'clevr:3.*.*',
        'clevr_count',
        'train[63000:63200]',
        'validation',
        8,
    ),
    'clevr_distance': (
        'Structured',
        'clevr:3.*.*',
        'clevr_distance',
        'train[63000:63200]',
        'validation',
        6,
    ),
    'dmlab': ('Structured', 'dmlab:2.0.1', 'label', 'validation[:200]', 'test', 6),
    'dsprites_location': (
        'Structured',
        'dsprites:2.*.*',
        'label_x_position/16',
        'train[589824:590024]',
        'train[663552:]',
        16,
    ),
    'dsprites_orientation': (
        'Structured',
        'dsprites:2.*.*',
        'label_orientation/16',
        'train[589824:590024]',
        'train[663552:]',
        16,
    ),
    'kitti_distance': (
        'Structured',
        'kitti:3.1.0',
        'kitti_distance',
        'validation[:200]',
        'test',
        4,
    ),
    'smallnorb_azimuth': (
        'Structured',
        'smallnorb:2.*.*',
        'label_azimuth',
        'test[:200]',
        'test[50%:]',
        18,
    ),
    'smallnorb_elevation': (
        'Structured',
        'smallnorb:2.*.*',
        'label_elevation',
        'test[:200]',
        'test[50%:]',
        9,
    ),
}


def get_config(arg: str = 'b16,cifar100'):
    """Returns the config of MODEL,TASK."""
    model, _, task = arg.partition(',')
    check_choice('the task of VTAB in MODEL,TASK', task, TASKS)
    finetune = runpy.run_path(os.path.join(os.path.dirname(__file__), 'finetune.py'))
    config = finetune['get_config'](f'{model},vtab')
    group, name, label, held_out, test_split, num_classes = TASKS[task]
    config.recipe = f'ViT table 4, {model} on the VTAB-1k task {task}'
    config.dataset.update(
        name=name,
        label=label,
        train_split='train[:800]',
        eval_split=held_out,
        final_split=f'train[:800]+{held_out}',
        test_split=test_split,
        num_examples=800,
        num_classes=num_classes,
    )
    if group == 'Structured':
        config.augment.update(crop='none', flip=False)
    else:
        config.augment.update(crop='resize', crop_ratio=384 / 448, flip=True)
    return config


def get_tasks() -> dict[str, str]:
    """Returns the group of every task, for vit_jax.vtab."""
    return {task: group for task, (group, *_) in TASKS.items()}
