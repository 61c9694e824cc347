"""The frozen features of photo files, with several files decoded while the model computes."""

import collections
import concurrent.futures
import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Float32

from vit_jax.data import images
from vit_jax.weights import Weights, description, predictor

log = logging.getLogger(__name__)

BATCH = 32  # photos whose features are computed together
_AT_ONCE = 4  # files that are decoded at the same time
_AHEAD = 3  # batches
_REPORT_EVERY = 10.0  # seconds between two lines of progress


class Extractor:
    """Computes the representation and the logits of photos as prediction computes them."""

    def __init__(self, weights: Weights, batch_size: int):
        """Args:
        weights: of a model of RGB images.
        batch_size: photos that are computed together.

        Raises:
          UserError: if the model takes other images.
        """
        description.check_rgb(weights)
        self._size = weights.image_size()
        self._preprocess = description.complete_preprocess(weights)
        self._predict = predictor(weights)
        self._batch_size = batch_size

    def batches(self, files: Sequence[str]) -> Iterator[Float32[np.ndarray, 'batch features']]:
        """Yield the representations of the files, batch by batch, in their order."""
        parts = [
            files[start : start + self._batch_size]
            for start in range(0, len(files), self._batch_size)
        ]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            waiting: collections.deque = collections.deque()
            for part in parts:
                waiting.append(pool.map(self._load, part))
                if len(waiting) > _AHEAD:
                    yield self._representations(list(waiting.popleft()))
            while waiting:
                yield self._representations(list(waiting.popleft()))

    def __call__(self, files: Sequence[str]) -> Float32[np.ndarray, 'files features']:
        """The representations of all files."""
        found = []
        done = 0
        reported = time.monotonic()
        for batch in self.batches(files):
            found.append(batch)
            done += len(batch)
            if time.monotonic() - reported >= _REPORT_EVERY:
                reported = time.monotonic()
                log.info('Computed the features of %d of %d photos', done, len(files))
        return np.concatenate(found)

    def _load(self, file):
        return images.load(file, self._size, self._preprocess)

    def _representations(self, pixels):
        count = len(pixels)
        batch = np.stack(pixels)
        missing = self._batch_size - count
        batch = np.pad(batch, ((0, missing), (0, 0), (0, 0), (0, 0)))  # compiled for one shape
        representations, _ = self._predict(batch)
        return representations[:count]


def logits_of(
    weights: Weights, representations: Float[np.ndarray, 'files features']
) -> Float[np.ndarray, 'files classes']:
    """The logits that the head of the weights gives representations, in float64."""
    head = weights.params['head']
    kernel = np.asarray(head['kernel'], np.float64)
    return representations.astype(np.float64) @ kernel + np.asarray(head['bias'], np.float64)
