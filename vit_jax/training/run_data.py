"""The images of a run: opening, comparing and checking its training and evaluation split."""

import dataclasses
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import machine
from vit_jax.data import broken, cached, sequential, sources, subsets
from vit_jax.errors import UserError, some
from vit_jax.evaluators import per_class
from vit_jax.processes import consensus
from vit_jax.training import evaluation
from vit_jax.workdir import data_record

log = logging.getLogger(__name__)

# Seconds to look for broken images in a split: enough for hundreds of large photos or ten thousand
# small ones.
SCAN_SECONDS = 20
# Checksums of the splits in which a scan found no broken images, so that a sweep scans its data
# only once.
_WHOLE: set[int] = set()


class Splits(NamedTuple):
    """The splits of a run as they were opened.

    Attributes:
      train: the training split, or its subset.
      evaluation: the evaluation split.
      whole: number of examples of the training split if `train` is a subset, else 0.
    """

    train: sources.Source
    evaluation: sources.Source
    whole: int


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
      train: the training split or its subset, without known broken images.
      evaluation: the evaluation split, without known broken images.
      whole: see Splits.
      recorded: the description of both splits for data.json, see workdir/data_record.py.
    """

    train: sources.Source
    evaluation: sources.Source
    whole: int
    recorded: dict[str, dict]


def open_for_run(
    dataset: ConfigDict,
    workdir: str,
    recorded: Mapping[str, Any] | None,
    share: tuple[int, int],
    check_interrupts: Callable[[], None],
) -> RunData:
    """Opens both splits; compares them with the recorded run, or scans them for a new run.

    Args:
      dataset: `config.dataset`, complete except for the numbers of the data.
      workdir: the workdir of the run.
      recorded: `config.dataset` of the run that the workdir contains, None for a new run.
      share: this process's (index, number of parts) of the data.
      check_interrupts: called between slow operations; it may raise.

    Raises:
      UserError: if the data cannot be opened, differs from the recorded data, or has too many
        broken images.
    """
    splits = open_data(dataset)
    check_interrupts()
    train = splits.train
    evaluation_data = splits.evaluation
    description = described_data(train, evaluation_data)
    if recorded is not None:
        data_record.require_same(workdir, recorded, dataset, description)
    else:
        train, evaluation_data = without_broken(
            {'train': train, 'eval': evaluation_data},
            description,
            dataset,
            share,
            check_interrupts,
        )
    return RunData(train, evaluation_data, splits.whole, description)


def open_data(dataset: ConfigDict) -> Splits:
    """Opens the splits of `config.dataset`; all processes open the same images.

    Raises:
      UserError: if the data has one class only, or the two splits have different kinds of labels.
    """
    train = sources.open_split(dataset, dataset.train_split)
    whole = train.num_examples if dataset.subset else 0
    train = subsets.subset(train, dataset.subset, dataset.train_split)
    names = train.class_names
    if len(names) < 2:
        raise UserError(
            f"'{dataset.name}' has one class, '{names[0]}': a classifier needs two or more. A "
            'directory needs a folder SPLIT/CLASS/ for each class.',
            kind='content',
            field='dataset.name',
            value=dataset.name,
        )
    evaluation_data = sources.open_split(dataset, dataset.eval_split, names)
    if train.multi_label != evaluation_data.multi_label:
        raise UserError(
            f'the images of {dataset.train_split} have {_kind_of_labels(train)} each, and the '
            f'images of {dataset.eval_split} have {_kind_of_labels(evaluation_data)}: expected the '
            'same in both splits.',
            kind='content',
            field='dataset.eval_split',
            value=dataset.eval_split,
        )
    checksum_of_labels = 0
    if train.labels is not None:
        checksum_of_labels = zlib.crc32(train.labels.tobytes())
    consensus.check_equal(
        'the data',
        {
            'training images': train.num_examples,
            'evaluation images': evaluation_data.num_examples,
            'several labels': train.multi_label,
            'classes': len(names),
            'checksum of their names': zlib.crc32('\n'.join(names).encode()),
            'checksum of labels': checksum_of_labels,
        },
    )
    return Splits(train, evaluation_data, whole)


def _kind_of_labels(source):
    return 'several labels' if source.multi_label else 'one label'


def described_data(train: sources.Source, evaluation_data: sources.Source) -> dict[str, dict]:
    """The description of both splits for data.json, equal on all processes."""
    description = {
        'train': data_record.describe(train.num_examples, train.listing()),
        'eval': data_record.describe(evaluation_data.num_examples, evaluation_data.listing()),
    }
    data_record.check_equal(description)
    return description


def without_broken(
    splits: Mapping[str, sources.Source],
    description: Mapping[str, Mapping],
    dataset: ConfigDict,
    share: tuple[int, int],
    check_interrupts: Callable[[], None],
) -> list[sources.Source]:
    """The splits without the broken images that a scan of SCAN_SECONDS per split finds.

    The scan reports broken images before the model is compiled. It changes no result, because
    training and evaluation leave out the same images when they read them. Processes start at
    different images and exchange the indices of broken images.

    Args:
      splits: the splits by their names in `description`, 'train' and 'eval'.
      description: the description from `described_data`.
      dataset: `config.dataset`.
      share: this process's (index, number of parts) of the data.
      check_interrupts: called during the scan; it may raise.

    Raises:
      UserError: if more images are broken than `dataset.max_broken_fraction` allows.
    """
    scanned = []
    for name, source in splits.items():
        checksum = description[name]['checksum']
        is_cached = name == 'train' and dataset.cache != 'none'  # caching will decode all images
        reasons: dict[int, str] = {}
        num_scanned = 0
        if not is_cached and checksum not in _WHOLE:
            reasons, num_scanned = broken.scan(source, SCAN_SECONDS, share, check_interrupts)
        broken_indices: set[int] = set()
        for indices in consensus.gather(list(reasons)):
            broken_indices.update(indices)
        if not broken_indices and num_scanned == source.num_examples:
            _WHOLE.add(checksum)
        source = broken.with_broken(source, broken_indices)
        broken.require_few(source, dataset.max_broken_fraction, num_scanned)
        if source.unreadable:
            names = sorted(map(source.name_of, source.unreadable))
            log.warning(
                '%d of %d images of %s are broken and will be left out: %s',
                len(names),
                source.num_examples,
                dataset[f'{name}_split'],
                some(names, 3),
            )
        scanned.append(source)
    return scanned


def cached_photos(
    train: sources.Source,
    dataset: ConfigDict,
    share: tuple[int, int],
    check_interrupts: Callable[[], None],
) -> sources.Source:
    """The training images, from the cache if `dataset.cache` enables it.

    Raises:
      UserError: if the cache finds more broken images than `dataset.max_broken_fraction` allows.
    """
    if dataset.cache == 'none':
        return train
    photos = cached.cached(train, dataset.cache_dir, dataset.cache_size, share, check_interrupts)
    broken.require_few(photos, dataset.max_broken_fraction, photos.num_examples)
    return photos


def absolute_paths(dataset: ConfigDict, evals: ConfigDict) -> dict[str, str]:
    """The absolute paths of data sets and label files, by dotted field, for fields with paths."""
    paths = evaluation.absolute_paths(evals)
    path = sources.local_path(dataset.name)
    if path:
        paths['dataset.name'] = path
    return paths


def class_counts(
    train: sources.Source, balance: float, class_weights: Sequence[str | float]
) -> list[int] | None:
    """Number of training images of each class; None if no field needs them.

    Args:
      train: the training split.
      balance: `config.dataset.balance`.
      class_weights: `config.loss.class_weights`.
    """
    if balance:
        return sources.class_counts(train, 'dataset.balance').tolist()
    if 'balanced' in class_weights:
        return sources.class_counts(train, 'loss.class_weights').tolist()
    return None


def require_training_images(dataset: ConfigDict, train: sources.Source, uses_labels: bool) -> None:
    """Raises UserError if single-label classes are learned and one of them has no training images.

    Args:
      dataset: `config.dataset`.
      train: the training split.
      uses_labels: whether the objective learns the classes from labels.
    """
    empty_classes = sources.classes_without_examples(train)
    if empty_classes and uses_labels and not train.multi_label:
        raise UserError(
            f'dataset.train_split {dataset.train_split} of {dataset.name!r} has '
            f'{per_class.missing_classes(empty_classes, len(train.class_names))}. A model cannot '
            'learn a class without images. Use a larger split or dataset.subset, add images, or '
            'remove the class (its folder in every split, or its line in classes.txt).',
            kind='content',
            field='dataset.train_split',
            value=dataset.train_split,
        )


def check_batch_size(
    batch_size: int, dataset: ConfigDict, num_examples: int, has_begun: bool = False
) -> None:
    """Raises UserError if the batch is larger than the training split.

    Args:
      batch_size: `config.batch_size`.
      dataset: `config.dataset`.
      num_examples: the number of examples of the training split.
      has_begun: whether the run resumes. A resumed run only gets a warning, because earlier
        versions allowed such batches.
    """
    if batch_size <= num_examples:
        return
    problem = (
        f'batch_size is {batch_size}, and dataset.train_split '
        f'{dataset.train_split} of {dataset.name!r} has {num_examples} images'
    )
    if has_begun:
        log.warning('%s: each step shows images more than once', problem)
        return
    possible = 2 ** (num_examples.bit_length() - 1)
    raise UserError(
        f'{problem}: expected at most {num_examples}, as in --config.batch_size={possible}. '
        'Another batch size needs another optimizer.learning_rate, num_steps and '
        'optimizer.warmup_steps.',
        kind='value',
        field='batch_size',
        value=batch_size,
    )


def check_shuffle_memory(source: sources.Source, shuffle_buffer: int, num_processes: int) -> None:
    """Raises UserError if the host has no memory for two windows of shuffled examples.

    Without this check the system would kill the process without a message. Only sources that are
    read in sequence have windows.

    Args:
      source: the training split.
      shuffle_buffer: number of examples in a window.
      num_processes: number of processes that divide the examples.
    """
    if source.pieces is None:
        return
    window = min(shuffle_buffer, math.ceil(source.num_examples / num_processes))
    record_size = sequential.bytes_per_record(source.pieces)
    window_size = window * record_size
    available = machine.available_memory()
    if 2 * window_size <= available:
        return
    fitting = int(0.8 * available / (sequential.WINDOWS_IN_MEMORY * record_size))
    raise UserError(
        f'dataset.shuffle_buffer is {shuffle_buffer}: windows of {window:,} examples need up to '
        f'{sequential.WINDOWS_IN_MEMORY * window_size / 1e9:,.1f} GB of memory, and '
        f'{available / 1e9:,.1f} GB are available. Add '
        f'--config.dataset.shuffle_buffer={max(1, fitting)}, which mixes fewer examples with each '
        'other.',
        kind='resource',
        field='dataset.shuffle_buffer',
        value=shuffle_buffer,
    )
