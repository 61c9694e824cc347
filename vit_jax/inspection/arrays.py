"""The arrays of each figure of a model, by name, for drawing/ and for the .npz files."""

import numpy as np

from vit_jax.errors import Inapplicable
from vit_jax.inspection import maps, parameters
from vit_jax.inspection.subject import SHOWN, Subject, check_number
from vit_jax.weights.model import patch_in_pixels

Arrays = dict[str, np.ndarray]


def filters(subject: Subject) -> Arrays:
    """Principal components of the filters on pixels (figure 7, left)."""
    components, variance = parameters.filters(subject.loaded.params)
    return {'filters': components, 'variance': variance}


def positions(subject: Subject) -> Arrays:
    """Similarity of position embeddings (figures 7, centre, and 10).

    If each layer has its own embedding, the figure shows the chosen layer.
    """
    similarity = parameters.position_similarity(
        subject.loaded.module, subject.loaded.params, subject.loaded.weights.image_size()
    )
    num_layers = len(similarity)
    layer = 0
    if num_layers > 1 and subject.choice.layer is not None:
        layer = check_number('--layer', subject.choice.layer, num_layers)
    return {'similarity': similarity[layer]}


def distance(subject: Subject) -> Arrays:
    """Mean attention distance of each head in each layer, in pixels (figures 7, right, and 11)."""
    distances = subject.observed['distance']
    size = subject.loaded.weights.image_size()
    patch = patch_in_pixels(subject.loaded.weights.model)
    between = maps.between_patches(subject.loaded.module.grid(size), patch)
    return {
        'distance': distances.mean(axis=0),
        'of_each_image': distances,
        'uniform': between.mean(),
        'image_size': np.array(size),
    }


def rollout(subject: Subject) -> Arrays:
    """Attention through all layers (figures 6 and 14)."""
    return {'photos': subject.photos, 'maps': subject.observed['rollout'][:SHOWN]}


def attention(subject: Subject) -> Arrays:
    """Attention of a query: one head, one layer, or all heads of the last layer."""
    weights = subject.observed['query'][:SHOWN]  # Inapplicable for a model without attention
    query = subject.query
    layers, heads = subject.panels
    weights = weights[:, layers][:, :, heads]
    if query is not None:
        reader = f'patch {query[0]},{query[1]}'
        verb = 'attends'
    elif subject.loaded.module.pool == 'cls':
        reader = 'the class token'
        verb = 'attends'
    else:
        reader = 'all patches'
        verb = 'attend'
    panels = []
    for layer in layers:
        for head in heads:
            panels.append(f'layer {layer}, head {head}')
    return {
        'photos': subject.photos,
        'maps': weights.reshape(len(weights), -1, *weights.shape[-2:]),
        'panels': np.array(panels),
        'what': np.array(f'what {reader} {verb} to'),
        'query': np.array(query or ()),
    }


def threshold(subject: Subject) -> Arrays:
    """The patches with 60 % of the attention that the head of the model reads, as in DINO.

    Each head of the last layer, or of attention pooling, has a map.
    """
    weights = subject.observed['head'][:SHOWN]
    readers = {'cls': 'the class token attends', 'map': 'the pooling attends'}
    reader = readers.get(subject.loaded.module.pool, 'all patches attend')
    return {
        'photos': subject.photos,
        'maps': maps.most_of_mass(weights),
        'panels': np.array([f'head {k}' for k in range(weights.shape[1])]),
        'what': np.array(f'patches with 60 % of what {reader} to'),
    }


def attribution(subject: Subject) -> Arrays:
    """Evidence for a class: gradient times attention."""
    return {'photos': subject.photos} | subject.attributed


def compare(subject: Subject) -> Arrays:
    """Rollout, thresholded attention and, if the model has classes, attribution."""
    arrays = {
        'photos': subject.photos,
        'rollout': subject.observed['rollout'][:SHOWN],
        'kept': maps.most_of_mass(subject.observed['head'][:SHOWN].mean(axis=1)),
    }
    try:
        attributed = subject.attributed
    except Inapplicable:
        return arrays
    return arrays | {'attribution': attributed['maps'], 'captions': attributed['captions']}
