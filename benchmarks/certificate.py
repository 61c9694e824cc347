"""Recipe certificate: our training step beside an independent statement of its source's.

    python -m benchmarks.certificate [--steps=100] [--recipes=vit,bit] [--mu_dtype=float32]
        [--smooth]
    python -m benchmarks.certificate --fields [--recipes=plain,augreg_imagenet21k]

With --fields it lists every field of each source's config with ours next to it, and trains nothing:
benchmarks/source_fields.py.

For each recipe a toy model of its kind gets the same parameters and the same batches in vit_jax and
in benchmarks/source_steps.py, with the recipe's loss, clipping, decay, MixUp, optimizer and
schedule, the latter shortened. Dropout is off, since sources draw other random numbers, and MixUp's
shares are handed over. Then all learning rates of the recipe at its full length are compared.
Printed are the largest relative differences of a loss and of an array of parameters (by its norm),
from the source in float32 and in float64. The biases of keys, which no logit depends on, are left
out: their gradient is nothing but rounding, of which Adam makes full steps.

Two things make a last bit larger than it is, and can be taken out: --mu_dtype replaces the
precision of Adam's mean of gradients, which some recipes round to bfloat16; --smooth replaces ReLU
by softplus on both sides, because the gradient jumps where rounding decides on which side of 0 a
number is.
"""

import argparse
import dataclasses
import runpy
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks import source_fields
from benchmarks import source_steps as source
from vit_jax import config as config_lib
from vit_jax.parallel import sharding
from vit_jax.training import mixup, optimizer, resolve
from vit_jax.training.program import Program

CLASSES, GROUPS = 7, 4
SMALL = {
    'hidden_size': 32,
    'num_layers': 2,
    'mlp_dim': 64,
    'num_heads': 2,
    'patch_size': (8, 8),
    'dropout_rate': 0.0,
    'dtype': 'float32',
}


class Recipe(NamedTuple):
    """A config of ours, and what its source says in its own terms."""

    config: str  # FILE:ARGUMENT in configs/
    steps: int  # at full length, rounded as the source rounds them
    rate: Callable  # (step, all steps, warm-up, config.optimizer) -> learning rate
    loss: Callable
    decay: float = 0.0  # by which kernels shrink in a step, times the schedule's share of its peak
    mixed_with: str = ''


def cosine(step, total, warmup, given):
    """Of the recipes that decay so."""
    return source.cosine(step, total, warmup, given.learning_rate)


RECIPES = {
    # Table 3: decay 0.3 and 0.03 in the convention that multiplies it by the learning rate.
    'vit': Recipe(
        'vit:b16', round(300 * 1_281_167 / 4096), cosine, source.softmax_loss, 0.3 * 3e-3
    ),
    'vit21k': Recipe(
        'vit:b16,imagenet21k',
        round(90 * 14_145_922 / 4096),
        lambda step, total, warmup, given: source.linear(step, total, warmup, 1e-3, 1e-5),
        source.sigmoid_loss,
        0.03 * 1e-3,
    ),
    # big_vision's vit_s16_i1k.py and vit_i21k.py: wd 1e-4 at lr 1e-3; the checkpoint's is 0.1.
    'plain': Recipe(
        'plain:s16', round(90 * 1_268_355 / 1024), cosine, source.softmax_loss, 1e-4, 'next'
    ),
    'augreg': Recipe(
        'augreg:b16', round(300 * 14_145_922 / 4096), cosine, source.sigmoid_loss, 1e-4, 'next'
    ),
    # big_transfer's bit_hyperrule.py for a medium data set.
    'bit': Recipe(
        'bit:r50x1,cifar10',
        10_000,
        lambda step, total, warmup, given: source.hyperrule(
            step, [warmup, *(total * k // 10 for k in (3, 6, 9)), total], 0.003
        ),
        source.softmax_loss,
        0.0,
        'reversed',
    ),
    # vision_transformer's train.py.
    'finetune': Recipe('finetune:b16,cifar10', 10_000, cosine, source.softmax_loss),
}


def full(recipe: Recipe) -> ConfigDict:
    """The recipe's own config."""
    name, _, argument = recipe.config.partition(':')
    return runpy.run_path(f'configs/{name}.py')['get_config'](argument)


def toy(recipe: Recipe, steps: int, mu_dtype: str = '') -> ConfigDict:
    """The same with a small model, small images and few steps."""
    config = full(recipe)
    config.optimizer.mu_dtype = mu_dtype or config.optimizer.mu_dtype
    config.update(batch_size=16, num_steps=steps, num_epochs=0.0, image_size=(32, 32))
    config.optimizer.warmup_steps = steps // 5
    config.accum_steps = 1
    config.model.unroll = 1  # which takes less time to compile
    config.transfer.take = ()
    config.dataset.update(num_examples=1000, num_classes=CLASSES)
    if config.model.get('resnet'):
        config.model.resnet.update(units=(1, 1), width=16, num_groups=GROUPS)
    else:
        config.model.update(SMALL)
        if config.model.representation_size:
            config.model.representation_size = SMALL['hidden_size']
    return resolve.with_data(resolve.checked(config), 1000, CLASSES)


def batches(steps: int, config: ConfigDict) -> list[dict]:
    """Random images and labels."""
    rng = np.random.default_rng(0)
    return [
        {
            'image': rng.uniform(-1, 1, (config.batch_size, *config.image_size, 3)).astype(
                np.float32
            ),
            'label': rng.integers(0, CLASSES, config.batch_size).astype(np.int32),
            'mask': np.ones(config.batch_size, bool),
        }
        for _ in range(steps)
    ]


def ours(config: ConfigDict, data: list[dict]) -> tuple:
    """First parameters, then the loss of each step and the last parameters."""
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    program = Program(resolve.for_mesh(config, mesh), mesh)
    state, rng = program.initial_state(), np.random.default_rng(1)
    # Noise on all of them: zeros, as in the head, would leave most gradients without a value.
    first = jax.tree.map(
        lambda x: x + rng.normal(0, 0.05, x.shape).astype(x.dtype), jax.device_get(state.params)
    )
    state, losses = dataclasses.replace(state, params=jax.device_put(first)), []
    for batch in data:
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics['loss']))
    return first, np.array(losses), jax.device_get(state.params)


def shares(config: ConfigDict, steps: int) -> list[float]:
    """MixUp's of each step, as vit_jax draws them."""
    if not config.augment.mixup:
        return [1.0] * steps
    keys = [
        jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), step), mixup.STREAM)
        for step in range(steps)
    ]
    alpha = config.augment.mixup
    return [float(jax.random.beta(key, alpha, alpha, dtype=jnp.float32)) for key in keys]


def theirs(recipe: Recipe, config: ConfigDict, data: list[dict], params, dtype) -> tuple:
    """Losses and last parameters by the source's definitions, in `dtype`."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    given, steps = config.optimizer, len(data)

    @jax.jit
    def update(params, memory, image, label, share, count, rate, decay):
        other = {'reversed': lambda x: x[::-1], 'next': lambda x: jnp.roll(x, 1, 0)}.get(
            recipe.mixed_with, lambda x: x
        )
        if recipe.mixed_with == 'next':
            share = jnp.maximum(share, 1 - share)
        image, target = (
            share * x + (1 - share) * other(x)
            for x in (image, jnp.eye(CLASSES, dtype=dtype)[label])
        )

        def loss(params):
            logits = (
                source.bit(params, image, GROUPS)
                if 'resnet' in params
                else source.vit(params, image)
            )
            return recipe.loss(logits, target)

        value, grads = jax.value_and_grad(loss)(params)
        if given.clip_norm:
            grads = source.clipped(grads, given.clip_norm)
        if given.name == 'sgd':
            return value, *source.momentum(params, grads, memory, rate)
        return value, *source.adam(params, grads, memory, count, rate, decay, given.mu_dtype)

    zeros = jax.tree.map(jnp.zeros_like, params)
    memory = (
        zeros
        if given.name == 'sgd'
        else (jax.tree.map(lambda x: x.astype(given.mu_dtype), zeros), zeros)
    )
    losses = []
    for step, (batch, share) in enumerate(zip(data, shares(config, steps), strict=True)):
        rate = recipe.rate(step, steps, given.warmup_steps, given)
        numbers = (share, step + 1, rate, recipe.decay * rate / given.learning_rate)
        value, params, memory = update(
            params,
            memory,
            batch['image'].astype(dtype),
            batch['label'],
            *(np.asarray(x, dtype) for x in numbers),
        )
        losses.append(float(value))
    return np.array(losses), jax.device_get(params)


def differences(found, expected) -> tuple[float, float]:
    """Largest relative ones of (losses, parameters)."""
    arrays = [
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for (path, a), b in zip(
            jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True
        )
        if [part.key for part in path][-2:] != ['key', 'bias']
    ]
    return np.abs(found[0] / expected[0] - 1).max(), max(arrays)


def compare(
    name: str, steps: int, mu_dtype: str = '', dtypes=('float32', 'float64')
) -> dict[str, tuple[float, float]]:
    """`differences` from the source in each precision."""
    recipe = RECIPES[name]
    config = toy(recipe, steps, mu_dtype)
    data = batches(steps, config)
    first, *found = ours(config, data)
    result = {}
    for dtype in dtypes:
        with jax.enable_x64(dtype == 'float64'):
            result[dtype] = differences(found, theirs(recipe, config, data, first, dtype))
    return result


def schedule_difference(name: str, every: int = 1) -> tuple[int, float]:
    """Steps at full length, and the largest difference of a learning rate, relative to the peak."""
    recipe = RECIPES[name]
    config = config_lib.checked(full(recipe))
    steps = config_lib.total_steps(config)
    if steps != recipe.steps:
        raise SystemExit(f'{name} has {steps} steps, and its source {recipe.steps}')
    which = np.arange(0, steps, every)
    found = jax.vmap(optimizer.make_schedule(config.optimizer, steps))(jnp.asarray(which))
    expected = [
        recipe.rate(step, steps, config.optimizer.warmup_steps, config.optimizer) for step in which
    ]
    return steps, np.abs(found - np.array(expected)).max() / config.optimizer.learning_rate


def main():
    """Prints a row for every recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--recipes', metavar='NAME,...', help='default: all')
    parser.add_argument('--fields', action='store_true', help='list every field of the sources')
    parser.add_argument('--mu_dtype', default='')
    parser.add_argument('--smooth', action='store_true')
    given = parser.parse_args()
    known = source_fields.RECIPES if given.fields else RECIPES
    names = list(known) if given.recipes is None else given.recipes.split(',')
    for name in names:
        if name not in known:
            parser.error(f'--recipes has {name!r}: expected some of {",".join(known)}')
    if given.fields:
        for name in names:
            print(source_fields.markdown(name))
        return
    if given.steps < 10:  # of fewer the parts of a schedule are rounded otherwise
        parser.error(f'--steps is {given.steps}: expected 10 or more')
    if given.mu_dtype not in ('', 'float32', 'bfloat16'):
        parser.error(f'--mu_dtype is {given.mu_dtype!r}: expected float32 or bfloat16')
    if given.smooth:
        nn.relu = jax.nn.relu = jax.nn.softplus
    print(
        '| recipe | loss, float32 | parameters | loss, float64 | parameters | steps in full | '
        'learning rates |\n|---|---|---|---|---|---|---|'
    )
    for name in names:
        found = compare(name, given.steps, given.mu_dtype)
        steps, rate = schedule_difference(name)
        cells = [f'{x:.1e}' for pair in found.values() for x in pair]
        print(f'| {name} | {" | ".join(cells)} | {steps:,} | {rate:.1e} |', flush=True)


if __name__ == '__main__':
    main()
