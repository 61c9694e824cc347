"""An encoder for heads that read only the class token: the last layer skips the other tokens."""

import jax
from jaxtyping import Array, Float


def encode(
    vit,
    x: Float[Array, 'batch padded_tokens hidden'],
    num_tokens: int,
    grid: tuple[int, int],
    shared_position: Array | None,
    train: bool,
) -> Float[Array, 'batch 1 hidden']:
    """Computes equations 2 and 3; in the last layer only for the class token.

    In the last layer the class token attends to all tokens. The result equals the first token of
    `vit.layers(vit.num_layers, grid)`.

    Args:
      vit: the models.vit.ViT that calls this function, bound to its parameters.
      x: the input of the first layer, padded by Backend.padded.
      num_tokens: number of tokens without the padding.
      grid: (rows, columns) of patches.
      shared_position: the position embedding that all layers share, or None.
      train: enables dropout and stochastic depth.
    """
    variables = {'params': vit.get_variable('params', 'blocks')}
    stacked_arrays, tree = jax.tree.flatten((variables, vit.depth_rates))
    # Each array is split once, because the gradient of two slices is a sum of two full arrays.
    sizes = (vit.num_layers - 1, 1) if vit.num_layers > 1 else (1,)
    split_arrays = [jax.lax.split(array, sizes) for array in stacked_arrays]

    def apply(module, arrays, x):
        variables, depth_rates = tree.unflatten(arrays)
        rngs = {}
        if vit.has_rng('dropout'):
            rngs['dropout'] = vit.make_rng('dropout')
        tokens, _ = module.apply(
            variables, x, depth_rates, shared_position, train, False, rngs=rngs
        )
        return tokens

    if vit.num_layers > 1:
        first_layers = vit.layers(vit.num_layers - 1, grid, parent=None)
        x = apply(first_layers, [parts[0] for parts in split_arrays], x)
    last_layer = vit.last_layer(grid, num_queries=1)
    last_arrays = [parts[-1][0] for parts in split_arrays]
    return apply(last_layer, last_arrays, x[:, :num_tokens])
