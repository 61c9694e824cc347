"""The one table of model sizes: names such as 'b16' become the numbers of a model config.

Sizes: Ti and S from arXiv 2012.12877 and 2106.10270, B, L and H from ViT (arXiv 2010.11929)
table 1, g and G from Scaling (arXiv 2106.04560) table 2, So400m from arXiv 2305.13035.
"""

import difflib
import re

from vit_jax.errors import UserError

#            hidden_size, num_layers, mlp_dim, num_heads
SIZES = {
    'ti': (192, 12, 768, 3),
    's': (384, 12, 1536, 6),
    'b': (768, 12, 3072, 12),
    'l': (1024, 24, 4096, 16),
    'h': (1280, 32, 5120, 16),
    'g': (1408, 40, 6144, 16),
    'G': (1664, 48, 8192, 16),
    'so400m': (1152, 27, 4304, 16),
}
PATCHES = (4, 8, 14, 16, 32)


def names() -> list[str]:
    """All model names, size then patch: 'ti4', ..., 'b16', ..., 'so400m32'."""
    return [f'{size}{patch}' for size in SIZES for patch in PATCHES]


def get(name: str) -> dict:
    """Returns the numbers behind a model name.

    Args:
      name: size and patch size in pixels, for example 'b16'. 'g14' and 'G14' are two models.

    Returns:
      patch_size (height, width), hidden_size, num_layers, mlp_dim, num_heads.

    Raises:
      UserError: the name is unknown; the message names the nearest ones.
    """
    if name not in names():
        nearest = nearest_names(name, names())
        raise UserError(f'unknown model {name!r}. {nearest}A name is a size of {", ".join(SIZES)} '
                        f'and a patch size of {", ".join(map(str, PATCHES))}, as in b16.')
    size, patch = re.fullmatch(r'(\D+|so400m)(\d+)', name).groups()
    hidden_size, num_layers, mlp_dim, num_heads = SIZES[size]
    return dict(patch_size=(int(patch), int(patch)), hidden_size=hidden_size,
                num_layers=num_layers, mlp_dim=mlp_dim, num_heads=num_heads)


def nearest_names(name: str, valid: list[str]) -> str:
    """'Did you mean b16, l16? ' or '' when no valid name is near."""
    near = difflib.get_close_matches(name.replace('/', ''), valid, n=3, cutoff=0.5)
    return f'Did you mean {", ".join(near)}? ' if near else ''
