"""Every field of a run but those of its model: the neutral value, the possible ones, the meaning.

The command line, the checks, --help and docs/config.md are made from this table.
"""

import re

from vit_jax.fields import RATE, SIDES, SWITCH, TEXT, TEXTS, Field, number, one_of, several, whole
from vit_jax.models import masked, representation

_FILTERS = ('bilinear', 'bicubic', 'lanczos3', 'area')


def _parse_weight(text):
    """'balanced', or a number."""
    return text if text == 'balanced' else float(text)


_WEIGHTS = several(
    number(least=1e-9, most=1e9, or_else=0, earlier=number(least=0))._replace(parse=_parse_weight),
    'balanced, or numbers from 1e-9 to 1e9, or 0 but not all of them, one for each class, with '
    'commas between them',
)


def _are_weights(value, recorded):
    """Whether loss.class_weights may be the value."""
    if value in (('balanced',), ['balanced']):
        return True
    return _WEIGHTS.fits(value, recorded) and any(value) == bool(value)


FIELDS = {  # by dotted name
    'recipe': Field('', TEXT, 'where the numbers come from; logged at the start'),
    'seed': Field(
        0,
        whole(-(2**63), 2**63 - 1)._replace(words='a whole number of 64 bits'),
        'of parameters, order of images, crops, MixUp and dropout',
    ),
    'batch_size': Field(4096, whole(1), 'images of a step, over all devices'),
    'accum_steps': Field(
        -1,
        whole(-1),
        'parts of a batch that are computed one after another '
        '(gradient accumulation); -1: as many as are fastest, one except on a '
        'CPU; 0: at least these, so that they fit in memory',
    ),
    'num_steps': Field(0, whole(0), 'length of the run: either this'),
    'num_epochs': Field(0.0, number(least=0, most=1e9), 'or this; the other is 0'),
    'image_size': Field((224, 224), SIDES, 'height and width in pixels'),
    'dataset.name': Field(
        'imagenet2012', TEXT, "a TFDS name, a directory of SPLIT/CLASS/images, or 'digits'"
    ),
    'dataset.data_dir': Field('', TEXT, "where TFDS sets are; empty: TFDS's own default"),
    'dataset.label': Field(
        '',
        TEXT,
        'of a TFDS set: a feature that is a class, as label_azimuth; '
        'FEATURE/N, its classes merged to N groups; or clevr_count, '
        'clevr_distance, kitti_distance, kitti_object_distance; empty: the '
        "set's own",
    ),
    'dataset.train_split': Field('train', TEXT, 'as in train or train[:90%]'),
    'dataset.eval_split': Field(
        'validation',
        TEXT,
        'scored during training; empty: the folder '
        'val, valid or validation of a directory, else a tenth of train',
    ),
    'dataset.test_split': Field('', TEXT, 'scored once at the end by vit_jax.sweep'),
    'dataset.final_split': Field(
        '',
        TEXT,
        'what vit_jax.sweep trains the winner on; empty: all of '
        'the split of which train_split is a part',
    ),
    'dataset.subset': Field(
        '',
        TEXT._replace(
            words='empty, a number of images, or a share of them such as 10%',
            has_commas=False,
            fit=lambda x: (
                isinstance(x, str) and re.fullmatch(r'([1-9]\d*|\d+(\.\d+)?%)?', x) is not None
            ),
        ),
        'what is taken of train_split, by a fixed permutation, so that a smaller subset is '
        'contained in a larger one; empty: all',
    ),
    'dataset.stratify': Field(
        True,
        SWITCH,
        'slices and subsets of a directory, as train[:90%], have every class in proportion; '
        'False: the order of earlier versions, in which a slice may lack a class',
    ),
    'dataset.num_examples': Field(0, whole(0), 'of train_split or its subset; 0: ask the data'),
    'dataset.num_classes': Field(0, whole(0), '0: ask the data'),
    'dataset.multi_label': Field(
        False,
        SWITCH,
        'any number of labels for an image, which needs the loss sigmoid; False: ask the data',
    ),
    'dataset.balance': Field(
        0.0,
        number(least=0, most=1),
        'share of the training examples that '
        'is drawn so that every class comes equally often; the others come '
        'as in the data',
    ),
    'dataset.max_broken_fraction': Field(
        0.01, number(least=0, most=1), 'more unreadable images than this stop the run'
    ),
    'dataset.shuffle_buffer': Field(
        16_384, whole(1), 'sequential TFDS files: examples mixed with each other'
    ),
    'dataset.files_at_once': Field(
        16, whole(1), 'sequential TFDS files: how many are read interleaved'
    ),
    'dataset.cache': Field(
        'none',
        one_of('none', 'disk'),
        'disk: of a directory, training photos are decoded once, and read as pixels from a folder',
    ),
    'dataset.cache_size': Field(
        0, whole(0), 'pixels of the short side to which photos are reduced there; 0: they are not'
    ),
    'dataset.cache_dir': Field(
        '', TEXT, 'that folder; empty: vit_jax/photos of $XDG_CACHE_HOME, else of ~/.cache'
    ),
    'augment.crop': Field(
        'inception',
        one_of('inception', 'pad', 'resize', 'none'),
        'inception: a random part, pad: the padded image moved at random, '
        'resize: a random part of the squashed image, none: the whole image',
    ),
    'augment.min_area': Field(
        0.05, number(least=1e-6, most=1), 'inception: smallest share of the image'
    ),
    'augment.pad': Field(0, whole(0), 'pad: pixels on each side'),
    'augment.crop_ratio': Field(
        0.9375,
        number(least=0.01, most=1),
        'resize: share of the sides that is cut out; BiT takes 480 px of 512 and 128 of 160',
    ),
    'augment.resize': Field(
        'same', one_of('same', *_FILTERS), 'the filter in training; same: as in evaluation'
    ),
    'augment.flip': Field(True, SWITCH, 'left-right, of every second image at random'),
    'augment.randaugment.num_ops': Field(
        0,
        whole(0, 16),
        'RandAugment (arXiv 1909.13719): so many of its 16 operations, one after another; 0: none',
    ),
    'augment.randaugment.magnitude': Field(
        10.0,
        number(least=0, below=22.5),
        'strength of all of them; as in AugReg, where solarize '
        'inverts at 10 and 20, and from 22.5 on posterize would shift by a negative number',
    ),
    'augment.randaugment.translate': Field(
        100.0, number(least=0, most=2**16), 'pixels at magnitude 10; 100 is for 224 px'
    ),
    'augment.randaugment.cutout': Field(
        40.0,
        number(least=0, most=2**16),
        'half the side of the square in pixels at magnitude 10; 40 is for 224 px',
    ),
    'augment.mixup': Field(
        0.0,
        number(least=1e-6, most=1e6, or_else=0),
        'MixUp (arXiv 1710.09412): examples of a batch '
        'are mixed in pairs, by a share from Beta(x, x); 0: not',
    ),
    'augment.mixup_with': Field(
        'reversed',
        one_of('reversed', 'next'),
        'the batch in reverse, as in BiT; or each example with the one '
        'before it, of which it gets the smaller share, as in big_vision',
    ),
    'preprocess.fit': Field(
        'cover',
        one_of('cover', 'squash', 'torchvision', 'transformers'),
        'evaluation and prediction: the short side is resized and the middle '
        'cut out, as in big_vision; the whole is squashed to the size, as in '
        'vision_transformer; as cover, with the rounding of those',
    ),
    'preprocess.crop_ratio': Field(
        0.875, number(least=0.01, most=1), 'central crop, share of the resized side'
    ),
    'preprocess.resize': Field(
        'bilinear',
        one_of(*_FILTERS),
        'the filter; area: the mean over the '
        'area of a pixel; this and the following are for training, too',
    ),
    'preprocess.antialias': Field(
        True,
        SWITCH,
        'average over all pixels of a larger image; vision_transformer and big_vision do not',
    ),
    'preprocess.uint8_resize': Field(
        False,
        SWITCH,
        'each of the two passes of resizing gives whole numbers from 0 to 255, as Pillow does for '
        'timm, torchvision and transformers; False: numbers with fractions, as TensorFlow does. '
        'It needs antialias',
    ),
    'preprocess.mean': Field(
        (0.5, 0.5, 0.5),
        several(number(0, 1), 'three numbers (red, green, blue) from 0 to 1', 3),
        'is subtracted',
    ),
    'preprocess.std': Field(
        (0.5, 0.5, 0.5),
        several(number(least=0.001, most=1), 'three numbers (red, green, blue) from 0.001 to 1', 3),
        'divides what is left',
    ),
    'pretrained': Field(
        '',
        TEXT,
        'weights to start from: a file, a workdir, hf:ORG/NAME, timm:NAME, gs://BUCKET/FILE',
    ),
    'transfer.take': Field((), TEXTS, 'fields of this config whose values come from the weights'),
    'transfer.keep_head': Field(
        False,
        SWITCH,
        'True: start with the head of the weights, whose classes must be those of the data; '
        'False: with a new head',
    ),
    'transfer.position_resize': Field(
        'bilinear',
        one_of('bilinear', 'bicubic'),
        "of position embeddings: as in the paper's code, or antialiased as in timm",
    ),
    'transfer.image_size': Field(
        (),
        SIDES,
        'of the images that the pre-trained position embeddings are for, if the weights do not say '
        'it; empty: as many rows as columns of patches',
    ),
    'transfer.resize_patches': Field(
        False, SWITCH, 'to another patch size (FlexiViT, arXiv 2212.08013)'
    ),
    'loss.name': Field('softmax', one_of('softmax', 'sigmoid'), 'of the cross-entropy'),
    'loss.label_smoothing': Field(0.0, RATE, 'share of the label that all classes have in common'),
    'loss.class_weights': Field(
        (),
        _WEIGHTS._replace(
            fit=lambda x: _are_weights(x, recorded=False),
            recorded=lambda x: _are_weights(x, recorded=True),
        ),
        'what a label of each class counts in training; balanced: n / (k n_c) for n_c of n images '
        'and k classes; empty: 1',
    ),
    'objective.name': Field(
        '',
        TEXT,
        'labels, distillation, masked_patches, or PACKAGE.MODULE:FUNCTION of your own (docs/'
        'extending.md); empty: distillation with teacher.weights, masked_patches with '
        'masked.target, else labels',
    ),
    'objective.options': Field(
        '', TEXT, 'NAME=VALUE with commas between them, which a function of your own reads'
    ),
    'teacher.weights': Field(
        '',
        TEXT,
        'a model whose logits are the targets (distillation, arXiv '
        '2106.05237): as pretrained; empty: none',
    ),
    'teacher.temperature': Field(
        1.0, number(least=0.001, most=1000), 'by which logits of both are divided'
    ),
    'teacher.share': Field(
        1.0, number(least=0, most=1), 'of the distillation in the loss; labels have the rest'
    ),
    'teacher.image_size': Field(
        (),
        SIDES,
        'to which its images, those of the student, are resized; empty: that of its weights',
    ),
    'teacher.checksum': Field(0, whole(0), 'of its parameters; 0: ask the weights'),
    'masked.target': Field(
        'none',
        one_of('none', *masked.TARGETS),
        'masked patch prediction '
        '(section 4.6) in place of labels: the mean colour of a hidden patch, '
        'with 3 bits for each channel, that of its 4 x 4 parts, or its pixels',
    ),
    'masked.rate': Field(
        0.5,
        number(least=1e-6, most=1, earlier=number(above=0, most=1)),
        'share of the patches that are hidden',
    ),
    'optimizer.name': Field(
        'adam',
        one_of('adam', 'nadam', 'sgd', 'adafactor', 'lion'),
        "the algorithm; adafactor is big_vision's where mu_dtype is bfloat16",
    ),
    'optimizer.learning_rate': Field(1e-3, number(least=1e-30, most=1e30), 'at its peak'),
    'optimizer.b1': Field(
        0.9,
        RATE,
        'adam, nadam, lion: decay of the mean of gradients; adafactor: of the mean of updates',
    ),
    'optimizer.b2': Field(
        0.999,
        RATE,
        'adam, nadam: decay of the mean of their squares, adafactor: its '
        'highest value; lion: decay of the mean that is kept',
    ),
    'optimizer.mu_dtype': Field(
        'float32',
        one_of('float32', 'bfloat16'),
        'of the mean of gradients, sgd: of the momentum; all else of the state is float32',
    ),
    'optimizer.momentum': Field(0.9, RATE, 'sgd'),
    'optimizer.weight_decay': Field(
        0.0, number(least=0, most=1e6), 'decoupled, multiplied by the learning rate'
    ),
    'optimizer.decay_scaling': Field(
        'learning_rate',
        one_of('learning_rate', 'schedule', 'gradient'),
        'what weight_decay is multiplied by: the learning rate, or '
        'its share of the peak, so that another peak decays as much '
        '(big_vision); gradient: it is not decoupled, but added to '
        'the gradient (BiT), which momentum enlarges',
    ),
    'optimizer.decay_names': Field(('kernel',), TEXTS, 'parameters of these names decay'),
    'optimizer.clip_norm': Field(
        0.0, number(least=1e-12, most=1e12, or_else=0), 'of the global gradient norm; 0: none'
    ),
    'optimizer.lr_factors': Field(
        '', TEXT, 'REGEX=FACTOR,... of parameter paths, the first that fits; 0 freezes'
    ),
    'optimizer.layer_decay': Field(
        1.0,
        number(least=0.01, most=1),
        'what the learning rate of a layer is multiplied by for each layer above it',
    ),
    'optimizer.schedule': Field(
        'cosine',
        one_of('cosine', 'linear', 'rsqrt', 'constant', 'staircase'),
        'of the learning rate after the warm-up',
    ),
    'optimizer.warmup_steps': Field(0, whole(0), 'in which the learning rate rises from 0'),
    'optimizer.end_learning_rate': Field(
        0.0, number(least=0, most=1e30), 'cosine, linear: at the last step'
    ),
    'optimizer.timescale': Field(
        10_000,
        whole(1),
        'rsqrt, the reciprocal square root: the '
        'learning rate is peak / sqrt(1 + steps since the warm-up / x)',
    ),
    'optimizer.cooldown_steps': Field(0, whole(0), 'the last ones, in which the rate falls to 0'),
    'optimizer.staircase_boundaries': Field(
        (0.3, 0.6, 0.9),
        several(number(least=0, most=1), 'numbers from 0 to 1, with commas between them'),
        'staircase: after these shares of the steps the learning rate falls',
    ),
    'optimizer.staircase_factor': Field(
        0.1, number(least=1e-6, most=1), 'staircase: by which it is then multiplied'
    ),
    'ema_decay': Field(
        0.0,
        number(least=0, most=1),
        'Polyak averaging, as in 0.999; evaluation then uses the average; 0: none',
    ),
    'mesh.data': Field(
        -1,
        whole(1, or_else=-1),
        'devices over which the examples of a batch are split; -1: the rest',
    ),
    'mesh.fsdp': Field(
        1, whole(1, or_else=-1), 'the same, and parameters, gradients and optimizer state are split'
    ),
    'mesh.tensor': Field(
        1, whole(1, or_else=-1), 'devices over which attention heads and MLPs are split'
    ),
    'mesh.host_devices': Field(
        0,
        whole(0, 1024),
        'as how many devices JAX shows the CPU; '
        'XLA_FLAGS and JAX_NUM_CPU_DEVICES must agree. 0: what these say, '
        'else chosen for this machine, and 1 for each of several processes',
    ),
    'evals.fewshot.shots': Field(
        (),
        several(whole(1), 'whole numbers, at least 1, with commas between them, as in 1,5,10'),
        'few-shot accuracy (section 4.1) at every evaluation, with so many examples of each '
        'class; empty: none',
    ),
    'evals.fewshot.seeds': Field(3, whole(1, 1000), 'how often they are drawn; the mean is logged'),
    'evals.fewshot.l2': Field(
        1024.0, number(least=1e-6, most=1e12), 'regularisation of the least squares'
    ),
    'evals.fewshot.representation': Field(
        'pre_logits', one_of(*representation.NAMES), 'features that they are classified by'
    ),
    'evals.fewshot.dataset': Field('', TEXT, "as dataset.name; empty: the run's"),
    'evals.fewshot.train_split': Field(
        '',
        TEXT,
        "where they are drawn; features of all of it are computed each time; empty: the run's",
    ),
    'evals.fewshot.test_split': Field('', TEXT, "scored; empty: the run's dataset.eval_split"),
    'log_every': Field(
        0,
        whole(0),
        'steps from one line of the log to the next; 0: a twentieth of the run, at most 100',
    ),
    'eval_every': Field(5000, whole(0), 'steps; 0: only at the end'),
    'checkpoint_every': Field(1000, whole(0), 'steps; 0: only at the end'),
    'keep_checkpoints': Field(2, whole(1), 'the newest ones'),
    'keep_every': Field(0, whole(0), 'steps: checkpoints of these are kept, too; 0: of none'),
    'keep_best': Field(False, SWITCH, 'also the checkpoint with the best best_metric'),
    'best_metric': Field(
        'eval/accuracy',
        TEXT,
        'a number of evaluations in metrics.jsonl, such as '
        'eval/loss, which is best where it is lowest, or fewshot/5shot',
    ),
    'patience': Field(
        0,
        whole(0),
        'evaluations in a row without a better best_metric after which '
        'training ends; 0: it does not',
    ),
    'report': Field(True, SWITCH, 'report.html in the workdir when the run is complete'),
    'trackers': Field(
        (),
        several(one_of('wandb', 'mlflow'), 'wandb, mlflow, or both with a comma between them'),
        'also get this config and what metrics.jsonl gets; empty: none',
    ),
}

# Of each further evaluator, whose section is `evals.NAME`.
EVALUATOR_FIELDS = {
    'type': Field(
        '',
        TEXT,
        'classification, fewshot, knn, linear_probe, or PACKAGE.MODULE:FUNCTION of your own '
        '(docs/extending.md)',
    ),
    'dataset': Field('', TEXT, "as dataset.name; empty: the run's"),
    'split': Field('', TEXT, "scored; empty: the run's dataset.eval_split"),
    'train_split': Field(
        '', TEXT, "fewshot, knn, linear_probe: learned from; empty: the run's dataset.train_split"
    ),
    'labels': Field(
        '',
        TEXT,
        'JSON file with other labels of a directory: a list of class numbers for each image, in '
        "the order of file names, such as ImageNet-ReaL's real.json; empty: its own",
    ),
    'every': Field(0, whole(0), 'steps; 0: as eval_every. The last step is always scored'),
    'options': Field('', TEXT, 'NAME=VALUE with commas between them, which the type reads'),
}

# What other code bases call a field.
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
