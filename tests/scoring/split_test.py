"""Splits that are scored, for weights without names of classes."""

import dataclasses
import json

from tests.support import small
from tests.support.errors import refused
from vit_jax.scoring import split

GIVEN = dataclasses.replace(small.make('vit'), classes=None)


def test_a_mapping_assumes_imagenet_for_a_thousand_classes_without_names(
    image_directory, tmp_path, caplog
):
    """Class 310 of ImageNet is an ant, class 309 a bee."""
    dataset = {
        'name': str(image_directory),
        'eval_split': 'test',
        'data_dir': '',
        'label': '',
        'stratify': True,
        'heic': True,
    }
    mapping = tmp_path / 'mapping.json'
    mapping.write_text(json.dumps({'ant': 'ant, emmet', 'bee': 'bee; ant'}))
    source = split.open_mapped_source(
        dataset, dataclasses.replace(GIVEN, num_classes=1000), str(mapping)
    )
    assert 'the names of ImageNet-1k are used' in caplog.text
    labels = {}
    for k in range(source.num_examples):
        item = {name: x[0] for name, x in source.fetch([k]).items()} | {'index': k}
        labels[source.name_of(k).split('/')[-2]] = (
            source.load(item)[1].numpy().nonzero()[0].tolist()
        )
    assert labels == {'ant': [310], 'bee': [309, 310], 'cat': []}
    with refused('missing', field='--classes'):
        split.open_mapped_source(dataset, GIVEN, str(mapping))


def test_weights_without_a_head_are_refused():
    with refused('inapplicable'):
        split.open_labelled_source({}, small.make('headless'), None, None)
