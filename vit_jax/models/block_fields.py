"""The fields of a model that all of its blocks share."""

import dataclasses
from typing import Annotated

from vit_jax import fields
from vit_jax.errors import UserError
from vit_jax.fields import RATE, TEXT, number, one_of, whole
from vit_jax.models import position
from vit_jax.models.backends import registry
from vit_jax.models.backends.backend import Backend
from vit_jax.models.backends.xla import GELU
from vit_jax.models.position import ALL_PLACES, PLACES
from vit_jax.models.stack import Dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFields:
    """Fields of `config.model` that all blocks share; stem, pooling and norms use some of them."""

    hidden_size: Annotated[int, whole(1), 'size of a token']
    mlp_dim: Annotated[int, whole(1), 'size of the hidden layer in the MLP of a block']
    num_heads: Annotated[int, whole(1), 'number of attention heads, a divisor of hidden_size']
    block: Annotated[
        str,
        TEXT,
        'sequential: attention, then the MLP (equations 2 and 3); parallel: both from the same '
        'input; or PACKAGE.MODULE:CLASS of your own (docs/how-to/add-a-block.md)',
    ] = 'sequential'
    position: Annotated[str, one_of(*PLACES), 'kind of position embedding (table 8)'] = 'learned_1d'
    position_at: Annotated[
        str,
        one_of(*ALL_PLACES),
        'layers that use the position embedding: stem: only the input of the first layer; '
        'every_layer: each layer has its own; shared: all layers share one',
    ] = 'stem'
    dropout_rate: Annotated[
        float,
        RATE,
        'dropout rate after the embedding and after each dense layer of a block, except q, k and v',
    ] = 0.0
    attention_dropout_rate: Annotated[float, RATE, 'dropout rate of the attention weights'] = 0.0
    attention_kernel: Annotated[
        str,
        one_of(*registry.ATTENTION),
        'implementation of attention in the blocks: xla: every platform; cpu: fastest on a CPU; '
        'cudnn: flash attention in bfloat16 on NVIDIA GPUs; auto: chosen for the machine',
    ] = 'auto'
    linear_kernel: Annotated[
        str,
        one_of(*registry.LINEAR),
        'implementation of the linear layers and GELUs of patches and blocks: xla: every platform; '
        'cpu: fastest in bfloat16 on a CPU, includes LayerNorms; gpu: for NVIDIA GPUs, includes '
        'dropout; auto: chosen for the machine',
    ] = 'auto'
    layer_scale_init: Annotated[
        float,
        number(least=1e-12, most=1e6, or_else=0, earlier=number(least=0)),
        'initial value of the learned factors of the residual branches; 0: no factors',
    ] = 0.0
    gelu: Annotated[
        str,
        one_of(*GELU),
        "form of the GELU: tanh: Google's code; erf: timm and Hugging Face; quick: OpenAI's CLIP",
    ] = 'tanh'
    layer_norm_epsilon: Annotated[
        float,
        number(1e-20, 1, or_else=0, earlier=number(0, 1)),
        'number added to the variance in a LayerNorm',
    ] = 1e-6
    dtype: Dtype = 'float32'

    @property
    def backend(self) -> Backend:
        """The implementation of the layers of stem, blocks, pooling and norms."""
        return registry.get(self.attention_kernel, self.linear_kernel)

    def check(self) -> None:
        """Raises UserError unless the fields fit together."""
        fields.check(fields.declared(BlockFields), vars(self), 'model.', recorded=True)
        if self.hidden_size % self.num_heads:
            raise UserError(
                f'model.hidden_size {self.hidden_size} does not divide among {self.num_heads} '
                'heads (model.num_heads).',
                kind='value',
                field='model.hidden_size',
                value=self.hidden_size,
            )
        position.check(self.position, self.position_at, self.hidden_size)
