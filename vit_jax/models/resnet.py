"""ResNets with GroupNorm and standardised convolutions (BiT, arXiv 1912.11370).

One code path for those that the paper uses. The baseline is BiT's: it normalises before each
convolution and pads by a fixed amount. That of the paper's released hybrids normalises after each
convolution and pads as TensorFlow does. AxialResNet (appendix D.6) normalises after and pads as
BiT, and has axial attention over twice the features in place of 3x3 convolutions.
"""

import functools
from collections.abc import Mapping
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import fields
from vit_jax.errors import UserError
from vit_jax.fields import SWITCH, number, one_of, several, whole
from vit_jax.models.axial_resnet import AxialAttention
from vit_jax.models.backends import registry
from vit_jax.models.backends.backend import Backend
from vit_jax.models.convolution import convolve
from vit_jax.models.field_names import check_field_names
from vit_jax.models.stack import Dtype, RematPolicy, Unroll, check_images, remat, stack


class StdConv(nn.Module):
    """Convolution without bias; its kernel has mean 0 and variance 1 per output (1903.10520)."""

    features: int
    kernel_size: int
    stride: int
    fixed_padding: bool  # (kernel_size - 1) / 2 on each side, else TensorFlow's 'SAME'
    epsilon: float
    epsilon_on: str  # it is added to the 'std' or to the 'variance' of the kernel
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch height width in_features']
    ) -> Float[Array, 'batch out_height out_width features']:
        size, pad = self.kernel_size, (self.kernel_size - 1) // 2
        kernel = self.param(
            'kernel',
            nn.initializers.lecun_normal(),
            (size, size, x.shape[-1], self.features),
            jnp.float32,
        )
        x = x.astype(self.dtype)
        kernel = kernel - kernel.mean((0, 1, 2))  # in float32, whatever self.dtype is
        variance = (kernel**2).mean((0, 1, 2))
        scale = (
            jnp.sqrt(variance) + self.epsilon
            if self.epsilon_on == 'std'
            else jnp.sqrt(variance + self.epsilon)
        )
        y = convolve(
            x,
            (kernel / scale).astype(self.dtype),
            (self.stride, self.stride),
            ((pad, pad), (pad, pad)) if self.fixed_padding else 'SAME',
        )
        return nn.with_logical_constraint(y, ('batch', 'rows', 'columns', 'features'))


class ResidualUnit(nn.Module):
    """Bottleneck unit: 1x1, 3x3 (with the stride), 1x1 to four times the features."""

    features: int  # of the first two convolutions
    stride: int
    conv: functools.partial  # StdConv with the fields that all layers share
    norm: functools.partial  # GroupNorm with those
    preactivation: bool  # normalise before each convolution, else after it
    axial: functools.partial | None = None  # AxialAttention with the fields that all layers share

    @nn.compact
    def __call__(self, x: Float[Array, 'batch height width channels']):
        """Returns the features and None: what nn.scan collects."""
        projects = self.stride > 1 or x.shape[-1] != 4 * self.features
        unit = self.normalised_before if self.preactivation else self.normalised_after
        return unit(x, projects), None

    def normalised_before(self, x, projects):
        """ResNet-v2 (arXiv 1603.05027)."""
        y = nn.relu(self.norm(name='norm1')(x))
        if projects:
            x = self.conv(4 * self.features, 1, self.stride, name='conv_proj')(y)
        y = self.conv(self.features, 1, 1, name='conv1')(y)
        y = nn.relu(self.norm(name='norm2')(y))
        y = self.conv(self.features, 3, self.stride, name='conv2')(y)
        y = nn.relu(self.norm(name='norm3')(y))
        return x + self.conv(4 * self.features, 1, 1, name='conv3')(y)

    def normalised_after(self, x, projects):
        """ResNet-v1.5; starts as the identity, its last scale being zero."""
        features = 2 * self.features if self.axial else self.features
        y = nn.relu(self.norm(name='norm1')(self.conv(features, 1, 1, name='conv1')(x)))
        if self.axial:
            y = self.along_columns_and_rows(y)
        else:
            y = self.norm(name='norm2')(self.conv(features, 3, self.stride, name='conv2')(y))
        y = self.conv(4 * self.features, 1, 1, name='conv3')(nn.relu(y))
        y = self.norm(name='norm3', scale_init=nn.initializers.zeros)(y)
        if projects:
            x = self.conv(4 * self.features, 1, self.stride, name='conv_proj')(x)
            x = self.norm(name='norm_proj')(x)
        return nn.relu(x + y)

    def along_columns_and_rows(self, y):
        """Axial attention; with a stride, the means of 2x2 points, or of those that there are."""
        y = self.axial(name='column')(y.swapaxes(1, 2)).swapaxes(1, 2)
        y = self.axial(name='row')(y)
        stride = (self.stride,) * 2
        return nn.avg_pool(y, stride, stride, 'SAME', count_include_pad=False)


class Stage(nn.Module):
    """A unit that changes the shape, then units that keep it and are one stack."""

    units: int
    stride: int
    unit: dict  # fields of ResidualUnit, without the stride
    unroll: int
    remat_policy: str

    @nn.compact
    def __call__(self, x: Float[Array, 'batch height width channels']):
        first = remat(ResidualUnit, self.remat_policy)
        x, _ = first(stride=self.stride, **self.unit, name='first')(x)
        if self.units > 1:
            rest = stack(
                ResidualUnit, self.units - 1, unroll=self.unroll, remat_policy=self.remat_policy
            )
            x, _ = rest(stride=1, **self.unit, name='rest')(x)
        return x


class Backbone(nn.Module):
    """Images to a feature map: the root, then stages of residual units."""

    units: Annotated[
        tuple[int, ...],
        several(whole(1), 'the number of residual units of each stage, as in 3,4,6,3'),
        'residual units of each stage; with none there is only the root',
    ]
    width: Annotated[int, whole(1), "channels of the root; 64 times BiT's width factor"]
    preactivation: Annotated[bool, SWITCH, 'True in BiT, False in the hybrids']
    fixed_padding: Annotated[bool, SWITCH, 'True in BiT, False in the hybrids']
    num_groups: Annotated[int, whole(1), 'of every GroupNorm']
    group_norm_epsilon: Annotated[
        float, number(1e-20, 1, or_else=0, earlier=number(0, 1)), 'is added to the variance'
    ]
    weight_epsilon: Annotated[
        float, number(1e-20, 1, or_else=0, earlier=number(0, 1)), 'of the standardised kernels'
    ]
    weight_epsilon_on: Annotated[str, one_of('std', 'variance'), 'to which it is added']
    dtype: jax.typing.DTypeLike  # this and the following: as in ViT
    unroll: int
    remat_policy: str
    axial_heads: int = 0  # as in ResNet

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width channels']
    ) -> list[Float[Array, 'batch rows columns features']]:
        """Returns the output of the root and of each stage, at strides 4, 4, 8, 16, 32."""
        conv = functools.partial(
            StdConv,
            fixed_padding=self.fixed_padding,
            epsilon=self.weight_epsilon,
            epsilon_on=self.weight_epsilon_on,
            dtype=self.dtype,
        )
        norm = functools.partial(
            nn.GroupNorm,
            num_groups=self.num_groups,
            epsilon=self.group_norm_epsilon,
            dtype=self.dtype,
        )
        axial = (
            functools.partial(
                AxialAttention, self.axial_heads, conv, norm, self.group_norm_epsilon, self.dtype
            )
            if self.axial_heads
            else None
        )
        x = conv(self.width, 7, 2, name='root_conv')(images)
        if not self.preactivation:
            x = nn.relu(norm(name='root_norm')(x))
        if self.fixed_padding:
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # with zeros, not -inf, as in BiT
        outputs = [nn.max_pool(x, (3, 3), (2, 2), 'VALID' if self.fixed_padding else 'SAME')]
        for i, units in enumerate(self.units):
            unit = dict(
                features=self.width * 2**i,
                conv=conv,
                norm=norm,
                preactivation=self.preactivation,
                axial=axial,
            )
            stage = Stage(
                units,
                1 if i == 0 else 2,
                unit,
                self.unroll,
                self.remat_policy,
                name=f'stage{i + 1}',
            )
            outputs.append(stage(outputs[-1]))
        return outputs


def check_backbone(values: Mapping) -> None:
    """Raises UserError unless `values`, `config.model.resnet`, make a Backbone."""
    table = fields.declared(Backbone)
    check_field_names('model.resnet', values, table)
    fields.check(table, values, 'model.resnet.', recorded=True)
    if values['width'] % values['num_groups']:
        raise UserError(
            f'model.resnet.width {values["width"]} does not divide among '
            f'{values["num_groups"]} groups (model.resnet.num_groups).'
        )


def stride(num_stages: int) -> int:
    """Pixels per point of the last feature map; every stage but the first doubles the root's 4."""
    return 4 * 2 ** max(num_stages - 1, 0)


class ResNet(nn.Module):
    """The paper's baseline (section 4.1), images to logits; other fields are as in ViT."""

    rows_are_independent = True  # as in ViT

    num_classes: int
    resnet: dict  # fields of Backbone, without dtype and the following ones
    axial_heads: Annotated[
        int,
        whole(0),
        'heads of the axial attention that stands in place of '
        '3x3 convolutions (appendix D.6); 0: convolutions',
    ] = 0
    head_bias_init: Annotated[
        float, number(-1e6, 1e6, earlier=number()), 'first value of the biases of the head'
    ] = 0.0
    dtype: Dtype = 'float32'
    unroll: Unroll = 0
    remat_policy: RematPolicy = 'auto'

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'batch height width channels'],
        train: bool = False,
        return_intermediates: bool = False,
    ):
        """Returns float32 logits [batch, num_classes], or the representation for num_classes=0.

        `train` has no effect: there is no dropout, and GroupNorm has no running averages. With
        `return_intermediates` also returns a dict with `stages`, the list of feature maps of the
        root and every stage, and `representation` [batch, features], which is sown as in ViT.
        """
        check_images(images)
        stages = Backbone(
            **self.resnet,
            dtype=self.dtype,
            unroll=self.unroll,
            remat_policy=self.remat_policy,
            axial_heads=self.axial_heads,
            name='resnet',
        )(images)
        x = stages[-1]
        if self.resnet['preactivation']:
            x = nn.relu(
                nn.GroupNorm(
                    self.resnet['num_groups'],
                    epsilon=self.resnet['group_norm_epsilon'],
                    dtype=self.dtype,
                    name='norm',
                )(x)
            )
        x = representation = x.astype(jnp.float32).mean((1, 2))
        self.sow('intermediates', 'representation', representation)
        if self.num_classes:
            x = nn.Dense(
                self.num_classes,
                kernel_init=nn.initializers.zeros,
                bias_init=nn.initializers.constant(self.head_bias_init),
                name='head',
            )(x)
        outputs = {'stages': stages, 'representation': representation}
        return (x, outputs) if return_intermediates else x

    @property
    def backend(self) -> Backend:
        """XLA's: there is one way to compute a ResNet."""
        return registry.XLA

    def by_xla(self) -> 'ResNet':
        """The model itself."""
        return self

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the last feature map; every halving rounds up, so every size fits."""
        height, width = image_size
        pixels = stride(len(self.resnet['units']))
        return -(-height // pixels), -(-width // pixels)

    def check(self) -> None:
        """Raises UserError unless the fields fit together."""
        fields.check(fields.declared(ResNet), vars(self), 'model.', recorded=True)
        check_backbone(self.resnet)
        if not self.resnet['units']:
            raise UserError('model.resnet.units is empty: a ResNet needs at least one stage.')
        if self.axial_heads and self.resnet['preactivation']:
            raise UserError(
                'model.resnet.preactivation is True, and units with axial attention '
                'normalise after it: set it to False, or model.axial_heads to 0.'
            )
        if self.axial_heads and self.resnet['width'] % self.axial_heads:
            raise UserError(
                f'model.resnet.width {self.resnet["width"]} does not divide among '
                f'{self.axial_heads} heads (model.axial_heads).'
            )
