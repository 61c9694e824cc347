"""Every field of a run except the fields of its model: default, possible values and meaning.

The command line, the checks, --help and docs/reference/config.md are made from this table.
"""

import re

from vit_jax.fields import RATE, SIDES, SWITCH, TEXT, TEXTS, Field, number, one_of, several, whole
from vit_jax.models import masked, representation

_FILTERS = ('bilinear', 'bicubic', 'lanczos3', 'area')


def _parse_weight(text):
    """Parses 'balanced' or a number."""
    if text == 'balanced':
        return text
    return float(text)


_WEIGHTS = several(
    number(least=1e-9, most=1e9, or_else=0, earlier=number(least=0))._replace(parse=_parse_weight),
    'balanced, or numbers from 1e-9 to 1e9, or 0 but not all of them, one for each class, with '
    'commas between them',
)


def _are_weights(value, recorded):
    """Tells whether the value is possible for loss.class_weights."""
    if value in (('balanced',), ['balanced']):
        return True
    return _WEIGHTS.fits(value, recorded) and any(value) == bool(value)


def _is_subset(value):
    """Tells whether the value is possible for dataset.subset."""
    if not isinstance(value, str):
        return False
    return re.fullmatch(r'([1-9]\d*|\d+(\.\d+)?%)?', value) is not None


FIELDS = {  # by dotted name
    'recipe': Field('', TEXT, 'name and source of the recipe; logged at the start'),
    'seed': Field(
        0,
        whole(-(2**63), 2**63 - 1)._replace(words='a whole number of 64 bits'),
        'random seed of the initial parameters, the order of images, crops, MixUp and dropout',
    ),
    'batch_size': Field(4096, whole(1), 'images per step, over all devices and processes'),
    'accum_steps': Field(
        -1,
        whole(-1),
        'number of parts of a batch that are computed one after another (gradient accumulation) '
        'to save memory; -1: the fastest number for this machine, 1 except on '
        'a CPU; 0: as -1, but more parts if the batch does not fit in memory otherwise',
    ),
    'num_steps': Field(0, whole(0), 'length of the run in steps; 0: num_epochs decides'),
    'num_epochs': Field(
        0.0, number(least=0, most=1e9), 'length of the run in epochs; 0: num_steps decides'
    ),
    'image_size': Field((224, 224), SIDES, 'height and width of the images in pixels'),
    'dataset.name': Field(
        'imagenet2012',
        TEXT,
        "name of a TFDS data set, a directory of SPLIT/CLASS/images, or 'digits'",
    ),
    'dataset.data_dir': Field(
        '', TEXT, "directory of the prepared TFDS data sets; empty: TFDS's own default"
    ),
    'dataset.label': Field(
        '',
        TEXT,
        'label of a TFDS data set: a class feature, such as label_azimuth; FEATURE/N, which merges '
        'its classes into N groups; or clevr_count, clevr_distance, kitti_distance, '
        "kitti_object_distance; empty: the data set's own label",
    ),
    'dataset.train_split': Field('train', TEXT, 'training split, such as train or train[:90%]'),
    'dataset.eval_split': Field(
        'validation',
        TEXT,
        'split that is evaluated during training; empty: the folder val, valid or validation of a '
        'directory, otherwise a tenth of train',
    ),
    'dataset.test_split': Field(
        '',
        TEXT,
        'split that scores the final runs of vit_jax.sweep and vit_jax.vtab, once, at their end',
    ),
    'dataset.final_split': Field(
        '',
        TEXT,
        'training split of the final runs of vit_jax.sweep and vit_jax.vtab; empty: the whole '
        'split that contains train_split',
    ),
    'dataset.subset': Field(
        '',
        TEXT._replace(
            words='empty, a number of images, or a share of them such as 10%',
            has_commas=False,
            fit=_is_subset,
        ),
        'part of train_split to train on. A fixed permutation selects it, so a larger subset '
        'contains every smaller one; empty: all images',
    ),
    'dataset.stratify': Field(
        True,
        SWITCH,
        'whether slices and subsets of a directory, such as train[:90%], contain every class in '
        'proportion; False: the order of earlier versions; then a slice may miss a class',
    ),
    'dataset.heic': Field(
        True,
        SWITCH,
        'whether the HEIC photos of a directory are read, which needs the package pillow-heif; '
        'False: they are left out with a warning, as in earlier versions',
    ),
    'dataset.num_examples': Field(
        0, whole(0), 'number of images in train_split or its subset; 0: the data decide'
    ),
    'dataset.num_classes': Field(0, whole(0), 'number of classes; 0: the data decide'),
    'dataset.multi_label': Field(
        False,
        SWITCH,
        'whether an image has any number of labels, which requires the sigmoid loss; False: the '
        'data decide',
    ),
    'dataset.balance': Field(
        0.0,
        number(least=0, most=1),
        'share of the training examples that are drawn so that every class is equally frequent; '
        'the rest have the frequencies of the data',
    ),
    'dataset.max_broken_fraction': Field(
        0.01, number(least=0, most=1), 'largest share of unreadable images; the run stops above it'
    ),
    'dataset.shuffle_buffer': Field(
        16_384,
        whole(1),
        'number of examples that are shuffled together in memory; only for sequential TFDS files',
    ),
    'dataset.files_at_once': Field(
        16, whole(1), 'number of files that are read interleaved; only for sequential TFDS files'
    ),
    'dataset.cache': Field(
        'none',
        one_of('none', 'disk'),
        'disk: decode the training photos of a directory once and keep their pixels on disk',
    ),
    'dataset.cache_size': Field(
        0, whole(0), 'shorter side, in pixels, of the photos in the cache; 0: original size'
    ),
    'dataset.cache_dir': Field(
        '',
        TEXT,
        'directory of the cache; empty: vit_jax/photos in $XDG_CACHE_HOME, otherwise in ~/.cache',
    ),
    'augment.crop': Field(
        'inception',
        one_of('inception', 'pad', 'resize', 'none'),
        'training crop. inception: a random part of random area and aspect ratio; pad: a random '
        'crop of the padded image; resize: a random crop of the image squashed to a larger size; '
        'none: the whole image, squashed',
    ),
    'augment.min_area': Field(
        0.05,
        number(least=1e-6, most=1),
        'with augment.crop=inception: smallest area of a crop, as a share of the image',
    ),
    'augment.pad': Field(0, whole(0), 'with augment.crop=pad: pixels that are added on each side'),
    'augment.crop_ratio': Field(
        0.9375,
        number(least=0.01, most=1),
        'with augment.crop=resize: side of the crop as a share of the resized side; BiT crops '
        '480 px from 512 px and 128 px from 160 px',
    ),
    'augment.resize': Field(
        'same',
        one_of('same', *_FILTERS),
        'filter for resizing in training; same: preprocess.resize',
    ),
    'augment.flip': Field(
        True, SWITCH, 'whether to mirror training images left to right with probability 0.5'
    ),
    'augment.randaugment.num_ops': Field(
        0,
        whole(0, 16),
        'number of random operations per training image (RandAugment, arXiv 1909.13719); 0: no '
        'RandAugment',
    ),
    'augment.randaugment.magnitude': Field(
        10.0,
        number(least=0, below=22.5),
        'strength of the RandAugment operations, on the scale of AugReg: solarize inverts at 10 '
        'and 20, and from 22.5 posterize would shift by a negative number',
    ),
    'augment.randaugment.translate': Field(
        100.0,
        number(least=0, most=2**16),
        'shift of the translate operations in pixels at magnitude 10; 100 fits images of 224 px',
    ),
    'augment.randaugment.cutout': Field(
        40.0,
        number(least=0, most=2**16),
        'half the side of the cutout square in pixels at magnitude 10; 40 fits images of 224 px',
    ),
    'augment.mixup': Field(
        0.0,
        number(least=1e-6, most=1e6, or_else=0),
        'alpha of MixUp (arXiv 1710.09412): pairs of images are mixed with a share from '
        'Beta(alpha, alpha); 0: no MixUp',
    ),
    'augment.mixup_with': Field(
        'reversed',
        one_of('reversed', 'next'),
        'partner of an image in MixUp. reversed: the image at its place in the reversed batch, as '
        'in BiT; next: the image before it in the batch, with the smaller share, as in big_vision',
    ),
    'preprocess.fit': Field(
        'cover',
        one_of('cover', 'squash', 'torchvision', 'transformers'),
        'how images get their size in evaluation and prediction. cover: resize the shorter side, '
        'then crop the centre, as in big_vision; squash: resize to the final size without keeping '
        'the aspect ratio, as in vision_transformer; torchvision, transformers: as cover, with '
        "that library's rounding",
    ),
    'preprocess.crop_ratio': Field(
        0.875,
        number(least=0.01, most=1),
        'side of the central crop as a share of the resized side, in evaluation and prediction',
    ),
    'preprocess.resize': Field(
        'bilinear',
        one_of(*_FILTERS),
        'filter for resizing, in training and evaluation; area: the mean over the area of a pixel',
    ),
    'preprocess.antialias': Field(
        True,
        SWITCH,
        'whether shrinking averages over all pixels, in training and evaluation; '
        'vision_transformer and big_vision do not',
    ),
    'preprocess.uint8_resize': Field(
        False,
        SWITCH,
        'whether each of the two passes of resizing rounds to whole numbers from 0 to 255, as '
        'Pillow does for timm, torchvision and transformers, in training and evaluation; it '
        'requires preprocess.antialias. False: floating-point numbers, as in TensorFlow',
    ),
    'preprocess.mean': Field(
        (0.5, 0.5, 0.5),
        several(number(0, 1), 'three numbers (red, green, blue) from 0 to 1', 3),
        'mean that is subtracted from pixels in [0, 1], in training and evaluation',
    ),
    'preprocess.std': Field(
        (0.5, 0.5, 0.5),
        several(number(least=0.001, most=1), 'three numbers (red, green, blue) from 0.001 to 1', 3),
        'standard deviation that divides the difference, in training and evaluation',
    ),
    'pretrained': Field(
        '',
        TEXT,
        'weights to start from: a file, a workdir, hf:ORG/NAME, timm:NAME or gs://BUCKET/FILE; '
        'empty: random parameters',
    ),
    'transfer.take': Field(
        (), TEXTS, 'fields of this config whose values are read from the pretrained weights'
    ),
    'transfer.keep_head': Field(
        False,
        SWITCH,
        'start with the head of the weights, whose classes must be the classes of the data; '
        'False: start with a new head',
    ),
    'transfer.position_resize': Field(
        'bilinear',
        one_of('bilinear', 'bicubic'),
        'filter for resizing position embeddings. bilinear: as in the code of the paper; bicubic: '
        'antialiased, as in timm',
    ),
    'transfer.image_size': Field(
        (),
        SIDES,
        'image size of the pretrained position embeddings, height and width in pixels, if the '
        'weights do not record it; empty: a square grid of patches',
    ),
    'transfer.resize_patches': Field(
        False,
        SWITCH,
        'whether to resize pretrained patch embeddings to model.patch_size (FlexiViT, '
        'arXiv 2212.08013)',
    ),
    'loss.name': Field('softmax', one_of('softmax', 'sigmoid'), 'kind of cross-entropy loss'),
    'loss.label_smoothing': Field(
        0.0, RATE, 'share of the label that is spread evenly over all classes'
    ),
    'loss.class_weights': Field(
        (),
        _WEIGHTS._replace(
            fit=lambda x: _are_weights(x, recorded=False),
            recorded=lambda x: _are_weights(x, recorded=True),
        ),
        'weight of each class in the training loss; balanced: n / (k n_c) for a class with n_c of '
        'n images, k classes; empty: 1 for every class',
    ),
    'objective.name': Field(
        '',
        TEXT,
        'training objective: labels, distillation, masked_patches, or PACKAGE.MODULE:FUNCTION of '
        'your own (docs/how-to/add-a-loss.md); empty: distillation if teacher.weights is set, '
        'masked_patches if masked.target is set, otherwise labels',
    ),
    'objective.options': Field(
        '', TEXT, 'options of your own objective, written as NAME=VALUE,NAME=VALUE'
    ),
    'teacher.weights': Field(
        '',
        TEXT,
        'model whose logits are the targets of distillation (arXiv 2106.05237), written as for '
        'pretrained; empty: no distillation',
    ),
    'teacher.temperature': Field(
        1.0,
        number(least=0.001, most=1000),
        'temperature that divides the logits of teacher and student',
    ),
    'teacher.share': Field(
        1.0,
        number(least=0, most=1),
        'weight of the distillation loss; the label loss has the weight 1 - share',
    ),
    'teacher.image_size': Field(
        (),
        SIDES,
        "height and width in pixels of the teacher's images, which are resized from the student's; "
        "empty: the image size of the teacher's weights",
    ),
    'teacher.checksum': Field(
        0, whole(0), "checksum of the teacher's parameters; 0: the weights decide"
    ),
    'masked.target': Field(
        'none',
        one_of('none', *masked.TARGETS),
        'target of masked patch prediction (section 4.6), which replaces labels. mean_color: mean '
        'colour of a masked patch, 3 bits for each channel; small_patch: mean colours of its 4 x 4 '
        'parts; pixels: its pixels; none: train with labels',
    ),
    'masked.rate': Field(
        0.5,
        number(least=1e-6, most=1, earlier=number(above=0, most=1)),
        'share of the patches that are masked',
    ),
    'optimizer.name': Field(
        'adam',
        one_of('adam', 'nadam', 'sgd', 'adafactor', 'lion'),
        "optimizer; adafactor with mu_dtype=bfloat16 is big_vision's",
    ),
    'optimizer.learning_rate': Field(
        1e-3, number(least=1e-30, most=1e30), 'peak of the learning rate, after the warm-up'
    ),
    'optimizer.b1': Field(
        0.9,
        RATE,
        'decay rate of the first moment. adam, nadam, lion: running mean of gradients; adafactor: '
        'running mean of updates',
    ),
    'optimizer.b2': Field(
        0.999,
        RATE,
        'decay rate of the second moment. adam, nadam: running mean of squared gradients; '
        'adafactor: highest value of its decay rate; lion: decay rate of the stored mean',
    ),
    'optimizer.mu_dtype': Field(
        'float32',
        one_of('float32', 'bfloat16'),
        'dtype of the first moment, or of the momentum of sgd; the rest of the optimizer state is '
        'float32',
    ),
    'optimizer.momentum': Field(0.9, RATE, 'momentum; only for sgd'),
    'optimizer.weight_decay': Field(
        0.0,
        number(least=0, most=1e6),
        'decoupled weight decay; decay_scaling states its factor; 0: no decay',
    ),
    'optimizer.decay_scaling': Field(
        'learning_rate',
        one_of('learning_rate', 'schedule', 'gradient'),
        'factor of weight_decay. learning_rate: the learning rate; schedule: the learning rate '
        'divided by its peak, so that the decay does not depend on the peak (big_vision); '
        'gradient: the decay is not decoupled but added to the gradient, and momentum amplifies '
        'it (BiT)',
    ),
    'optimizer.decay_names': Field(
        ('kernel',), TEXTS, 'last names of the parameters that weight decay applies to'
    ),
    'optimizer.clip_norm': Field(
        0.0,
        number(least=1e-12, most=1e12, or_else=0),
        'largest global norm of the gradient; a larger gradient is scaled down; 0: no clipping',
    ),
    'optimizer.lr_factors': Field(
        '',
        TEXT,
        'factors of the learning rate, written as REGEX=FACTOR,...: the first regular expression '
        'that matches the path of a parameter applies; 0 freezes the parameter',
    ),
    'optimizer.layer_decay': Field(
        1.0,
        number(least=0.01, most=1),
        'layer-wise decay: the learning rate of a layer is multiplied by this once for each layer '
        'above it',
    ),
    'optimizer.schedule': Field(
        'cosine',
        one_of('cosine', 'linear', 'rsqrt', 'constant', 'staircase'),
        'schedule of the learning rate after the warm-up',
    ),
    'optimizer.warmup_steps': Field(
        0, whole(0), 'steps of the warm-up; the learning rate rises linearly from 0'
    ),
    'optimizer.end_learning_rate': Field(
        0.0,
        number(least=0, most=1e30),
        'learning rate at the last step; only for schedule cosine and linear',
    ),
    'optimizer.timescale': Field(
        10_000,
        whole(1),
        'with schedule rsqrt: timescale of the reciprocal square root, in steps; the learning rate '
        'is peak / sqrt(1 + steps since the warm-up / timescale)',
    ),
    'optimizer.cooldown_steps': Field(
        0, whole(0), 'steps at the end of the run; the learning rate falls linearly to 0'
    ),
    'optimizer.staircase_boundaries': Field(
        (0.3, 0.6, 0.9),
        several(number(least=0, most=1), 'numbers from 0 to 1, with commas between them'),
        'with schedule staircase: shares of the run; the learning rate falls after each',
    ),
    'optimizer.staircase_factor': Field(
        0.1,
        number(least=1e-6, most=1),
        'with schedule staircase: factor of the learning rate at each boundary',
    ),
    'ema_decay': Field(
        0.0,
        number(least=0, most=1),
        'decay rate of the running mean of the parameters (Polyak averaging), such as 0.999; '
        'evaluation then uses the mean; 0: no averaging',
    ),
    'mesh.data': Field(
        -1,
        whole(1, or_else=-1),
        'number of devices that split the examples of a batch; -1: all remaining devices',
    ),
    'mesh.fsdp': Field(
        1,
        whole(1, or_else=-1),
        'number of devices that split the examples of a batch and also the parameters, gradients '
        'and optimizer state; -1: all remaining devices',
    ),
    'mesh.tensor': Field(
        1,
        whole(1, or_else=-1),
        'number of devices that split attention heads and MLPs; -1: all remaining devices',
    ),
    'mesh.host_devices': Field(
        0,
        whole(0, 1024),
        'number of devices that JAX makes of the CPU; XLA_FLAGS and JAX_NUM_CPU_DEVICES must '
        'agree. 0: their number if they are set, otherwise a number chosen for this machine; 1 in '
        'a run of several processes',
    ),
    'evals.fewshot.shots': Field(
        (),
        several(whole(1), 'whole numbers, at least 1, with commas between them, as in 1,5,10'),
        'numbers of training examples per class for few-shot accuracy (section 4.1), measured at '
        'every evaluation; empty: no few-shot evaluation',
    ),
    'evals.fewshot.seeds': Field(
        3, whole(1, 1000), 'number of random draws of the examples; the log has their mean'
    ),
    'evals.fewshot.l2': Field(
        1024.0, number(least=1e-6, most=1e12), 'L2 regularisation of the least-squares classifier'
    ),
    'evals.fewshot.representation': Field(
        'pre_logits', one_of(*representation.NAMES), 'features that the classifier uses'
    ),
    'evals.fewshot.dataset': Field(
        '', TEXT, "data set, written as for dataset.name; empty: the run's own"
    ),
    'evals.fewshot.train_split': Field(
        '',
        TEXT,
        'split that provides the examples; each evaluation computes the features of all of '
        "it; empty: the run's dataset.train_split",
    ),
    'evals.fewshot.test_split': Field(
        '', TEXT, "split that scores the classifier; empty: the run's dataset.eval_split"
    ),
    'log_every': Field(
        0,
        whole(0),
        'steps between two lines of the log; 0: a twentieth of the run, at most 100',
    ),
    'eval_every': Field(5000, whole(0), 'steps between two evaluations; 0: only at the end'),
    'checkpoint_every': Field(1000, whole(0), 'steps between two checkpoints; 0: only at the end'),
    'keep_checkpoints': Field(2, whole(1), 'number of newest checkpoints that are kept'),
    'keep_every': Field(
        0, whole(0), 'steps between checkpoints that are kept for good; 0: none are'
    ),
    'keep_best': Field(
        False, SWITCH, 'whether to keep the checkpoint with the best value of best_metric as well'
    ),
    'best_metric': Field(
        'eval/accuracy',
        TEXT,
        'metric in metrics.jsonl that ranks checkpoints, and runs in vit_jax.sweep, such as '
        'eval/accuracy, eval/loss (the lowest is best) or fewshot/5shot',
    ),
    'patience': Field(
        0,
        whole(0),
        'training ends after this number of evaluations in a row without a better best_metric; '
        '0: train to the end',
    ),
    'report': Field(True, SWITCH, 'whether a complete run writes report.html to its workdir'),
    'trackers': Field(
        (),
        several(one_of('wandb', 'mlflow'), 'wandb, mlflow, or both with a comma between them'),
        'experiment trackers that receive the config and the metrics of the run; empty: none',
    ),
}

# Fields of each additional evaluator, in the section `evals.NAME`.
EVALUATOR_FIELDS = {
    'type': Field(
        '',
        TEXT,
        'kind of evaluator: classification, fewshot, knn, linear_probe, or '
        'PACKAGE.MODULE:FUNCTION of your own (docs/how-to/add-a-metric.md)',
    ),
    'dataset': Field('', TEXT, "data set, written as for dataset.name; empty: the run's own"),
    'split': Field('', TEXT, "split that is scored; empty: the run's dataset.eval_split"),
    'train_split': Field(
        '',
        TEXT,
        "training split of fewshot, knn and linear_probe; empty: the run's dataset.train_split",
    ),
    'labels': Field(
        '',
        TEXT,
        'JSON file with other labels for the images of a directory, such as the real.json of '
        'ImageNet-ReaL: a list of class numbers for each image, in the order of file names; empty: '
        "the directory's own labels",
    ),
    'every': Field(
        0, whole(0), 'steps between two evaluations; 0: eval_every. The last step is always scored'
    ),
    'options': Field('', TEXT, 'options of the type, written as NAME=VALUE,NAME=VALUE'),
}

# Names of fields in other code bases.
ALIASES = {
    'lr': 'optimizer.learning_rate',
    'peak_lr': 'optimizer.learning_rate',
    'bs': 'batch_size',
    'base_lr': 'optimizer.learning_rate',
    'wd': 'optimizer.weight_decay',
    'batch': 'batch_size',
    'epochs': 'num_epochs',
    'total_epochs': 'num_epochs',
    'steps': 'num_steps',
    'res': 'image_size',
    'total_steps': 'num_steps',
    'max_steps': 'num_steps',
    'warmup': 'optimizer.warmup_steps',
    'opt': 'optimizer.name',
    'grad_clip_norm': 'optimizer.clip_norm',
    'resolution': 'image_size',
    'grad_clip': 'optimizer.clip_norm',
    'img_size': 'image_size',
    'data': 'dataset.name',
    'data_path': 'dataset.name',
    'depth': 'model.num_layers',
    'width': 'model.hidden_size',
    'embed_dim': 'model.hidden_size',
    'heads': 'model.num_heads',
    'patch': 'model.patch_size',
    'dropout': 'model.dropout_rate',
    'drop_path': 'model.stochastic_depth_rate',
    'drop_path_rate': 'model.stochastic_depth_rate',
    'model_init': 'pretrained',
    'init_from': 'pretrained',
    'weights': 'pretrained',
    'smoothing': 'loss.label_smoothing',
    'teacher': 'teacher.weights',
}
