"""The arrays of each figure of a model, by name, as drawing/ takes and the command saves them."""

import numpy as np

from vit_jax.errors import Inapplicable
from vit_jax.inspection import maps, parameters
from vit_jax.inspection.subject import SHOWN, Subject, number
from vit_jax.weights.model import patch_in_pixels

Arrays = dict[str, np.ndarray]


def filters(subject: Subject) -> Arrays:
    """Principal components of the filters on pixels (figure 7, left)."""
    found, variance = parameters.filters(subject.loaded.params)
    return {'filters': found, 'variance': variance}


def positions(subject: Subject) -> Arrays:
    """Similarity of position embeddings (figures 7, centre, and 10), of a layer if each has one."""
    found = parameters.position_similarity(
        subject.loaded.module, subject.loaded.params, subject.loaded.weights.image_size()
    )
    of_layer = (
        found[number('--layer', subject.choice.layer or 0, len(found))]
        if (len(found) > 1)
        else found[0]
    )
    return {'similarity': of_layer}


def distance(subject: Subject) -> Arrays:
    """How far each head of each layer looks, in pixels (figures 7, right, and 11)."""
    found = subject.observed['distance']
    size = subject.loaded.weights.image_size()
    patch = patch_in_pixels(subject.loaded.weights.model)
    between = maps.between_patches(subject.loaded.module.grid(size), patch)
    return {
        'distance': found.mean(axis=0),
        'of_each_image': found,
        'uniform': between.mean(),
        'image_size': np.array(size),
    }


def rollout(subject: Subject) -> Arrays:
    """Attention through all layers (figures 6 and 14)."""
    return {'photos': subject.photos, 'maps': subject.observed['rollout'][:SHOWN]}


def attention(subject: Subject) -> Arrays:
    """Attention of a query: one head, one layer, or all heads of the last layer."""
    found, query, (layers, heads) = subject.observed['query'][:SHOWN], subject.query, subject.panels
    source = (
        f'patch {query[0]},{query[1]} attends'
        if query
        else 'the class token attends'
        if subject.loaded.module.pool == 'cls'
        else 'all patches attend'
    )
    return {
        'photos': subject.photos,
        'maps': found[:, layers][:, :, heads].reshape(len(found), -1, *found.shape[-2:]),
        'panels': np.array([f'layer {k}, head {h}' for k in layers for h in heads]),
        'what': np.array(f'what {source} to'),
        'query': np.array(query or ()),
    }


def threshold(subject: Subject) -> Arrays:
    """The patches with 60 % of the attention from which the class is read, by head, as in DINO."""
    found = subject.observed['head'][:SHOWN]
    reader = {'cls': 'the class token attends', 'map': 'the pooling attends'}.get(
        subject.loaded.module.pool, 'all patches attend'
    )
    return {
        'photos': subject.photos,
        'maps': maps.most_of_mass(found),
        'panels': np.array([f'head {k}' for k in range(found.shape[1])]),
        'what': np.array(f'patches with 60 % of what {reader} to'),
    }


def attribution(subject: Subject) -> Arrays:
    """What speaks for a class: gradient times attention."""
    return {'photos': subject.photos} | subject.attributed


def compare(subject: Subject) -> Arrays:
    """Rollout, thresholded attention and, where there are classes, attribution."""
    found = {
        'photos': subject.photos,
        'rollout': subject.observed['rollout'][:SHOWN],
        'kept': maps.most_of_mass(subject.observed['head'][:SHOWN].mean(axis=1)),
    }
    try:
        attributed = subject.attributed
    except Inapplicable:
        return found
    return found | {'attribution': attributed['maps'], 'captions': attributed['captions']}
