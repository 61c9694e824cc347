"""A model card: its numbers, its metadata, and what it says where nothing is recorded."""

import dataclasses

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from tests.support import published, small
from vit_jax import convert
from vit_jax.publishing import card, facts
from vit_jax.publishing.facts import Data, Evaluation, Facts

NAME = 'my-lab/flowers'


NOTHING = Facts()


def make(found=NOTHING, layout='huggingface', name='vit', written=None, **change):
    original = dataclasses.replace(small.make(name), **change)
    return card.make(NAME, original, written or original, layout, found)


@pytest.mark.parametrize('multi_label', [False, True])
def test_numbers_of_a_fit_are_in_metadata_and_tables(multi_label, tmp_path):
    outcome = published.write_fit(tmp_path / 'fit', multi_label=multi_label)
    text = make(facts.read(str(tmp_path / 'fit'), small.make('vit')))
    results = {
        result.metric_type: result.metric_value for result in ModelCard(text).data.eval_results
    }
    expected = {'accuracy': outcome.accuracy}
    if multi_label:
        expected['mean_average_precision'] = outcome.mean_average_precision
    assert results == expected
    assert published.table(text, '## Data') == [[k, str(n)] for k, n in published.SPLITS.items()]
    rows = dict(published.table(text, '## Accuracy'))
    assert rows['accuracy'] == f'{100 * outcome.accuracy:.2f} %'
    assert rows['calibration error'] == f'{100 * outcome.calibration_error:.2f} %'
    assert ('mean average precision' in rows) == multi_label
    assert published.table(text, '### Classes, the worst first') == [
        [name, f'{100 * value:.2f} %', str(count)] for name, value, count, _ in outcome.classes
    ]
    assert 'On 20 photos of the split test of flowers, which did not train the model:' in text
    assert '/home/ann' not in text


@pytest.mark.parametrize('layout', ['huggingface', 'timm'])
def test_metadata_of_a_classifier(layout, tmp_path):
    published.write_fit(tmp_path / 'fit')
    data = published.metadata(make(facts.read(str(tmp_path / 'fit'), small.make('vit')), layout))
    index = data.pop('model-index')
    assert data == {
        'library_name': {'huggingface': 'transformers', 'timm': 'timm'}[layout],
        'pipeline_tag': 'image-classification',
        'tags': ['image-classification', 'vision', 'vit', 'vit_jax'],
        'base_model': 'google/base',
        'metrics': ['accuracy'],
    }
    assert [entry['name'] for entry in index] == ['flowers']
    (result,) = index[0]['results']
    assert result['dataset'] == {'type': 'imagefolder', 'name': 'flowers', 'split': 'test'}


def test_the_card_asks_for_what_is_not_recorded():
    text = make(classes=None)
    assert 'The training data is not recorded' in text
    assert 'No accuracy is recorded' in text
    assert 'do not name their 7 classes' in text
    assert published.metadata(text).keys() == {'library_name', 'pipeline_tag', 'tags'}


def test_the_licence_is_left_to_the_author():
    text = make(Facts(base='google/base'))
    assert 'license' not in published.metadata(text)
    assert 'The author has not chosen a licence yet' in text
    assert 'of `google/base` may limit the choice' in text


def test_a_model_without_classes_computes_features():
    text = make(name='headless')
    assert published.metadata(text)['pipeline_tag'] == 'image-feature-extraction'
    assert '## Class names' not in text


def test_names_of_classes_and_data_stay_text():
    names = ['a|b', '<script>', '*c*', 'd\ne', '[f](g)', '`h`', 'i_j']
    evaluation = Evaluation(
        Data('x: y # "z"', False), 'te|st', 3, 0.5, classes=tuple((name, 0.5, 1) for name in names)
    )
    text = make(Facts(evaluation=evaluation), classes=names)
    assert '<script>' not in text.replace('\\<', '')
    rows = published.table(text, '### Classes, the worst first')
    assert [len(row) for row in rows] == [3] * 7
    assert rows[0][0] == 'a\\|b'
    (result,) = ModelCard(text).data.eval_results
    assert (result.dataset_name, result.dataset_split) == ('x: y # "z"', 'te|st')


def test_long_lists_of_classes_are_cut_and_the_card_says_so():
    classes = tuple((f'class {k}', k / 1000, 1) for k in range(1000))
    text = make(Facts(evaluation=Evaluation(Data('x', False), 'val', 1000, 0.5, classes=classes)))
    assert 'The 100 worst of 1000 classes:' in text
    rows = published.table(text, '### Classes, the worst first')
    assert [row[0] for row in rows] == [f'class {k}' for k in range(100)]


@pytest.mark.parametrize(('dtype', 'is_said'), [(None, False), ('float16', True)])
def test_a_card_says_that_the_scores_are_of_other_arrays(dtype, is_said, tmp_path):
    found = Facts(evaluation=Evaluation(Data('x', False), 'val', 10, 0.5))
    original = small.make('vit')
    written = convert.convert(original, str(tmp_path / 'x'), 'huggingface', dtype=dtype)
    text = make(found, written=written)
    assert ('This folder stores them as float16.' in text) == is_said


def test_a_split_that_chose_the_checkpoint_is_named():
    evaluation = Evaluation(Data('x', False), 'val', 10, 0.5)
    chosen = dataclasses.replace(evaluation, chose_model=True)
    sentence = 'The same split chose the checkpoint'
    assert sentence not in make(Facts(evaluation=evaluation))
    assert sentence in make(Facts(evaluation=chosen))


@pytest.mark.parametrize('is_held_out', [True, False])
def test_only_records_make_a_split_held_out(is_held_out):
    evaluation = Evaluation(Data('x', False), 'val', 10, 0.5, is_held_out=is_held_out)
    text = make(Facts(evaluation=evaluation))
    assert ('which did not train the model' in text) == is_held_out


def test_preprocessing_is_that_of_the_weights():
    rows = dict(published.table(make(), '## Preprocessing'))
    expected = small.make('vit').preprocess
    assert rows.keys() == expected.keys()
    for name in ('mean', 'std', 'image_size'):
        np.testing.assert_array_equal(
            [float(text) for text in rows[name].split(',')], expected[name]
        )
    assert rows['fit'] == 'squash'


def test_the_block_of_metadata_is_plain_yaml():
    _, block, body = make().split('---\n', 2)
    assert yaml.safe_load(block)['library_name'] == 'transformers'
    assert body.startswith('\n# flowers\n')
