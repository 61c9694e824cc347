"""torchvision's VisionTransformer (vit_b_16 and relatives)."""

from vit_jax.errors import UserError
from vit_jax.weights.model import guess_heads
from vit_jax.weights.table import Entry, torch_conv, torch_dense, torch_heads, torch_norm

MARK = r'conv_proj\.weight'
SUFFIXES = ('.pth', '.pt', '.bin', '.safetensors')
_BLOCK, _THEIRS = 'blocks/{i}', 'encoder.layers.encoder_layer_{i}'


def _mlp(first, second):
    return torch_dense(f'{_BLOCK}/mlp/dense1', f'{_THEIRS}.mlp.{first}') + torch_dense(
        f'{_BLOCK}/mlp/dense2', f'{_THEIRS}.mlp.{second}')


_TABLE = [
    Entry(('cls',), 'class_token'),
    *torch_conv('embedding', 'conv_proj'),
    Entry(('position/embedding',), 'encoder.pos_embedding'),
    *torch_norm(f'{_BLOCK}/norm1', f'{_THEIRS}.ln_1'),
    *torch_heads(f'{_BLOCK}/attention', f'{_THEIRS}.self_attention.in_proj_', 'query key value'),
    *torch_dense(f'{_BLOCK}/attention/out', f'{_THEIRS}.self_attention.out_proj', 'from_heads'),
    *torch_norm(f'{_BLOCK}/norm2', f'{_THEIRS}.ln_2'),
    *_mlp(0, 3),
    *torch_norm('norm', 'encoder.ln'),
    *torch_dense('pre_logits', 'heads.pre_logits'),
    *torch_dense('head', 'heads.head')]


def table(model: dict) -> list[Entry]:
    """What an array is called."""
    return _TABLE


def prepare(arrays: dict, sidecars: dict) -> tuple[dict, list[Entry]]:
    """The arrays as they are, and a table with the older names of the MLP too."""
    return arrays, _TABLE + _mlp('linear_1', 'linear_2')


def known(arrays: dict, sidecars: dict) -> tuple[dict, list | None, dict | None]:
    """What torchvision computes; the arrays come alone."""
    return dict(gelu='erf', layer_norm_epsilon=1e-6), None, None


def holds(model: dict, path: str) -> dict[str, tuple]:
    """Values of fields that the layout can hold."""
    return dict(resnet=(None,), position=('learned_1d',), pool=('cls',), layer_scale_init=(0.0,),
                gelu=('erf',), layer_norm_epsilon=(1e-6,), num_heads=(guess_heads(model),))


def finish(arrays: dict, weights) -> tuple[dict, dict]:
    """The arrays as they are; no JSON files.

    Raises UserError for images that torchvision's class does not take.
    """
    size, patch = weights.image_size(), weights.model['patch_size']
    if size[0] != size[1] or patch[0] != patch[-1] or weights.channels() != 3:
        raise UserError(f'torchvision has models of square colour images and square patches only; '
                        f'these are {size[0]}x{size[1]} with {weights.channels()} channels and '
                        f'patches of {patch[0]}x{patch[-1]}: layout torchvision cannot hold them.')
    return arrays, {}
