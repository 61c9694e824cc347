import numpy as np
import pytest

from tests.support.pages import observed, read_sheet
from vit_jax.reporting import attention


@pytest.mark.parametrize('registers', [0, 2])
@pytest.mark.parametrize('class_token', [True, False])
def test_weights_can_be_read_from_the_pictures(class_token, registers):
    """The error is at most half a grey step, 1/30, of the square root of the peak."""
    seen = observed(class_token=class_token, registers=registers)
    found = attention.photo(seen, (1, 1))
    assert (found['queries'], found['keys'], found['class_token']) == ([4, 6], [4, 6], class_token)
    first = class_token + registers
    queries = np.delete(seen.weights[:, 0], range(int(class_token), first), axis=2)
    expected = queries[..., first:].reshape(2, 3, -1, 4, 6)
    for layer, uri in enumerate(found['layers']):
        weights = read_sheet(uri, 24 + class_token, 3, (4, 6))
        peak = np.sqrt(expected[layer].max(axis=(-2, -1), keepdims=True))
        wrong = np.abs(np.sqrt(weights) - np.sqrt(expected[layer]))
        assert (wrong <= peak / 30 + 1 / 255).all()


def test_blocks_average_queries_and_sum_keys():
    seen = observed(grid=(5, 4))
    found = attention.photo(seen, (2, 4))
    assert (found['queries'], found['keys']) == ([3, 2], [2, 1])
    weights = seen.weights[0, 0, 0, 1:, 1:].reshape(5, 4, 5, 4)
    expected = (
        weights[4:, 2:].mean(axis=(0, 1))[:4].sum()
    )  # from the last block of queries to the first block of keys
    last = read_sheet(found['layers'][0], 7, 3, (2, 1))[0, 6]
    assert last[0, 0] == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ('grid', 'maps', 'expected'),
    [
        ((14, 14), 12 * 3 * 4, (1, 1)),  # Ti/16, four photos
        ((14, 14), 12 * 12 * 4, (2, 1)),  # B/16
        ((14, 14), 24 * 16 * 4, (2, 2)),  # L/16
        ((16, 16), 32 * 16 * 4, (4, 2)),  # H/14
        ((3, 5), 10**9, (8, 8)),
    ],
)  # blocks are at most as large as the image
def test_block_sizes_limit_the_page(grid, maps, expected):
    found = attention.block_sizes(grid, maps, True)
    assert found == expected
