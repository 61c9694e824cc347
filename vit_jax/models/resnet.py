"""ResNets with GroupNorm and standardised convolutions (BiT, arXiv 1912.11370).

One code path for the two that the paper uses: the baseline is pre-activated and pads by a fixed
amount, as BiT's; the one under a hybrid normalises after each convolution and pads as TensorFlow
does, as in the paper's released hybrids.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.stack import remat, stack


class StdConv(nn.Module):
    """Convolution without bias; its kernel has mean 0 and variance 1 per output (1903.10520).

    Attributes:
      features, kernel_size, stride: as usual, square.
      fixed_padding: (kernel_size - 1) / 2 on each side, else TensorFlow's 'SAME'.
      epsilon, epsilon_on: added to the 'std' (Google) or to the 'variance' (timm) of the kernel.
    """

    features: int
    kernel_size: int
    stride: int
    fixed_padding: bool
    epsilon: float
    epsilon_on: str
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, 'batch height width in_features']
                 ) -> Float[Array, 'batch out_height out_width features']:
        size, pad = self.kernel_size, (self.kernel_size - 1) // 2
        kernel = self.param('kernel', nn.initializers.lecun_normal(),
                            (size, size, x.shape[-1], self.features))
        y = jax.lax.conv_general_dilated(
            x.astype(self.dtype), self.standardise(kernel).astype(self.dtype),
            (self.stride, self.stride), ((pad, pad), (pad, pad)) if self.fixed_padding else 'SAME',
            dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
        return nn.with_logical_constraint(y, ('batch', 'rows', 'columns', 'features'))

    def standardise(self, kernel):
        """In float32, whatever the computation's dtype."""
        kernel = kernel - kernel.mean((0, 1, 2))
        variance = (kernel**2).mean((0, 1, 2))
        if self.epsilon_on == 'std':
            return kernel / (jnp.sqrt(variance) + self.epsilon)
        return kernel / jnp.sqrt(variance + self.epsilon)


class ResidualUnit(nn.Module):
    """Bottleneck unit: 1x1, 3x3 (with the stride), 1x1 to four times the features.

    Attributes:
      features: of the first two convolutions.
      conv, norm: StdConv and GroupNorm with the fields that all layers share.
      preactivation: normalise before each convolution, else after it.
    """

    features: int
    stride: int
    conv: functools.partial
    norm: functools.partial
    preactivation: bool

    @nn.compact
    def __call__(self, x: Float[Array, 'batch height width channels']):
        """Returns the features and None: what nn.scan collects."""
        projects = self.stride > 1 or x.shape[-1] != 4 * self.features
        if self.preactivation:
            return self.normalised_before(x, projects), None
        return self.normalised_after(x, projects), None

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
        y = nn.relu(self.norm(name='norm1')(self.conv(self.features, 1, 1, name='conv1')(x)))
        y = self.conv(self.features, 3, self.stride, name='conv2')(y)
        y = nn.relu(self.norm(name='norm2')(y))
        y = self.conv(4 * self.features, 1, 1, name='conv3')(y)
        y = self.norm(name='norm3', scale_init=nn.initializers.zeros)(y)
        if projects:
            x = self.conv(4 * self.features, 1, self.stride, name='conv_proj')(x)
            x = self.norm(name='norm_proj')(x)
        return nn.relu(x + y)


class Stage(nn.Module):
    """A unit that changes the shape, then units that keep it and are one stack.

    Attributes:
      unit: fields of ResidualUnit, without the stride.
    """

    units: int
    stride: int
    unit: dict
    unroll: int
    remat_policy: str

    @nn.compact
    def __call__(self, x: Float[Array, 'batch height width channels']):
        first = remat(ResidualUnit, self.remat_policy)
        x, _ = first(stride=self.stride, **self.unit, name='first')(x)
        if self.units > 1:
            rest = stack(ResidualUnit, self.units - 1, unroll=self.unroll,
                         remat_policy=self.remat_policy)
            x, _ = rest(stride=1, **self.unit, name='rest')(x)
        return x


class Backbone(nn.Module):
    """Images to a feature map: the root, then stages of residual units.

    Attributes:
      units: residual units of each stage; () leaves the root alone.
      width: channels of the root; 64 times BiT's width factor.
      preactivation, fixed_padding: True in BiT, False in the hybrids.
      num_groups, group_norm_epsilon: of every GroupNorm.
      weight_epsilon, weight_epsilon_on: of the standardised kernels, see StdConv.
      dtype, unroll, remat_policy: as in ViT.
    """

    units: tuple[int, ...]
    width: int
    preactivation: bool
    fixed_padding: bool
    num_groups: int
    group_norm_epsilon: float
    weight_epsilon: float
    weight_epsilon_on: str
    dtype: jax.typing.DTypeLike
    unroll: int
    remat_policy: str

    @nn.compact
    def __call__(self, images: Float[Array, 'batch height width channels']
                 ) -> list[Float[Array, 'batch rows columns features']]:
        """Returns the output of the root and of each stage, at strides 4, 4, 8, 16, 32."""
        conv = functools.partial(StdConv, fixed_padding=self.fixed_padding,
                                 epsilon=self.weight_epsilon, epsilon_on=self.weight_epsilon_on,
                                 dtype=self.dtype)
        norm = functools.partial(nn.GroupNorm, num_groups=self.num_groups,
                                 epsilon=self.group_norm_epsilon, dtype=self.dtype)
        x = conv(self.width, 7, 2, name='root_conv')(images)
        if not self.preactivation:
            x = nn.relu(norm(name='root_norm')(x))
        outputs = [self.max_pool(x)]
        for i, units in enumerate(self.units):
            unit = dict(features=self.width * 2**i, conv=conv, norm=norm,
                        preactivation=self.preactivation)
            stage = Stage(units, 1 if i == 0 else 2, unit, self.unroll, self.remat_policy,
                          name=f'stage{i + 1}')
            outputs.append(stage(outputs[-1]))
        return outputs

    def max_pool(self, x):
        if not self.fixed_padding:
            return nn.max_pool(x, (3, 3), (2, 2), 'SAME')
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # with zeros, not -inf, as in BiT
        return nn.max_pool(x, (3, 3), (2, 2), 'VALID')


def feature_grid(image_size: tuple[int, int], num_stages: int) -> tuple[int, int]:
    """(rows, columns) of the last feature map: every halving rounds up."""
    return tuple(-(-side // stride(num_stages)) for side in image_size)


def stride(num_stages: int) -> int:
    """Pixels per point of the last feature map; every stage but the first doubles the root's 4."""
    return 4 * 2 ** max(num_stages - 1, 0)


class ResNet(nn.Module):
    """The paper's baseline (section 4.1): images to logits. Attributes are `config.model`'s.

    Attributes:
      resnet: fields of Backbone, without dtype, unroll and remat_policy.
      unroll: residual units compiled side by side in each stage's loop.
      num_classes, head_bias_init, dtype, remat_policy: as in ViT.
    """

    num_classes: int
    resnet: dict
    head_bias_init: float = 0.0
    dtype: str = 'float32'
    unroll: int = 1
    remat_policy: str = 'none'

    @nn.compact
    def __call__(self, images: Float[Array, 'batch height width channels'], train: bool = False,
                 return_intermediates: bool = False):
        """Returns float32 logits [batch, num_classes], or the representation for num_classes=0.

        Args:
          train: has no effect: there is no dropout and GroupNorm knows no running averages.
          return_intermediates: also return a dict with `stages`, the list of feature maps of the
            root and every stage, and `representation` [batch, features].
        """
        stages = Backbone(**self.resnet, dtype=self.dtype, unroll=self.unroll,
                          remat_policy=self.remat_policy, name='resnet')(images)
        x = stages[-1]
        if self.resnet['preactivation']:
            x = nn.relu(nn.GroupNorm(self.resnet['num_groups'],
                                     epsilon=self.resnet['group_norm_epsilon'], dtype=self.dtype,
                                     name='norm')(x))
        x = representation = x.astype(jnp.float32).mean((1, 2))
        if self.num_classes:
            x = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros,
                         bias_init=nn.initializers.constant(self.head_bias_init), name='head')(x)
        outputs = {'stages': stages, 'representation': representation}
        return (x, outputs) if return_intermediates else x

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the last feature map; any image will do."""
        return feature_grid(image_size, len(self.resnet['units']))
