import numpy as np

from vit_jax.scoring import classes


def test_classes_of_the_same_name_have_numbers():
    rows = {'label': np.array([0, 0, 1, 1, 2]), 'predicted': np.array([0, 1, 1, 1, 0])}
    result = classes.by_class(rows, ['crane', 'crane', 'maillot'])
    assert result['confusion'] == {
        'crane (0)': {'crane (0)': 1, 'crane (1)': 1},
        'crane (1)': {'crane (1)': 2},
        'maillot': {'crane (0)': 1},
    }
    assert result['classes'] == {
        'crane (0)': {'accuracy': 0.5, 'num_examples': 2},
        'crane (1)': {'accuracy': 1.0, 'num_examples': 2},
        'maillot': {'accuracy': 0.0, 'num_examples': 1},
    }
    assert result['mean_class_accuracy'] == 0.5
    assert classes.by_class(rows, ['a', 'b', 'c', 'without images'])['mean_class_accuracy'] == 0.5


def test_top_5_is_shown_for_ten_classes_or_more():
    for count, top5 in ((9, ''), (10, 'top-5 90.00 %  ')):
        row = {'accuracy': 0.5, 'num_examples': 3}
        result = {
            'classes': {f'{k}': row for k in range(count)},
            'broken': [],
            'calibration': {'expected_error': None},
            'dataset': 'DATA',
            'split': 'test',
            'eval/accuracy': 0.5,
            'eval/accuracy_top5': 0.9,
            'eval/loss': 1.0,
            'eval/num_examples': 30,
            'mean_class_accuracy': 0.4,
        }
        assert classes.table(result).splitlines()[-1] == (
            f'accuracy 50.00 %  {top5}mean of {count} classes 40.00 %  '
            "worst class '0': 50.00 % of 3 images  loss 1.0000  on 30 images of DATA, test"
        )


def test_a_class_without_images_is_named_and_does_not_count_for_the_mean():
    rows = {'label': np.array([0, 0, 1, 1, 1]), 'predicted': np.array([0, 0, 0, 1, 1])}
    result = classes.by_class(rows, ['ape', 'baboon', 'squirrel monkey']) | {
        'broken': [],
        'calibration': {'expected_error': None},
        'dataset': 'DATA',
        'split': 'test',
        'eval/accuracy': 0.8,
        'eval/accuracy_top5': 1.0,
        'eval/loss': 1.0,
        'eval/num_examples': 5,
    }
    *_, missing, last = classes.table(result).splitlines()
    assert missing == 'no images of 1 of 3 classes: squirrel monkey'
    assert "mean of 2 of 3 classes 83.33 %  worst class 'baboon': 66.67 % of 3 images" in last
    mapped = classes.table(result | {'mapping': 'FILE'})  # weights have more classes than the data
    assert 'squirrel monkey' not in mapped
