"""Writes the lowered program of training steps, to compare two versions of the code.

    python -m benchmarks.lowered_steps OUT_OF_THIS_VERSION
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/lowered_steps.py OUT_OF_THE_OTHER
    diff -rq OUT_OF_THIS_VERSION OUT_OF_THE_OTHER

Each file is the StableHLO of one config for one platform, without source locations and with numbers
instead of function names. Equal files are equal programs, with the same results and the same speed.
Nothing is compiled. JAX cannot lower calls of cuDNN without a GPU, so for 'cudnn' the call is
replaced by XLA's attention under the name `cudnn`.
"""

import functools
import itertools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from vit_jax import cli, models
from vit_jax import config as config_lib
from vit_jax.parallel import sharding
from vit_jax.training import resolve
from vit_jax.training.program import Program

SMALL = {
    'model.hidden_size': 64,
    'model.num_layers': 3,
    'model.mlp_dim': 128,
    'model.num_heads': 4,
    'model.dropout_rate': 0.1,
}
# File and argument of a config, and the fields that differ from it.
CONFIGS = {
    'plain': ('configs/vit.py:b16', SMALL | {'model.dtype': 'float32'}),
    'bfloat16': ('configs/vit.py:b16', SMALL | {'model.dtype': 'bfloat16', 'model.unroll': 1}),
    'gap': (
        'configs/vit.py:s16',
        SMALL
        | {
            'model.pool': 'gap',
            'model.num_registers': 2,
            'model.layer_scale_init': 0.1,
            'model.stochastic_depth_rate': 0.1,
            'model.gelu': 'erf',
            'ema_decay': 0.9,
            'augment.mixup': 0.2,
        },
    ),
    'map': (
        'configs/vit.py:s16',
        SMALL
        | {
            'model.pool': 'map',
            'model.position': 'relative',
            'model.position_at': 'every_layer',
            'model.attention_dropout_rate': 0.1,
            'accum_steps': 2,
        },
    ),
    'axial': ('configs/vit.py:axial_b32', SMALL | {'model.remat_policy': 'products'}),
    'masked': ('configs/masked.py:b16', SMALL),
    'hybrid': ('configs/vit.py:r50_b16', SMALL | {'model.resnet.units': (1, 2)}),
    'resnet': ('configs/vit.py:r50x1,jft', {'model.resnet.units': (2, 1)}),
}
DATA = {
    'batch_size': 16,
    'dataset.num_examples': 1000,
    'dataset.num_classes': 10,
    'optimizer.warmup_steps': 1,
}
CUDNN = {'attention_kernel': 'cudnn', 'linear_kernel': 'gpu', 'dtype': 'bfloat16'}


def config_of(name: str) -> ConfigDict:
    """Returns the complete config for a key of CONFIGS."""
    file, values = CONFIGS[name]
    config = cli.read_config([f'--config={file}'])
    config = config_lib.changed(config, DATA | values)
    return resolve.with_data(config_lib.checked(config), 1000, 10)


def training_step(config: ConfigDict, platform: str) -> str:
    """Returns the training step of a config on one device, lowered for 'cpu' or 'tpu'."""
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    program = Program(resolve.for_mesh(config, mesh, platform), mesh, platform)
    traced = program.trace_train_step()
    return traced.lower(lowering_platforms=(platform,)).as_text()


def by_cudnn(config: ConfigDict) -> str:
    """Returns gradients and logits of the model with the kernels of an NVIDIA GPU, lowered."""
    model = models.build(config.model, 10, **CUDNN)
    images = jax.ShapeDtypeStruct((4, *config.image_size, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)['params']

    def loss(params, images, key):
        logits = model.apply({'params': params}, images, train=True, rngs={'dropout': key})
        return (logits**2).sum()

    def both(params, images, key):
        gradients = jax.grad(loss)(params, images, key)
        return gradients, model.apply({'params': params}, images)

    lowered = jax.jit(both).trace(params, images, jax.random.key(0))
    return lowered.lower(lowering_platforms=('cuda',)).as_text()


def without_cudnn() -> None:
    """Replaces calls of cuDNN by XLA's attention, under the name `cudnn`."""
    by_xla = jax.nn.dot_product_attention

    @functools.partial(jax.jit, static_argnums=4)
    def cudnn(query, key, value, lengths, names):
        lengths = dict(zip(names, lengths, strict=True))
        return by_xla(query, key, value, implementation='xla', **lengths)

    def attend(query, key, value, bias=None, *, implementation=None, **lengths):
        if implementation != 'cudnn':
            return by_xla(query, key, value, bias, implementation=implementation, **lengths)
        return cudnn(query, key, value, tuple(lengths.values()), tuple(lengths))

    jax.nn.dot_product_attention = attend


def numbered(text: str) -> str:
    """Returns the program with numbers instead of function names, in the order of appearance."""
    count = itertools.count()
    names = {}
    for name in re.findall(r'@[\w.]+', text):
        if name not in names:
            names[name] = f'@f{next(count)}'
    return re.sub(r'@[\w.]+', lambda match: names[match[0]], text)


def main() -> None:
    """Writes OUT/NAME.PLATFORM.txt for every config and platform."""
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    without_cudnn()
    for name in CONFIGS:
        config = config_of(name)
        for platform in ('cpu', 'tpu'):
            text = numbered(training_step(config, platform))
            (out / f'{name}.{platform}.txt').write_text(text)
        if name in ('plain', 'bfloat16', 'gap'):
            (out / f'{name}.cudnn.txt').write_text(numbered(by_cudnn(config)))
        print(name, flush=True)


if __name__ == '__main__':
    main()
