"""Compares our training steps with independent ones by the definitions of their sources.

    python -m benchmarks.certificate [--steps=100] [--recipes=vit,bit] [--mu_dtype=float32]
        [--smooth]
    python -m benchmarks.certificate --fields [--recipes=plain,augreg_imagenet21k]

With --fields the program trains nothing. It lists every field of each source's config with our
value, see benchmarks/source_fields.py.

Otherwise, for each recipe, a toy model trains twice with the same parameters and batches: in
vit_jax, and in benchmarks/source_steps.py. Both have the recipe's loss, clipping, decay, MixUp,
optimizer and schedule, which is shortened. Dropout is off, because sources draw other random
numbers, and both have the same shares of MixUp. The program prints the largest relative difference
of a loss, and of an array of parameters by its norm, from the source in float32 and in float64. It
also compares all learning rates of the recipe at its full length. The biases of keys are excluded:
no logit depends on them, so their gradient is only rounding, from which Adam makes full steps.

Two options remove effects that amplify rounding. --mu_dtype replaces the precision of Adam's mean
of gradients, which some recipes round to bfloat16. --smooth replaces ReLU by softplus on both
sides, because the gradient of ReLU jumps at 0.
"""

import argparse
import dataclasses
import functools
import runpy
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict

from benchmarks import source_fields
from benchmarks import source_steps as source
from vit_jax import config as config_lib
from vit_jax.parallel import sharding
from vit_jax.training import mixup, optimizer, resolve
from vit_jax.training.program import Program

CLASSES = 7
GROUPS = 4
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
    """A config of ours, and the definition of its source."""

    config: str  # FILE:ARGUMENT in configs/
    steps: int  # at full length, with the rounding of the source
    rate: Callable  # (step, all steps, warm-up, config.optimizer) -> learning rate
    loss: Callable
    decay: float = 0.0  # factor of kernels in a step, at the peak of the schedule
    mixed_with: str = ''  # partner in MixUp: 'next' or 'reversed' in the batch; '': no MixUp


def cosine(step, total, warmup, optimizer_config):
    """Returns the learning rate of a cosine schedule."""
    return source.cosine(step, total, warmup, optimizer_config.learning_rate)


RECIPES = {
    # Table 3: decay 0.3 and 0.03, in the convention that multiplies it by the learning rate.
    'vit': Recipe(
        'vit:b16', round(300 * 1_281_167 / 4096), cosine, source.softmax_loss, 0.3 * 3e-3
    ),
    'vit21k': Recipe(
        'vit:b16,imagenet21k',
        round(90 * 14_145_922 / 4096),
        lambda step, total, warmup, _: source.linear(step, total, warmup, 1e-3, 1e-5),
        source.sigmoid_loss,
        0.03 * 1e-3,
    ),
    # big_vision's vit_s16_i1k.py and vit_i21k.py: wd 1e-4 at lr 1e-3; 0.1 in our convention.
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
        lambda step, total, warmup, _: source.hyperrule(
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
    """Returns the recipe's own config."""
    name, _, argument = recipe.config.partition(':')
    return runpy.run_path(f'configs/{name}.py')['get_config'](argument)


def toy(recipe: Recipe, steps: int, mu_dtype: str = '') -> ConfigDict:
    """Returns the recipe's config with a small model, small images and few steps."""
    config = full(recipe)
    config.optimizer.mu_dtype = mu_dtype or config.optimizer.mu_dtype
    config.update(batch_size=16, num_steps=steps, num_epochs=0.0, image_size=(32, 32))
    config.optimizer.warmup_steps = steps // 5
    config.accum_steps = 1
    config.model.unroll = 1  # compiles faster
    config.transfer.take = ()
    config.dataset.update(num_examples=1000, num_classes=CLASSES)
    if config.model.get('resnet'):
        config.model.resnet.update(units=(1, 1), width=16, num_groups=GROUPS)
    else:
        config.model.update(SMALL)
        if config.model.representation_size:
            config.model.representation_size = SMALL['hidden_size']
    return resolve.with_data(config_lib.checked(config), 1000, CLASSES)


def batches(steps: int, config: ConfigDict) -> list[dict]:
    """Returns random images and labels."""
    rng = np.random.default_rng(0)
    image_shape = (config.batch_size, *config.image_size, 3)
    data = []
    for _ in range(steps):
        images = rng.uniform(-1, 1, image_shape).astype(np.float32)
        labels = rng.integers(0, CLASSES, config.batch_size).astype(np.int32)
        mask = np.ones(config.batch_size, bool)
        data.append({'image': images, 'label': labels, 'mask': mask})
    return data


class Training(NamedTuple):
    """The result of a training."""

    losses: np.ndarray  # of each step
    params: PyTree  # after the last step


def our_training(config: ConfigDict, data: list[dict]) -> tuple[PyTree, Training]:
    """Trains by vit_jax; returns the initial parameters and the result."""
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    program = Program(resolve.for_mesh(config, mesh), mesh)
    state = program.initial_state()
    rng = np.random.default_rng(1)
    # Noise, because most gradients are zero for initial zeros, such as in the head.
    initial_params = jax.tree.map(
        lambda x: x + rng.normal(0, 0.05, x.shape).astype(x.dtype), jax.device_get(state.params)
    )
    state = dataclasses.replace(state, params=jax.device_put(initial_params))
    losses = []
    for batch in data:
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics['loss']))
    return initial_params, Training(np.array(losses), jax.device_get(state.params))


def mixup_shares(config: ConfigDict, steps: int) -> list[float]:
    """Returns the share of MixUp in each step, drawn like in vit_jax."""
    alpha = config.augment.mixup
    shares = []
    for step in range(steps):
        if not alpha:
            shares.append(1.0)
            continue
        step_key = jax.random.fold_in(jax.random.key(config.seed), step)
        key = jax.random.fold_in(step_key, mixup.STREAM)
        shares.append(float(jax.random.beta(key, alpha, alpha, dtype=jnp.float32)))
    return shares


def source_training(
    recipe: Recipe, config: ConfigDict, data: list[dict], params: PyTree, dtype
) -> Training:
    """Trains in `dtype` by the definitions of the source."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    memory = initial_memory(config.optimizer, params)
    update = jax.jit(functools.partial(source_step, recipe, config.optimizer))
    steps = len(data)
    losses = []
    for step, (batch, share) in enumerate(zip(data, mixup_shares(config, steps), strict=True)):
        rate = recipe.rate(step, steps, config.optimizer.warmup_steps, config.optimizer)
        decay = recipe.decay * rate / config.optimizer.learning_rate
        numbers = StepNumbers(share, step + 1, rate, decay)
        numbers = jax.tree.map(lambda x: np.asarray(x, dtype), numbers)
        images = batch['image'].astype(dtype)
        loss, params, memory = update(params, memory, images, batch['label'], numbers)
        losses.append(float(loss))
    return Training(np.array(losses), jax.device_get(params))


def initial_memory(optimizer_config, params):
    """Returns the first state of the source's optimizer."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    if optimizer_config.name == 'sgd':
        return zeros
    mean = jax.tree.map(lambda x: x.astype(optimizer_config.mu_dtype), zeros)
    return mean, zeros


class StepNumbers(NamedTuple):
    """The numbers of a step of the source."""

    share: float  # of MixUp
    count: int  # of steps, including this one
    rate: float  # learning rate
    decay: float  # factor of kernels


def source_step(recipe, optimizer_config, params, memory, images, labels, numbers):
    """Returns (loss, parameters, state of the optimizer) after a step of the source."""
    targets = jnp.eye(CLASSES, dtype=images.dtype)[labels]
    share = numbers.share
    if recipe.mixed_with == 'next':
        share = jnp.maximum(share, 1 - share)
    images = mixed(images, share, recipe.mixed_with)
    targets = mixed(targets, share, recipe.mixed_with)

    def loss_of(params):
        if 'resnet' in params:
            logits = source.bit(params, images, GROUPS)
        else:
            logits = source.vit(params, images)
        return recipe.loss(logits, targets)

    loss, grads = jax.value_and_grad(loss_of)(params)
    if optimizer_config.clip_norm:
        grads = source.clipped(grads, optimizer_config.clip_norm)
    if optimizer_config.name == 'sgd':
        params, memory = source.momentum(params, grads, memory, numbers.rate)
    else:
        params, memory = source.adam(
            params,
            grads,
            memory,
            numbers.count,
            numbers.rate,
            numbers.decay,
            optimizer_config.mu_dtype,
        )
    return loss, params, memory


def mixed(x, share, mixed_with):
    """Returns a batch after MixUp with its reverse, or with the next entry."""
    if mixed_with == 'reversed':
        partner = x[::-1]
    elif mixed_with == 'next':
        partner = jnp.roll(x, 1, 0)
    else:
        partner = x
    return share * x + (1 - share) * partner


def differences(ours: Training, expected: Training) -> tuple[float, float]:
    """Returns the largest relative differences of a loss and of an array of parameters."""
    of_arrays = []
    for (path, array), expected_array in zip(
        jax.tree.leaves_with_path(ours.params), jax.tree.leaves(expected.params), strict=True
    ):
        is_bias_of_keys = [part.key for part in path][-2:] == ['key', 'bias']
        if not is_bias_of_keys:
            norm = np.linalg.norm(expected_array)
            of_arrays.append(np.linalg.norm(array - expected_array) / norm)
    return np.abs(ours.losses / expected.losses - 1).max(), np.max(of_arrays)


def compare(
    name: str, steps: int, mu_dtype: str = '', dtypes=('float32', 'float64')
) -> dict[str, tuple[float, float]]:
    """Returns the `differences` of a recipe from its source computed in each dtype."""
    recipe = RECIPES[name]
    config = toy(recipe, steps, mu_dtype)
    data = batches(steps, config)
    initial_params, ours = our_training(config, data)
    results = {}
    for dtype in dtypes:
        with jax.enable_x64(dtype == 'float64'):
            expected = source_training(recipe, config, data, initial_params, dtype)
            results[dtype] = differences(ours, expected)
    return results


def schedule_difference(name: str, every: int = 1) -> tuple[int, float]:
    """Compares learning rates of every `every`th step.

    Returns:
      The number of steps at full length, and the largest difference relative to the peak.
    """
    recipe = RECIPES[name]
    config = config_lib.checked(full(recipe))
    num_steps = config_lib.total_steps(config)
    if num_steps != recipe.steps:
        raise SystemExit(f'{name} has {num_steps} steps: expected {recipe.steps}, as its source.')
    steps = np.arange(0, num_steps, every)
    rates = jax.vmap(optimizer.make_schedule(config.optimizer, num_steps))(jnp.asarray(steps))
    warmup_steps = config.optimizer.warmup_steps
    expected = [recipe.rate(step, num_steps, warmup_steps, config.optimizer) for step in steps]
    difference = np.abs(rates - np.array(expected)).max()
    return num_steps, difference / config.optimizer.learning_rate


def main():
    """Prints a row for every recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--steps', type=int, default=100, help='length of the trainings')
    parser.add_argument(
        '--recipes', metavar='NAME,...', help='names of the recipes; default: all recipes'
    )
    parser.add_argument('--fields', action='store_true', help='list every field of the sources')
    parser.add_argument('--mu_dtype', default='', help="dtype of Adam's mean of gradients")
    parser.add_argument('--smooth', action='store_true', help='replace ReLU by softplus')
    options = parser.parse_args()
    recipes = source_fields.RECIPES if options.fields else RECIPES
    names = list(recipes) if options.recipes is None else options.recipes.split(',')
    for name in names:
        if name not in recipes:
            parser.error(f'--recipes has {name!r}: expected some of {",".join(recipes)}')
    if options.fields:
        for name in names:
            print(source_fields.markdown(name))
        return
    if options.steps < 10:  # shorter schedules round their parts differently
        parser.error(f'--steps is {options.steps}: expected 10 or more')
    if options.mu_dtype not in ('', 'float32', 'bfloat16'):
        parser.error(f'--mu_dtype is {options.mu_dtype!r}: expected float32 or bfloat16')
    if options.smooth:
        nn.relu = jax.nn.relu = jax.nn.softplus
    print(
        '| recipe | loss, float32 | parameters | loss, float64 | parameters | steps in full | '
        'learning rates |\n|---|---|---|---|---|---|---|'
    )
    for name in names:
        cells = [name]
        for loss, params in compare(name, options.steps, options.mu_dtype).values():
            cells += [f'{loss:.1e}', f'{params:.1e}']
        num_steps, rate = schedule_difference(name)
        cells += [f'{num_steps:,}', f'{rate:.1e}']
        print(f'| {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
    main()
