"""Runs of a tiny model that are resolved but not trained."""

from tests.support.batches import encoded
from tests.support.runs import TINY, load
from vit_jax.files import write_json
from vit_jax.training import run as run_lib
from vit_jax.workdir import record


def resolve(workdir, **fields):
    """The run of the recipe quickstart with a tiny model; `fields` are dotted fields."""
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(TINY | {'num_epochs': 0.0} | fields)
    return run_lib.resolve(config, str(workdir))[0]


def write_folder(root, counts):
    """Writes images SPLIT/CLASS/*.png and returns the fields of a run on them.

    Args:
      root: pathlib.Path of the data set.
      counts: number of images by split and class.
    """
    for split, classes in counts.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                (root / split / name / f'{number}.png').write_bytes(encoded(number))
    return {
        'dataset.name': str(root),
        'dataset.train_split': 'train',
        'dataset.eval_split': 'test',
        'batch_size': 8,
    }


def leave_begun(workdir, run, without=()):
    """Leaves the files of a run that has saved a checkpoint.

    Args:
      workdir: pathlib.Path of the run.
      run: its config and class names are recorded.
      without: fields of `config.dataset` that an earlier version did not have.
    """
    (workdir / 'checkpoints' / '5').mkdir(parents=True)
    recorded = run.config.to_dict()
    for name in without:
        del recorded['dataset'][name]
    write_json(str(workdir / record.CONFIG), recorded)
    write_json(str(workdir / record.CLASSES), list(run.train_data.class_names))
