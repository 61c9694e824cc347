import numpy as np

from vit_jax.scoring import classes


def test_classes_of_the_same_name_are_told_apart():
    rows = {'label': np.array([0, 0, 1, 1, 2]), 'predicted': np.array([0, 1, 1, 1, 0])}
    found = classes.by_class(rows, ['crane', 'crane', 'maillot'])
    assert found['confusion'] == {'crane (0)': {'crane (0)': 1, 'crane (1)': 1},
                                  'crane (1)': {'crane (1)': 2}, 'maillot': {'crane (0)': 1}}
    assert found['classes'] == {'crane (0)': {'accuracy': 0.5, 'num_examples': 2},
                                'crane (1)': {'accuracy': 1.0, 'num_examples': 2},
                                'maillot': {'accuracy': 0.0, 'num_examples': 1}}
