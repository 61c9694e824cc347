"""A fit folder, and a run's record, as the commands write them; parts of a model card."""

import dataclasses
import pathlib
import re

import numpy as np
from huggingface_hub import ModelCard

from tests.support import documentation, small
from tests.support.runs import begin, resolved
from vit_jax import config, weights
from vit_jax.data import photo_table
from vit_jax.data.photo_table import Row
from vit_jax.files import write_json
from vit_jax.fitting import outcome
from vit_jax.fitting.record import Record
from vit_jax.weights import Weights

SPLITS = {'train': 9, 'val': 3, 'test': 20}


def write_fit(
    folder: pathlib.Path,
    pretrained: str = 'hf:google/base',
    multi_label: bool = False,
    data: str = '/home/ann/flowers',
) -> outcome.Outcome:
    """Writes a complete fit of the small model; its photos do not exist.

    Returns:
      The outcome that fit.json records.
    """
    folder.mkdir()
    record = Record(str(folder), {'data': data, 'pretrained': pretrained})
    weights.save(small.make('vit'), str(folder / 'model.safetensors'), 'vit_jax')
    rows = [
        Row(f'{data}/{split}/{k}.jpg', (small.CLASSES[k % 7],), split, str(k))
        for split, count in SPLITS.items()
        for k in range(count)
    ]
    photo_table.write(str(folder / 'photos.csv'), rows, multi_label)
    rng = np.random.default_rng(0)
    labels = np.arange(SPLITS['test']) % 7
    found = outcome.score(
        [row.file for row in rows if row.split == 'test'],
        np.eye(7, dtype=bool)[labels],
        2 * np.eye(7)[labels] + rng.normal(size=(len(labels), 7)),
        small.CLASSES,
        multi_label,
    )
    record.write('outcome', found.as_json())
    return found


def write_run(workdir: pathlib.Path, row: dict[str, float], **fields) -> Weights:
    """Writes the record of a run on photos, with one row of metrics.jsonl and no arrays.

    Args:
      workdir: its directory.
      row: the row.
      **fields: fields of the config.

    Returns:
      The small model, as if it were loaded from the checkpoint of step 10.
    """
    changes = {
        'dataset.name': '/home/ann/flowers',
        'dataset.train_split': 'train',
        'dataset.eval_split': 'val',
        'num_steps': 10,
        **fields,
    }
    begin(workdir, resolved(config.changed(config.base(), changes)), small.CLASSES)
    split = dict(checksum=0, order=0, classes={}, names={})
    data = {'train': dict(split, images=500), 'eval': dict(split, images=80)}
    write_json(str(workdir / 'data.json'), data)
    (workdir / 'metrics.jsonl').write_text(f'{row}\n'.replace("'", '"'))
    checkpoint = str(workdir / 'checkpoints/10')
    return dataclasses.replace(small.make('vit'), source=checkpoint, layout='workdir')


def table(card: str, heading: str) -> list[list[str]]:
    """The rows of the table under a heading, without its header."""
    _, _, text = card.partition(f'{heading}\n')
    section = re.split(r'^#', text, flags=re.MULTILINE)[0]
    return list(documentation.tables(section))[1:]


def metadata(card: str) -> dict:
    """The YAML block of a card."""
    return ModelCard(card).data.to_dict()
