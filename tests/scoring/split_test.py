"""Splits that are scored, with the classes of weights that do not name them."""

import dataclasses
import json

import pytest

from tests.support import small
from vit_jax.errors import UserError
from vit_jax.scoring import split

GIVEN = dataclasses.replace(small.make('vit'), classes=None)


def test_a_mapping_takes_a_thousand_classes_without_names_for_those_of_imagenet(
    image_directory, tmp_path, caplog
):
    """Ants are number 310, bees 309."""
    dataset = {
        'name': str(image_directory),
        'eval_split': 'test',
        'data_dir': '',
        'label': '',
        'stratify': True,
    }
    mapping = tmp_path / 'mapping.json'
    mapping.write_text(json.dumps({'ant': 'ant, emmet', 'bee': 'bee; ant'}))
    source = split.open_mapped_source(
        dataset, dataclasses.replace(GIVEN, num_classes=1000), str(mapping)
    )
    assert 'the names of ImageNet-1k are used' in caplog.text
    found = {}
    for k in range(source.num_examples):
        item = {name: x[0] for name, x in source.fetch([k]).items()} | {'index': k}
        found[source.name_of(k).split('/')[-2]] = source.load(item)[1].numpy().nonzero()[0].tolist()
    assert found == {'ant': [310], 'bee': [309, 310], 'cat': []}
    with pytest.raises(UserError, match='goes by the names of classes, .* add --classes=FILE'):
        split.open_mapped_source(dataset, GIVEN, str(mapping))


def test_without_a_head_there_are_no_classes():
    with pytest.raises(UserError, match='headless has no head .*: score its features by --fewshot'):
        split.open_labelled_source({}, small.make('headless'), None, None)
