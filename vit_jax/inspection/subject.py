"""A model and images, and the values that several of their figures need, computed on first use."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt8

from vit_jax.errors import Inapplicable, UserError, nearest_names
from vit_jax.files import composed
from vit_jax.inspection import attention, attribution, maps
from vit_jax.weights import Loaded, description
from vit_jax.weights.apply import as_pixels, prepare
from vit_jax.weights.model import patch_in_pixels

SHOWN = 6  # number of images in figures of photos; attention distances use all images


class Choice(NamedTuple):
    """The part of a model to draw; None is the default. Numbers count from 0."""

    layer: int | None = None
    head: int | None = None
    query: str | None = None  # ROW,COLUMN of a patch
    target: str | None = None  # name or number of a class


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its weights, image files, and the part to draw."""

    loaded: Loaded
    paths: Sequence[str] = ()
    choice: Choice = Choice()

    @functools.cached_property
    def images(
        self,
    ) -> tuple[
        Float[np.ndarray, 'images height width 3'], UInt8[np.ndarray, 'images height width 3']
    ]:
        """The images, prepared for the model and as pixels.

        Raises:
          Inapplicable: there are no images, or the model has no attention between patches.
          UserError: an image cannot be read.
        """
        attention.check(self.loaded.module)
        if not self.paths:
            raise Inapplicable('it needs images: name image files')
        weights = self.loaded.weights
        preprocess = (weights.preprocess or {}) | description.complete_preprocess(weights)
        prepared = prepare(dataclasses.replace(weights, preprocess=preprocess), self.paths)
        return prepared, as_pixels(prepared, preprocess)

    @functools.cached_property
    def photos(self) -> UInt8[np.ndarray, 'shown height width 3']:
        """The first images, as pixels."""
        return self.images[1][:SHOWN]

    @functools.cached_property
    def observed(self) -> dict[str, np.ndarray]:
        """`distance`, `rollout`, `query` (maps.of_query), `head` and `logits` of each image."""
        images, _ = self.images
        query = self.query
        _ = self.panels  # raises an error of the choice before the long computation
        patch = patch_in_pixels(self.loaded.weights.model)
        observe = attention.observer(self.loaded.module)
        values_of_images = []
        for image in images:  # one by one, because the weights of large models take gigabytes
            observed = observe(self.loaded.params, image[None])
            values_of_images.append(
                {
                    'distance': maps.distances(observed, patch)[:, 0],
                    'rollout': maps.rollout(observed)[0],
                    'query': maps.of_query(observed, query)[:, 0],
                    'head': maps.of_head(observed)[0],
                    'logits': observed.logits[0],
                }
            )
        return jax.tree.map(lambda *x: np.stack(x), *values_of_images)

    @property
    def query(self) -> tuple[int, int] | None:
        """(row, column) of the chosen patch; UserError if there is no such patch."""
        if self.choice.query is None:
            return None
        rows, columns = self.loaded.module.grid(self.loaded.weights.image_size())
        match = re.fullmatch(r'(\d+),(\d+)', self.choice.query)
        if match is not None:
            row = int(match[1])
            column = int(match[2])
            if row < rows and column < columns:
                return row, column
        raise UserError(
            f'--query is {self.choice.query}: expected ROW,COLUMN of one of the {rows}x{columns} '
            f'patches, from 0,0 to {rows - 1},{columns - 1}.',
            kind='value',
            field='--query',
            value=self.choice.query,
        )

    @property
    def panels(self) -> tuple[Sequence[int], Sequence[int]]:
        """The layers and the heads to draw; by default all heads of the last layer.

        If only a layer is chosen, all its heads are drawn. If only a head is chosen, it is drawn in
        all layers.
        """
        module = self.loaded.module
        num_layers = module.num_layers
        if module.attention == 'axial':  # two layers of attention in each block
            num_layers *= 2
        num_heads = module.fields.num_heads
        layer = self.choice.layer
        head = self.choice.head
        if layer is None and head is None:
            layer = num_layers - 1
        layers: Sequence[int] = range(num_layers)
        if layer is not None:
            layers = [check_number('--layer', layer, num_layers)]
        heads: Sequence[int] = range(num_heads)
        if head is not None:
            heads = [check_number('--head', head, num_heads)]
        return layers, heads

    @functools.cached_property
    def attributed(self) -> dict[str, np.ndarray]:
        """`maps`, the relevance for the chosen or likeliest class, and `captions`, the class.

        Raises:
          Inapplicable: the model has no classes.
          UserError: there is no such class.
        """
        attribute = attribution.attributor(self.loaded.module)
        names = description.class_names(self.loaded.weights)
        target = self._target(names)
        logits = self.observed['logits'][:SHOWN]
        classes = logits.argmax(axis=-1)
        if target is not None:
            classes[:] = target
        activation = jax.nn.sigmoid if self.loaded.weights.loss == 'sigmoid' else jax.nn.softmax
        probabilities = np.take_along_axis(np.asarray(activation(logits)), classes[:, None], axis=1)
        relevance = [
            attribute(self.loaded.params, image[None], number[None])[0]
            for image, number in zip(self.images[0], classes, strict=False)
        ]
        captions = [
            f'{names[number][:22]}, {100 * probability:.0f} %'
            for number, probability in zip(classes, probabilities[:, 0], strict=True)
        ]
        return {'maps': np.stack(relevance), 'captions': np.array(captions)}

    def _target(self, names: Sequence[str]) -> int | None:
        """The number of the chosen class; the first one if two classes have the same name."""
        choice = self.choice.target
        if choice is None:
            return None
        for number, name in enumerate(names):
            if composed(name) == composed(choice):
                return number
        if choice.isdecimal() and int(choice) < len(names):
            return int(choice)
        raise UserError(
            f'--class is {choice}: {nearest_names(choice, names)}Expected the name of a class, or '
            f'its number, from 0 to {len(names) - 1}.',
            kind='unknown',
            field='--class',
            value=choice,
        )


def check_number(option: str, value: int, count: int) -> int:
    """Returns `value`; raises UserError unless it is from 0 to `count` - 1."""
    if not 0 <= value < count:
        raise UserError(
            f'{option} is {value}: expected a whole number from 0 to {count - 1}.',
            kind='value',
            field=option,
            value=value,
        )
    return value
