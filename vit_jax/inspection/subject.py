"""A model and some images, and what figures of them share, computed when first asked for."""

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

SHOWN = 6  # images in figures of photos; the others count in attention distances


class Choice(NamedTuple):
    """What is drawn of all that could be, None for the default; numbers count from 0."""

    layer: int | None = None
    head: int | None = None
    query: str | None = None  # ROW,COLUMN of a patch
    target: str | None = None  # name or number of a class


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its weights, image files, and a choice of what is drawn."""

    loaded: Loaded
    paths: Sequence[str] = ()
    choice: Choice = Choice()

    @functools.cached_property
    def images(
        self,
    ) -> tuple[
        Float[np.ndarray, 'images height width 3'], UInt8[np.ndarray, 'images height width 3']
    ]:
        """As the model takes them, and as people see them.

        Raises Inapplicable for none or a model without attention, UserError for one that cannot be
        read.
        """
        attention.check(self.loaded.module)
        if not self.paths:
            raise Inapplicable('it is of images: name some files')
        weights = self.loaded.weights
        given = (weights.preprocess or {}) | description.complete_preprocess(weights)
        prepared = prepare(dataclasses.replace(weights, preprocess=given), self.paths)
        return prepared, as_pixels(prepared, given)

    @functools.cached_property
    def photos(self) -> UInt8[np.ndarray, 'shown height width 3']:
        """The first images, for people."""
        return self.images[1][:SHOWN]

    @functools.cached_property
    def observed(self) -> dict[str, np.ndarray]:
        """Of each image: `distance`, `rollout`, `query` (maps.of_query), `head` and `logits`."""
        images, query, _ = self.images[0], self.query, self.panels  # checked before the work
        patch = patch_in_pixels(self.loaded.weights.model)
        observe, found = attention.observer(self.loaded.module), []
        for image in images:  # one by one: of large models the weights take gigabytes
            seen = observe(self.loaded.params, image[None])
            found.append(
                {
                    'distance': maps.distances(seen, patch)[:, 0],
                    'rollout': maps.rollout(seen)[0],
                    'query': maps.of_query(seen, query)[:, 0],
                    'head': maps.of_head(seen)[0],
                    'logits': seen.logits[0],
                }
            )
        return jax.tree.map(lambda *x: np.stack(x), *found)

    @property
    def query(self) -> tuple[int, int] | None:
        """(row, column) of the patch that was chosen; UserError unless there is such a patch."""
        if self.choice.query is None:
            return None
        rows, columns = self.loaded.module.grid(self.loaded.weights.image_size())
        found = re.fullmatch(r'(\d+),(\d+)', self.choice.query)
        query = (int(found[1]), int(found[2])) if found else None
        if query is None or query[0] >= rows or query[1] >= columns:
            raise UserError(
                f'--query={self.choice.query}: expected ROW,COLUMN of one of the '
                f'{rows}x{columns} patches, from 0,0 to {rows - 1},{columns - 1}.'
            )
        return query

    @property
    def panels(self) -> tuple[Sequence[int], Sequence[int]]:
        """Layers and heads that were chosen, by default all heads of the last layer.

        A layer chosen alone comes with all heads, a head chosen alone with all layers.
        """
        module = self.loaded.module
        layers = module.num_layers * (2 if module.attention == 'axial' else 1)
        heads = module.fields.num_heads
        layer = self.choice.layer
        head = self.choice.head
        if layer is None and head is None:
            layer = layers - 1
        return (
            range(layers) if layer is None else [number('--layer', layer, layers)],
            range(heads) if head is None else [number('--head', head, heads)],
        )

    @functools.cached_property
    def attributed(self) -> dict[str, np.ndarray]:
        """Relevance for the class chosen or the likeliest: `maps`, and `captions` with the class.

        Raises Inapplicable without classes, UserError for a class that there is not.
        """
        attribute = attribution.attributor(self.loaded.module)
        given, names = self.choice.target, description.class_names(self.loaded.weights)
        numbers = {composed(name): number for number, name in reversed([*enumerate(names)])}
        number = None if given is None else numbers.get(composed(given))
        if (
            given is not None
            and number is None
            and not (given.isdecimal() and int(given) < len(names))
        ):
            raise UserError(
                f'--class={given}: {nearest_names(given, names)}Expected the name of '
                f'a class, or its number, from 0 to {len(names) - 1}.'
            )
        logits = self.observed['logits'][:SHOWN]
        classes = logits.argmax(axis=-1)
        if given is not None:
            classes[:] = int(given) if number is None else number
        activation = jax.nn.sigmoid if self.loaded.weights.loss == 'sigmoid' else jax.nn.softmax
        shares = np.take_along_axis(np.asarray(activation(logits)), classes[:, None], axis=1)
        return {
            'maps': np.stack(
                [
                    attribute(self.loaded.params, image[None], k[None])[0]
                    for image, k in zip(self.images[0], classes, strict=False)
                ]
            ),
            'captions': np.array(
                [
                    f'{names[k][:22]}, {100 * share:.0f} %'
                    for k, share in zip(classes, shares[:, 0], strict=True)
                ]
            ),
        }


def number(option: str, value: int, count: int) -> int:
    """`value` of an option; UserError unless it is one of so many from 0 on."""
    if not 0 <= value < count:
        raise UserError(f'{option}={value}: expected a number from 0 to {count - 1}.')
    return value
