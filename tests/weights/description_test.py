"""Descriptions of weights: from the command line, the weights themselves, or defaults."""

import dataclasses
import os

import pytest

from tests.support import small
from tests.support.errors import refused
from vit_jax.weights import description


def test_preprocess_options_are_parsed():
    assert description.parse_preprocess([]) == {}
    assert description.parse_preprocess(
        ['mean=0,0.5,1', 'std=0.2,0.3,1', 'crop_ratio=1', 'resize=bicubic', 'crop_ratio=0.9']
    ) == {'mean': (0, 0.5, 1), 'std': (0.2, 0.3, 1), 'crop_ratio': 0.9, 'resize': 'bicubic'}
    assert description.parse_preprocess(
        ['fit=squash,antialias=False,crop_ratio=0.9,mean=0,0.5,1']
    ) == {'mean': (0, 0.5, 1), 'crop_ratio': 0.9, 'fit': 'squash', 'antialias': False}


def test_an_image_size_fits_the_positions():
    """It determines rows and columns of patches that are not a square."""
    loaded = small.make('vit')
    assert description.described(loaded, ['image_size=16']).image_size() == (16, 16)
    for size in ((24, 16), (32, 8)):  # the second has as many patches
        with refused('value', field='--preprocess image_size', file='vit', value=size):
            description.described(loaded, ['image_size={},{}'.format(*size)])
    wide = small.make('rectangle')
    wide = dataclasses.replace(wide, preprocess=None)
    for given in ([], ['mean=0,0,0']):
        with refused('missing', field='image_size', file='rectangle'):
            description.described(wide, given).image_size()
    assert description.described(wide, ['image_size=16,12']).image_size() == (16, 12)
    free = small.make('no-position')
    assert description.described(free, ['image_size=24,16']).image_size() == (24, 16)


@pytest.mark.parametrize(
    ('given', 'kind', 'field', 'value'),
    [
        ('men=1', 'choice', 'the field of --preprocess', 'men'),
        ('resize=bicubic,crop=1', 'choice', 'the field of --preprocess', 'crop'),
        ('image_size=0', 'value', '--preprocess image_size', '0'),
        ('resize=cubic', 'choice', '--preprocess resize', 'cubic'),
        ('fit=crop', 'choice', '--preprocess fit', 'crop'),
        ('crop_ratio', 'value', '--preprocess crop_ratio', ''),
        ('crop_ratio=1.1', 'value', '--preprocess crop_ratio', '1.1'),
        ('crop_ratio=nan', 'value', '--preprocess crop_ratio', 'nan'),
        ('resize=bicubic,crop_ratio=2', 'value', '--preprocess crop_ratio', '2'),
        ('antialias=no', 'value', '--preprocess antialias', 'no'),
        ('mean=0.5', 'value', '--preprocess mean', '0.5'),
        ('mean=123.7,116.3,103.5', 'value', '--preprocess mean', '123.7,116.3,103.5'),
        ('std=0.1,0,0.1', 'value', '--preprocess std', '0.1,0,0.1'),
    ],
)
def test_impossible_preprocess_is_refused(given, kind, field, value):
    with refused(kind, field=field, value=value):
        description.parse_preprocess([given])


def test_messages_about_impossible_preprocess():
    with refused('choice') as error:
        description.parse_preprocess(['men=1'])
    assert str(error.value) == (
        "the field of --preprocess is 'men'. Did you mean mean? It is one of: antialias, "
        'crop_ratio, fit, mean, resize, std, uint8_resize, image_size.'
    )
    with refused('value') as error:
        description.parse_preprocess(['mean=0.5'])
    assert str(error.value) == (
        "--preprocess mean is '0.5': expected three numbers (red, green, blue) from 0 to 1."
    )


def test_weights_are_described(tmp_path):
    bare = dataclasses.replace(small.make('vit'), classes=None, preprocess=None)
    assert description.described(bare, [], None) is bare
    (tmp_path / 'lines').write_text('\n'.join(small.CLASSES) + '\n\n')
    (tmp_path / 'array').write_text('\n' + str(small.CLASSES).replace("'", '"'))
    for name in ('lines', 'array'):  # also with the mark that editors on Windows write
        (tmp_path / f'{name} after a mark').write_text(
            (tmp_path / name).read_text(), encoding='utf-8-sig'
        )
    for name in sorted(os.listdir(tmp_path)):
        found = description.described(bare, ['crop_ratio=0.9'], str(tmp_path / name))
        assert (found.classes, found.preprocess) == (small.CLASSES, {'crop_ratio': 0.9})
    given = description.described(small.make('vit'), ['crop_ratio=0.9'], None).preprocess
    assert given == small.make('vit').preprocess | {'crop_ratio': 0.9}


@pytest.mark.parametrize(
    ('text', 'kind'),
    [
        ('ant\nbee\n', 'value'),
        ('["ant", ', 'unreadable'),
        ('{"0": "ant"}', 'content'),
        (None, 'unreadable'),
        ('a pipe', 'unreadable'),
        ('[' * 200_000, 'unreadable'),
    ],
    ids=lambda x: str(x)[:20],
)
def test_impossible_classes_are_refused(text, kind, tmp_path):
    if text == 'a pipe':
        os.mkfifo(tmp_path / 'names')
    elif text:
        (tmp_path / 'names').write_text(text)
    with refused(kind, field='--classes', file=tmp_path / 'names'):
        description.described(small.make('vit'), [], str(tmp_path / 'names'))


def test_message_about_the_number_of_names(tmp_path):
    (tmp_path / 'names').write_text('ant\nbee\n')
    with refused('value', value=2) as error:
        description.described(small.make('vit'), [], str(tmp_path / 'names'))
    assert str(error.value) == (
        f'--classes={tmp_path}/names has 2 names: expected 7, one for each class of vit.'
    )


def test_images_of_other_channels_are_refused():
    description.check_rgb(small.make('vit'))
    with refused('inapplicable', file='rectangle', value=5):
        description.check_rgb(small.make('rectangle'))


def test_a_warning_lists_the_defaults(caplog):
    caplog.set_level('INFO', logger='vit_jax')
    complete = description.complete_preprocess(small.make('vit'))
    assert complete == small.PREPROCESS
    assert not caplog.messages
    silent = dataclasses.replace(small.make('vit'), preprocess={'mean': (0.1, 0.2, 0.3)})
    assert description.complete_preprocess(silent) == dict(
        fit='cover',
        crop_ratio=0.875,
        resize='bilinear',
        antialias=True,
        uint8_resize=False,
        mean=(0.1, 0.2, 0.3),
        std=(0.5,) * 3,
    )
    assert caplog.messages == [
        'vit does not say antialias, crop_ratio, fit, resize, std, uint8_resize of images: the '
        'defaults antialias=True crop_ratio=0.875 fit=cover resize=bilinear std=(0.5, 0.5, 0.5) '
        'uint8_resize=False are used. '
        'To change that, add --preprocess FIELD=VALUE; from Python: weights.described(w, [...]).'
    ]
    assert caplog.records[0].levelname == 'WARNING'  # Python shows warnings by default


@pytest.mark.parametrize(
    ('stated', 'given', 'expected'),
    [
        ({}, 'fit=torchvision', True),
        ({}, 'fit=transformers', True),
        ({}, 'fit=transformers,uint8_resize=False', False),
        ({}, 'fit=cover', None),
        ({}, 'fit=torchvision,antialias=False', False),
        ({'antialias': False}, 'fit=torchvision', False),
        ({'uint8_resize': True}, 'resize=area', False),
        ({'uint8_resize': True}, 'crop_ratio=1', True),
    ],
    ids=str,
)
def test_the_fit_of_a_program_that_rounds_implies_rounding(stated, given, expected):
    loaded = dataclasses.replace(small.make('vit'), preprocess=stated)
    found = description.described(loaded, [given]).preprocess
    assert found.get('uint8_resize') is expected


def test_rounding_needs_a_filter_of_pillow():
    with refused('value', field='preprocess.antialias', value=False):
        description.described(small.make('vit'), ['uint8_resize=True,antialias=False'])
    by_hand = dataclasses.replace(
        small.make('vit'), preprocess={'uint8_resize': True, 'resize': 'area'}
    )
    with refused('value', field='preprocess.resize', value='area'):
        description.complete_preprocess(by_hand)


@pytest.mark.parametrize('layout', ['timm', 'torchvision', 'huggingface'])
def test_programs_that_resize_by_pillow_round_unless_weights_say_otherwise(layout):
    silent = dataclasses.replace(small.make('vit'), preprocess=None, layout=layout)
    assert description.complete_preprocess(silent)['uint8_resize'] is True


def test_classes_without_names_get_names(caplog):
    """1000 classes get the names of ImageNet-1k, with a warning: a daisy is no 'class 985'."""
    assert description.class_names(small.make('vit')) == small.CLASSES
    assert not caplog.records
    bare = dataclasses.replace(small.make('vit'), classes=None, num_classes=3)
    assert description.class_names(bare) == ['class 0', 'class 1', 'class 2']
    names = description.class_names(dataclasses.replace(bare, num_classes=1000))
    assert len(set(names)) == 1000
    assert [names[k] for k in (0, 907, 985, 999)] == [
        'tench',
        'wine bottle',
        'daisy',
        'toilet tissue',
    ]
    assert (
        'vit does not name its 1000 classes: the names of ImageNet-1k are used. If the classes '
        'are others, add --classes=FILE.'
    ) in caplog.text


def test_model_options_are_parsed():
    assert description.parse_model(['num_heads=3,gelu=erf', 'layer_norm_epsilon=1e-5']) == {
        'num_heads': 3,
        'gelu': 'erf',
        'layer_norm_epsilon': 1e-5,
    }


@pytest.mark.parametrize(
    ('given', 'kind', 'field', 'value'),
    [
        ('heads=3', 'choice', 'the field of --model', 'heads'),
        ('num_heads=x', 'value', '--model num_heads', 'x'),
        ('num_heads=-3', 'value', '--model num_heads', '-3'),
        ('layer_norm_epsilon', 'value', '--model layer_norm_epsilon', ''),
        ('gelu=erv', 'choice', '--model gelu', 'erv'),
    ],
)
def test_impossible_fields_of_the_model_are_refused(given, kind, field, value):
    with refused(kind, field=field, value=value):
        description.parse_model([given])


@pytest.mark.parametrize(('field', 'value'), [('fit', 'squish'), ('resize', 'box')])
def test_an_unknown_way_to_prepare_images_is_refused(field, value):
    given = dataclasses.replace(small.make('vit'), preprocess={field: value})
    with refused('choice', value=value) as error:
        description.complete_preprocess(given)
    assert f'preprocess.{field} of vit, which --preprocess {field}=VALUE' in str(error.value)


@pytest.mark.parametrize('layout', ['vit_jax', 'huggingface'])
def test_classes_are_equal_in_either_unicode_normalisation(layout, caplog):
    loaded = dataclasses.replace(
        small.make('vit'), classes=['caf\u00e9', 'bar', 'pub'], num_classes=3, layout=layout
    )
    names = ('cafe\u0301', 'bar', 'pub')
    assert description.names_tell(loaded, names)
    description.check_classes(loaded, names, 'the data')
    assert not caplog.records
    with refused('value', field='classes', file='vit'):
        description.check_classes(loaded, ('bar', 'cafe\u0301', 'pub'), 'the data')
