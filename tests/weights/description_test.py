"""What a command line says of weights that do not say it themselves."""

import dataclasses
import os

import pytest

from tests.support import small
from vit_jax.errors import UserError
from vit_jax.weights import description


def test_preprocess_of_a_command_line():
    assert description.parse_preprocess([]) == {}
    assert description.parse_preprocess(
        ['mean=0,0.5,1', 'std=0.2,0.3,1', 'crop_ratio=1', 'resize=bicubic', 'crop_ratio=0.9']
    ) == {'mean': (0, 0.5, 1), 'std': (0.2, 0.3, 1), 'crop_ratio': 0.9, 'resize': 'bicubic'}
    assert description.parse_preprocess(
        ['fit=squash,antialias=False,crop_ratio=0.9,mean=0,0.5,1']
    ) == {'mean': (0, 0.5, 1), 'crop_ratio': 0.9, 'fit': 'squash', 'antialias': False}


def test_an_image_size_is_one_that_the_positions_fit():
    """Where weights do not state it and patches form no square, it tells how they lie."""
    loaded = small.make('vit')
    assert description.described(loaded, ['image_size=16']).image_size() == (16, 16)
    with pytest.raises(UserError, match='image_size=24,16: vit is for images of 16,16. Fine-tu'):
        description.described(loaded, ['image_size=24,16'])
    with pytest.raises(UserError, match='image_size=32,8: vit is for images of 16,16. Fine-tu'):
        description.described(loaded, ['image_size=32,8'])  # has as many patches
    wide = small.make('rectangle')
    wide = dataclasses.replace(wide, preprocess=None)
    for given in ([], ['mean=0,0,0']):
        with pytest.raises(UserError, match='not form a square.*add --preprocess image_size=HEI'):
            description.described(wide, given).image_size()
    assert description.described(wide, ['image_size=16,12']).image_size() == (16, 12)
    free = small.make('no-position')
    assert description.described(free, ['image_size=24,16']).image_size() == (24, 16)


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ('men=1', "is 'men'. Did you mean mean. It is one of: antialias, crop_ratio, fit, mean"),
        ('image_size=0', "image_size is '0': expected "),
        ('resize=cubic', "--preprocess resize is 'cubic'. Did you mean bicubic.*lanczos3"),
        ('crop_ratio', "crop_ratio is '': expected a number, at least 0.01 and at most 1"),
        ('fit=crop', "--preprocess fit is 'crop'. It is one of: cover, squash"),
        ('antialias=no', "antialias is 'no': expected True or False"),
        ('crop_ratio=1.1', 'expected a number, at least 0.01 and at most 1'),
        ('crop_ratio=nan', 'expected a number, at least 0.01 and at most 1'),
        ('mean=0.5', r"mean is '0.5': expected three numbers .red, green, blue. from 0 to 1"),
        ('mean=123.7,116.3,103.5', 'from 0 to 1'),
        ('resize=bicubic,crop_ratio=2', "crop_ratio is '2': expected a number, at least 0.01"),
        ('resize=bicubic,crop=1', "is 'crop'. Did you mean crop_ratio"),
        ('std=0.1,0,0.1', 'three numbers .red, green, blue. from 0.001 to 1'),
    ],
)
def test_impossible_preprocess(given, message):
    with pytest.raises(UserError, match=message):
        description.parse_preprocess([given])


def test_weights_are_described(tmp_path):
    bare = dataclasses.replace(small.make('vit'), classes=None, preprocess=None)
    assert description.described(bare, [], None) is bare
    (tmp_path / 'lines').write_text('\n'.join(small.CLASSES) + '\n\n')
    (tmp_path / 'array').write_text('\n' + str(small.CLASSES).replace("'", '"'))
    for name in ('lines', 'array'):  # and as editors of Windows write them
        (tmp_path / f'{name} after a mark').write_text(
            (tmp_path / name).read_text(), encoding='utf-8-sig'
        )
    for name in sorted(os.listdir(tmp_path)):
        found = description.described(bare, ['crop_ratio=0.9'], str(tmp_path / name))
        assert (found.classes, found.preprocess) == (small.CLASSES, {'crop_ratio': 0.9})
    given = description.described(small.make('vit'), ['crop_ratio=0.9'], None).preprocess
    assert given == small.make('vit').preprocess | {'crop_ratio': 0.9}


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('ant\nbee\n', 'has 2 names; vit has 7 classes'),
        ('["ant", ', 'cannot be read: Expecting'),
        ('{"0": "ant"}', 'is a JSON object: expected an array, or a name per line'),
        (None, 'cannot be read: .*No such file'),
        ('a pipe', 'cannot be read: it is not a regular file'),
        ('[' * 200_000, 'cannot be read: maximum recursion'),
    ],
)
def test_impossible_classes(text, message, tmp_path):
    if text == 'a pipe':
        os.mkfifo(tmp_path / 'names')
    elif text:
        (tmp_path / 'names').write_text(text)
    with pytest.raises(UserError, match=message):
        description.described(small.make('vit'), [], str(tmp_path / 'names'))


def test_images_of_other_channels():
    description.check_rgb(small.make('vit'))
    with pytest.raises(UserError, match='rectangle takes images of 5 channels; image files are'):
        description.check_rgb(small.make('rectangle'))


def test_defaults_are_said(caplog):
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
    assert caplog.records[0].levelname == 'WARNING'  # which Python shows of itself


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
def test_fit_of_a_program_that_rounds_implies_that(stated, given, expected):
    loaded = dataclasses.replace(small.make('vit'), preprocess=stated)
    found = description.described(loaded, [given]).preprocess
    assert found.get('uint8_resize') is expected


def test_rounding_needs_a_filter_of_pillow():
    with pytest.raises(UserError, match='antialias is False and preprocess.uint8_resize is True'):
        description.described(small.make('vit'), ['uint8_resize=True,antialias=False'])
    by_hand = dataclasses.replace(
        small.make('vit'), preprocess={'uint8_resize': True, 'resize': 'area'}
    )
    with pytest.raises(UserError, match='resize is area and preprocess.uint8_resize is True'):
        description.complete_preprocess(by_hand)


@pytest.mark.parametrize('layout', ['timm', 'torchvision', 'huggingface'])
def test_programs_that_resize_by_pillow_round_unless_weights_say_otherwise(layout):
    silent = dataclasses.replace(small.make('vit'), preprocess=None, layout=layout)
    assert description.complete_preprocess(silent)['uint8_resize'] is True


def test_classes_without_names(caplog):
    """1000 are ImageNet-1k's, which is said: a daisy is no 'class 985'."""
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
        'vit does not name its 1000 classes: they are taken for those of ImageNet-1k. If '
        'they are others, add --classes=FILE.'
    ) in caplog.text


def test_fields_of_the_model_of_a_command_line():
    assert description.parse_model(['num_heads=3,gelu=erf', 'layer_norm_epsilon=1e-5']) == {
        'num_heads': 3,
        'gelu': 'erf',
        'layer_norm_epsilon': 1e-5,
    }
    for given, expected in [
        ('heads=3', "is 'heads'. Did you mean num_heads"),
        ('num_heads=x', "--model num_heads is 'x': expected a whole number"),
        ('num_heads=-3', "num_heads is '-3': expected a whole number, at least 1"),
        ('layer_norm_epsilon', "layer_norm_epsilon is ''"),
        ('gelu=erv', "gelu is 'erv'. Did you mean erf"),
    ]:
        with pytest.raises(UserError, match=expected):
            description.parse_model([given])


@pytest.mark.parametrize(
    ('field', 'value', 'said'),
    [('fit', 'squish', 'Did you mean squash'), ('resize', 'box', 'It is one of: bilinear, ')],
)
def test_a_way_to_prepare_images_that_is_not_there(field, value, said):
    given = dataclasses.replace(small.make('vit'), preprocess={field: value})
    with pytest.raises(
        UserError,
        match=f'preprocess.{field} of vit, which --preprocess '
        f"{field}=VALUE changes, is '{value}'. {said}",
    ):
        description.complete_preprocess(given)


@pytest.mark.parametrize('layout', ['vit_jax', 'huggingface'])
def test_classes_are_the_same_in_either_unicode_normalisation(layout, caplog):
    loaded = dataclasses.replace(
        small.make('vit'), classes=['caf\u00e9', 'bar', 'pub'], num_classes=3, layout=layout
    )
    names = ('cafe\u0301', 'bar', 'pub')
    assert description.names_tell(loaded, names)
    description.check_classes(loaded, names, 'the data')
    assert not caplog.records
    with pytest.raises(UserError, match='not the same classes in the same order'):
        description.check_classes(loaded, ('bar', 'cafe\u0301', 'pub'), 'the data')
