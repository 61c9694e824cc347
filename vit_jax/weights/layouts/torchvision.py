"""torchvision's VisionTransformer (vit_b_16 and relatives)."""

from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.model import guess_heads
from vit_jax.weights.table import Entry, torch_modules

_FORMULAS = dict(gelu='erf', layer_norm_epsilon=1e-6)
_BLOCK, _THEIRS = 'blocks/{i}', 'encoder.layers.encoder_layer_{i}'
_TABLE = [
    Entry(('cls',), 'class_token'),
    Entry(('position/embedding',), 'encoder.pos_embedding'),
    *torch_modules(
        {
            'embedding': 'conv_proj',
            f'{_BLOCK}/norm1': f'{_THEIRS}.ln_1',
            f'{_BLOCK}/attention/query key value': f'{_THEIRS}.self_attention.in_proj_',
            f'{_BLOCK}/attention/out': f'{_THEIRS}.self_attention.out_proj',
            f'{_BLOCK}/norm2': f'{_THEIRS}.ln_2',
            f'{_BLOCK}/mlp/dense1': f'{_THEIRS}.mlp.0',
            f'{_BLOCK}/mlp/dense2': f'{_THEIRS}.mlp.3',
            'norm': 'encoder.ln',
            'pre_logits': 'heads.pre_logits',
            'head': 'heads.head',
        }
    ),
]
# The layers of the MLP once had other names.
_OLDER = torch_modules({f'{_BLOCK}/mlp/dense{n}': f'{_THEIRS}.mlp.linear_{n}' for n in (1, 2)})


def _allowed_values(model, path):
    heads = dict(num_heads=(guess_heads(model),)) if 'hidden_size' in model else {}
    return PLAIN | only(_FORMULAS) | dict(resnet=(None,)) | heads


def _refusals(weights, path):
    size, patch, channels = weights.image_size(), weights.model['patch_size'], weights.channels()
    if size[0] == size[1] and patch[0] == patch[-1] and channels == 3:
        return []
    return [
        'torchvision has only models of square colour images and square patches; these are '
        f'images of {size[0]}x{size[1]} with {channels} channels and patches of '
        f'{patch[0]}x{patch[-1]}'
    ]


LAYOUT = Layout(
    mark=r'conv_proj\.weight',
    suffixes=('.pth', '.pt', '.bin', '.safetensors'),
    read=lambda contents: Reading(contents.arrays, _FORMULAS, _TABLE + _OLDER),
    table=lambda model: _TABLE,
    allowed_values=_allowed_values,
    refusals=_refusals,
)
