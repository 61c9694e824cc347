"""ResNets with GroupNorm and standardised convolutions (BiT, arXiv 1912.11370).

The paper uses three kinds, and this file has one code path for all. The baseline is BiT's: it
normalises before each convolution and pads by a fixed amount. The ResNet of the released hybrids
normalises after each convolution and pads like TensorFlow. AxialResNet (appendix D.6) normalises
after each convolution, pads like BiT, and replaces the 3x3 convolutions by axial attention over
twice the features.
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
from vit_jax.models.convolution import Padding, convolve
from vit_jax.models.field_names import check_field_names
from vit_jax.models.stack import Dtype, RematPolicy, Unroll, check_images, remat, stack


class StdConv(nn.Module):
    """Convolution without bias whose kernel has mean 0 and variance 1 per output feature.

    This is weight standardisation (arXiv 1903.10520).
    """

    features: int
    kernel_size: int
    stride: int
    fixed_padding: bool  # True: (kernel_size - 1) / 2 on each side; False: TensorFlow's 'SAME'
    epsilon: float
    epsilon_on: str  # add epsilon to the 'std' or to the 'variance' of the kernel
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch height width in_features']
    ) -> Float[Array, 'batch out_height out_width features']:
        size = self.kernel_size
        shape = (size, size, x.shape[-1], self.features)
        kernel = self.param('kernel', nn.initializers.lecun_normal(), shape, jnp.float32)
        x = x.astype(self.dtype)
        kernel = kernel - kernel.mean((0, 1, 2))  # in float32, independent of self.dtype
        variance = (kernel**2).mean((0, 1, 2))
        if self.epsilon_on == 'std':
            scale = jnp.sqrt(variance) + self.epsilon
        else:
            scale = jnp.sqrt(variance + self.epsilon)
        padding: str | Padding = 'SAME'
        if self.fixed_padding:
            pad = (size - 1) // 2
            padding = ((pad, pad), (pad, pad))
        kernel = (kernel / scale).astype(self.dtype)
        y = convolve(x, kernel, (self.stride, self.stride), padding)
        return nn.with_logical_constraint(y, ('batch', 'rows', 'columns', 'features'))


class ResidualUnit(nn.Module):
    """Bottleneck unit: 1x1, 3x3 with the stride, then 1x1 to four times the features."""

    features: int  # number of features of the first two convolutions
    stride: int
    conv: functools.partial  # makes a StdConv from the fields that layers do not share
    norm: functools.partial  # makes a GroupNorm likewise
    preactivation: bool  # True: normalise before each convolution; False: after it
    axial: functools.partial | None = None  # makes an AxialAttention in the same way

    @nn.compact
    def __call__(self, x: Float[Array, 'batch height width channels']):
        """Returns the features, and None as the output that nn.scan collects."""
        projects = self.stride > 1 or x.shape[-1] != 4 * self.features
        if self.preactivation:
            return self.normalised_before(x, projects), None
        return self.normalised_after(x, projects), None

    def normalised_before(self, x, projects):
        """Computes a unit of ResNet-v2 (arXiv 1603.05027)."""
        y = nn.relu(self.norm(name='norm1')(x))
        if projects:
            x = self.conv(4 * self.features, 1, self.stride, name='conv_proj')(y)
        y = self.conv(self.features, 1, 1, name='conv1')(y)
        y = nn.relu(self.norm(name='norm2')(y))
        y = self.conv(self.features, 3, self.stride, name='conv2')(y)
        y = nn.relu(self.norm(name='norm3')(y))
        return x + self.conv(4 * self.features, 1, 1, name='conv3')(y)

    def normalised_after(self, x, projects):
        """Computes a unit of ResNet-v1.5. The last scale, and so the branch, starts at zero."""
        features = self.features
        if self.axial:
            features *= 2
        y = self.conv(features, 1, 1, name='conv1')(x)
        y = nn.relu(self.norm(name='norm1')(y))
        if self.axial:
            y = self.along_columns_and_rows(y)
        else:
            y = self.conv(features, 3, self.stride, name='conv2')(y)
            y = self.norm(name='norm2')(y)
        y = self.conv(4 * self.features, 1, 1, name='conv3')(nn.relu(y))
        y = self.norm(name='norm3', scale_init=nn.initializers.zeros)(y)
        if projects:
            x = self.conv(4 * self.features, 1, self.stride, name='conv_proj')(x)
            x = self.norm(name='norm_proj')(x)
        return nn.relu(x + y)

    def along_columns_and_rows(self, y):
        """Axial attention, then average pooling with the stride; means do not include padding."""
        y = self.axial(name='column')(y.swapaxes(1, 2)).swapaxes(1, 2)
        y = self.axial(name='row')(y)
        stride = (self.stride, self.stride)
        return nn.avg_pool(y, stride, stride, 'SAME', count_include_pad=False)


class Stage(nn.Module):
    """A unit that changes the shape, then a stack of units that keep it."""

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
    """Maps images to a feature map: the root, then stages of residual units."""

    units: Annotated[
        tuple[int, ...],
        several(whole(1), 'the number of residual units of each stage, as in 3,4,6,3'),
        'number of residual units of each stage; empty: only the root',
    ]
    width: Annotated[int, whole(1), "number of channels of the root; 64 times BiT's width factor"]
    preactivation: Annotated[
        bool, SWITCH, 'normalise before each convolution instead of after it, like BiT'
    ]
    fixed_padding: Annotated[
        bool, SWITCH, 'pad all sides of a convolution equally, like BiT, instead of like TensorFlow'
    ]
    num_groups: Annotated[int, whole(1), 'number of groups of every GroupNorm']
    group_norm_epsilon: Annotated[
        float,
        number(1e-20, 1, or_else=0, earlier=number(0, 1)),
        'number added to the variance in a GroupNorm',
    ]
    weight_epsilon: Annotated[
        float,
        number(1e-20, 1, or_else=0, earlier=number(0, 1)),
        'number added where kernels are standardised',
    ]
    weight_epsilon_on: Annotated[
        str, one_of('std', 'variance'), 'the quantity to which weight_epsilon is added'
    ]
    dtype: jax.typing.DTypeLike  # dtype, unroll and remat_policy are explained in ViT
    unroll: int
    remat_policy: str
    axial_heads: int = 0  # explained in ResNet

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
        axial = None
        if self.axial_heads:
            axial = functools.partial(
                AxialAttention, self.axial_heads, conv, norm, self.group_norm_epsilon, self.dtype
            )
        x = conv(self.width, 7, 2, name='root_conv')(images)
        if not self.preactivation:
            x = nn.relu(norm(name='root_norm')(x))
        if self.fixed_padding:
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # with zeros, not -inf, like BiT
            x = nn.max_pool(x, (3, 3), (2, 2), 'VALID')
        else:
            x = nn.max_pool(x, (3, 3), (2, 2), 'SAME')
        outputs = [x]
        stride = 1
        for i, units in enumerate(self.units):
            unit = dict(
                features=self.width * 2**i,
                conv=conv,
                norm=norm,
                preactivation=self.preactivation,
                axial=axial,
            )
            stage = Stage(units, stride, unit, self.unroll, self.remat_policy, name=f'stage{i + 1}')
            x = stage(x)
            outputs.append(x)
            stride = 2
        return outputs


def check_backbone(values: Mapping) -> None:
    """Raises UserError unless `values`, the fields of `config.model.resnet`, make a Backbone."""
    table = fields.declared(Backbone)
    check_field_names('model.resnet', values, table)
    fields.check(table, values, 'model.resnet.', recorded=True)
    if values['width'] % values['num_groups']:
        raise UserError(
            f'model.resnet.width {values["width"]} does not divide among '
            f'{values["num_groups"]} groups (model.resnet.num_groups).',
            kind='value',
            field='model.resnet.width',
            value=values['width'],
        )


def stride(num_stages: int) -> int:
    """Returns the pixels per point of the last feature map: 4, doubled by each further stage."""
    return 4 * 2 ** max(num_stages - 1, 0)


class ResNet(nn.Module):
    """Maps images to logits by a ResNet, the paper's baseline (section 4.1)."""

    rows_are_independent = True  # see ViT

    num_classes: int
    resnet: dict  # fields of Backbone before dtype
    axial_heads: Annotated[
        int,
        whole(0),
        'number of heads of the axial attention that replaces 3x3 convolutions (appendix D.6); '
        '0: convolutions',
    ] = 0
    head_bias_init: Annotated[
        float, number(-1e6, 1e6, earlier=number()), "initial value of the head's biases"
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
        """Computes float32 logits.

        Args:
          images: normalised pixels.
          train: has no effect, because there is no dropout and GroupNorm has no running averages.
          return_intermediates: also return a dict of intermediate values.

        Returns:
          Logits [batch, num_classes], or the representation if `num_classes` is 0. With
          `return_intermediates` a tuple (logits, dict). The dict has `stages`, the feature maps of
          the root and of every stage, and `representation` [batch, features], which is also sown
          in the collection 'intermediates'.
        """
        check_images(images)
        backbone = Backbone(
            **self.resnet,
            dtype=self.dtype,
            unroll=self.unroll,
            remat_policy=self.remat_policy,
            axial_heads=self.axial_heads,
            name='resnet',
        )
        stages = backbone(images)
        x = stages[-1]
        if self.resnet['preactivation']:
            norm = nn.GroupNorm(
                self.resnet['num_groups'],
                epsilon=self.resnet['group_norm_epsilon'],
                dtype=self.dtype,
                name='norm',
            )
            x = nn.relu(norm(x))
        representation = x.astype(jnp.float32).mean((1, 2))
        self.sow('intermediates', 'representation', representation)
        logits = representation
        if self.num_classes:
            head = nn.Dense(
                self.num_classes,
                kernel_init=nn.initializers.zeros,
                bias_init=nn.initializers.constant(self.head_bias_init),
                name='head',
            )
            logits = head(representation)
        if not return_intermediates:
            return logits
        return logits, {'stages': stages, 'representation': representation}

    @property
    def backend(self) -> Backend:
        """The XLA backend, the only implementation of a ResNet."""
        return registry.XLA

    def by_xla(self) -> 'ResNet':
        """Returns the model itself, which XLA computes."""
        return self

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Returns (rows, columns) of the last feature map; every size fits, halvings round up."""
        height, width = image_size
        pixels = stride(len(self.resnet['units']))
        return -(-height // pixels), -(-width // pixels)

    def check(self) -> None:
        """Raises UserError unless the fields fit together."""
        fields.check(fields.declared(ResNet), vars(self), 'model.', recorded=True)
        check_backbone(self.resnet)
        if not self.resnet['units']:
            raise UserError(
                'model.resnet.units is empty: a ResNet needs at least one stage.',
                kind='value',
                field='model.resnet.units',
                value=self.resnet['units'],
            )
        if self.axial_heads and self.resnet['preactivation']:
            raise UserError(
                'model.resnet.preactivation is True: expected False, because units with axial '
                'attention normalise after it. Or set model.axial_heads to 0.',
                kind='value',
                field='model.resnet.preactivation',
                value=True,
            )
        if self.axial_heads and self.resnet['width'] % self.axial_heads:
            raise UserError(
                f'model.resnet.width {self.resnet["width"]} does not divide among '
                f'{self.axial_heads} heads (model.axial_heads).',
                kind='value',
                field='model.resnet.width',
                value=self.resnet['width'],
            )
