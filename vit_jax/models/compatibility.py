"""Whether the fields of a ViT fit together."""

from vit_jax import fields
from vit_jax.errors import UserError
from vit_jax.models import blocks, resnet
from vit_jax.models.patch_grid import as_pair


def check(vit) -> None:
    """Raises UserError unless the fields of a models.vit.ViT fit together."""
    vit.fields.check()
    values = vars(vit) | {'patch_size': as_pair(vit.patch_size, 'model.patch_size')}
    fields.check(fields.declared(type(vit)), values, 'model.', recorded=True)
    blocks.get(vit.fields.block)
    if vit.attention == 'axial':
        _check_axial(vit)
    _check_kernels(vit)
    if vit.resnet is not None:
        _check_hybrid(vit)


def _check_axial(vit):
    if vit.prefix:
        raise UserError(
            f'model.attention is axial, model.pool {vit.pool} and model.num_registers '
            f'{vit.num_registers}: axial attention supports neither a class token nor registers, '
            'because they are in no row or column. Set model.pool to gap, map or none, and '
            'model.num_registers to 0.',
            kind='value',
            field='model.pool' if vit.pool == 'cls' else 'model.num_registers',
            value=vit.pool if vit.pool == 'cls' else vit.num_registers,
        )
    if vit.fields.block != 'sequential':
        raise UserError(
            f'model.block is {vit.fields.block}: expected sequential, because model.attention is '
            'axial.',
            kind='value',
            field='model.block',
            value=vit.fields.block,
        )
    if vit.fields.position == 'relative' and vit.fields.position_at == 'shared':
        raise UserError(
            'model.position_at is shared: expected every_layer, because model.position is '
            'relative and model.attention axial, where rows and columns may have different '
            'lengths.',
            kind='value',
            field='model.position_at',
            value='shared',
        )


def _check_kernels(vit):
    unsupported = vit.backend.unfit(vars(vit.fields) | {'attention': vit.attention})
    if unsupported:
        raise UserError(
            f'model.attention_kernel is {vit.fields.attention_kernel}, which does not support '
            f'{", ".join(unsupported)}. Change these fields, or set model.attention_kernel to '
            'xla.',
            kind='value',
            field='model.attention_kernel',
            value=vit.fields.attention_kernel,
        )


def _check_hybrid(vit):
    resnet.check_backbone(vit.resnet)
    if vit.resnet['preactivation']:
        raise UserError(
            'model.resnet.preactivation is True: expected False, because the patches of a hybrid '
            'are cut from normalised features.',
            kind='value',
            field='model.resnet.preactivation',
            value=True,
        )
