"""torchvision's VisionTransformer (vit_b_16 and relatives)."""

from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.model import guess_heads
from vit_jax.weights.table import entries, torch_modules

_FORMULAS = dict(gelu='erf', layer_norm_epsilon=1e-6)

_BLOCK = ('blocks/{i}/', 'encoder.layers.encoder_layer_{i}.')
_TABLE = [
    *entries(
        {
            'cls': 'class_token',
            'position/embedding': 'encoder.pos_embedding',
        }
    ),
    *torch_modules(
        {
            'embedding': 'conv_proj',
            'norm': 'encoder.ln',
            'pre_logits': 'heads.pre_logits',
            'head': 'heads.head',
        }
    ),
    *torch_modules(
        {
            'norm1': 'ln_1',
            'attention/query key value': 'self_attention.in_proj_',
            'attention/out': 'self_attention.out_proj',
            'norm2': 'ln_2',
            'mlp/dense1': 'mlp.0',
            'mlp/dense2': 'mlp.3',
        },
        within=_BLOCK,
    ),
]
# Earlier versions of torchvision had other names for the layers of the MLP.
_OLDER = torch_modules(
    {
        'mlp/dense1': 'mlp.linear_1',
        'mlp/dense2': 'mlp.linear_2',
    },
    within=_BLOCK,
)


def _allowed_values(model, path):
    allowed = PLAIN | only(_FORMULAS) | dict(resnet=(None,))
    if 'hidden_size' in model:
        allowed['num_heads'] = (guess_heads(model),)
    return allowed


def _refusals(weights, path):
    height, width = weights.image_size()
    patch = weights.model['patch_size']
    channels = weights.channels()
    if height == width and patch[0] == patch[-1] and channels == 3:
        return []
    return [
        'torchvision has only models of square colour images and square patches; these are '
        f'images of {height}x{width} with {channels} channels and patches of {patch[0]}x{patch[-1]}'
    ]


LAYOUT = Layout(
    mark=r'conv_proj\.weight',
    suffixes=('.pth', '.pt', '.bin', '.safetensors'),
    read=lambda contents: Reading(contents.arrays, _FORMULAS, _TABLE + _OLDER),
    table=lambda model: _TABLE,
    allowed_values=_allowed_values,
    refusals=_refusals,
)
