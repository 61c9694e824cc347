"""Programs on one device and on meshes of eight devices: equal numbers, and sharded states."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict, FrozenConfigDict

from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.programs import MESHES, program_on, small_config
from vit_jax.parallel import microbatch, sharding
from vit_jax.training import accumulation, pretrained
from vit_jax.training.program import Program
from vit_jax.workdir import checkpoint


def batch_of(config, step):
    """A global batch of random images."""
    rng = np.random.default_rng(step)
    size = config.batch_size
    return {
        'image': rng.uniform(-1, 1, (size, *config.image_size, 3)).astype(np.float32),
        'label': rng.integers(0, 6, size).astype(np.int32),
        'mask': np.ones(size, bool),
    }


def placed_batch(program, step):
    return jax.make_array_from_process_local_data(
        sharding.batch_sharding(program.mesh), batch_of(program.config, step)
    )


def train(program, steps=5):
    """(state, losses) after some steps from the program's own initial state."""
    step = program.train_step
    state, losses = program.initial_state(), []
    for k in range(steps):
        state, values = step(state, placed_batch(program, k))
        losses.append(float(values['loss']))
    return state, losses


WEIGHTS = {'loss.class_weights': (0.1, 1.4, 1.0, 0.0, 1.2, 0.5)}
CASES = {
    'vit': ('vit', {}),
    'hybrid': ('hybrid', {}),
    'resnet': ('resnet', {}),
    'gpu': ('vit', {'model.linear_kernel': 'gpu', 'model.dropout_rate': 0.1}),
    'accumulation': ('vit', {'accum_steps': 2, 'ema_decay': 0.9, **WEIGHTS}),
    'mixup': ('vit', {'accum_steps': 2, 'augment.mixup': 0.8, **WEIGHTS}),
    'adafactor': ('vit', {'optimizer.name': 'adafactor', 'optimizer.learning_rate': 1e-3}),
}


@pytest.fixture(scope='module')
def on_one_device():
    """case -> (state, losses), computed once."""
    results = {}

    def result(case):
        if case not in results:
            family, fields = CASES[case]
            results[case] = jax.device_get(
                train(program_on(small_config(family, **fields), data=1, fsdp=1, tensor=1))
            )
        return results[case]

    return result


QUICK = {('vit', 'mixed')}
SLOW = {('vit', 'fsdp'), ('accumulation', 'mixed'), ('gpu', 'mixed')}


def mark(case, mesh):
    if (case, mesh) in QUICK:
        return ()
    return pytest.mark.slow if (case, mesh) in SLOW else (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.parametrize(
    ('case', 'mesh'),
    [
        pytest.param(case, mesh, marks=mark(case, mesh))
        for case in CASES
        for mesh in MESHES
        if case != 'resnet' or MESHES[mesh]['tensor'] == 1
    ],
)  # no heads to split
def test_every_mesh_equals_one_device(on_one_device, case, mesh):
    family, fields = CASES[case]
    expected_state, expected_losses = on_one_device(case)
    state, losses = train(program_on(small_config(family, **fields), **MESHES[mesh]))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name in ('params', 'ema_params'):
        for (path, x), y in zip(
            jax.tree.leaves_with_path(jax.device_get(getattr(state, name))),
            jax.tree.leaves(getattr(expected_state, name)),
            strict=True,
        ):
            leaf = jax.tree_util.keystr(path)
            if case == 'adafactor' and leaf.endswith("['key']['bias']"):
                continue  # its gradient is zero but for rounding, which Adafactor scales to one
            scale = max(np.abs(y).max(), 1e-3) * (10 if case == 'adafactor' else 1)
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale, err_msg=leaf)


def bytes_by_device(tree):
    """Bytes of every array's shards, by device."""
    total = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            total[shard.device] = total.get(shard.device, 0) + shard.data.nbytes
    return total


def expected_bytes(state, fsdp, tensor):
    """Bytes of a device's part of a state, from the paths: every kernel is split."""
    total = 0
    for path, x in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        parts = 1
        if name.endswith('kernel') or name.endswith('position/embedding'):
            parts = fsdp
        if (
            'blocks' in name
            and 'norm' not in name
            and not name.endswith(('out/bias', 'dense2/bias'))
        ):
            parts *= tensor
        total += x.nbytes // parts
    return total


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [pytest.param('fsdp', marks=pytest.mark.nightly), 'mixed'])
def test_state_is_split_at_initialisation_restore_and_from_weights(tmp_path, mesh):
    config = small_config(**{'ema_decay': 0.9, 'optimizer.name': 'adam'})
    program = program_on(config, **MESHES[mesh])
    state = program.initial_state()
    sizes = MESHES[mesh]
    each = expected_bytes(state, sizes['fsdp'], sizes['tensor'])
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    assert each < whole / (sizes['fsdp'] * sizes['tensor']) * 1.3
    assert bytes_by_device(state) == dict.fromkeys(jax.devices(), each)

    checkpointer = checkpoint.Checkpointer(str(tmp_path / 'checkpoints'), 1, False)
    checkpointer.save(0, state)
    checkpointer.wait()
    restored = checkpointer.restore_latest(program.abstract_state).state
    checkpointer.close()
    assert bytes_by_device(restored) == bytes_by_device(state)

    host = jax.tree.map(lambda x: np.asarray(x) + 1, state.params)
    loaded = pretrained.place_params(state.params, host)
    assert bytes_by_device(loaded) == bytes_by_device(state.params)
    jax.tree.map(np.testing.assert_array_equal, loaded, host)


@pytest.mark.slow
def test_checkpoint_restores_on_another_mesh(tmp_path):
    config = small_config()
    checkpointer = checkpoint.Checkpointer(str(tmp_path / 'checkpoints'), 1, False)
    state, _ = train(program_on(config, **MESHES['mixed']), steps=2)
    checkpointer.save(2, state)
    checkpointer.wait()
    for sizes in (dict(data=1, fsdp=1, tensor=1), MESHES['fsdp'], dict(data=1, fsdp=2, tensor=1)):
        program = program_on(config, **sizes)
        restored = checkpointer.restore_latest(program.abstract_state).state
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        kernel = restored.params['blocks']['mlp']['dense1']['kernel']
        assert kernel.sharding.mesh.shape == sizes
    checkpointer.close()


def test_frozen_parameters_need_no_gradients():
    config = small_config(**{'optimizer.lr_factors': '^head/=1,.=0'})
    program = program_on(config, data=1, fsdp=1, tensor=1)
    flops = program.train_step.cost_analysis()['flops']
    config = small_config()
    whole = program_on(config, data=1, fsdp=1, tensor=1)
    assert flops < 0.5 * whole.train_step.cost_analysis()['flops']


def hand_counted_flops(config):
    """FLOPs of the training step of a ViT, with two backward products for each forward product.

    The images need no gradient, so the embedding has one backward product.
    """
    c, patch = config.model, config.model.patch_size[0]
    patches = (config.image_size[0] // patch) ** 2
    tokens, width = patches + 1, c.hidden_size
    embedding = patches * patch * patch * 3 * width
    up = tokens * width * c.mlp_dim
    block = tokens * 4 * width * width + 2 * tokens * tokens * width + 2 * up
    last_up = width * c.mlp_dim  # of the class token alone, from the keys and values of all
    last = 2 * (tokens + 1) * width * width + 2 * tokens * width + 2 * last_up
    blocks = (c.num_layers - 1) * block + last
    layers = 3 * blocks
    if c.remat_policy == 'products':  # the backward pass repeats products of attention
        layers += (c.num_layers - 1) * 2 * tokens * tokens * width + 2 * tokens * width
    if c.remat_policy == 'nothing_saveable':
        layers += blocks - (c.num_layers - 1) * up - last_up
    image = 2 * embedding + layers + 3 * width * config.dataset.num_classes
    return 2 * image * config.batch_size


@pytest.mark.parametrize(
    'fields',
    [
        {'accum_steps': 2},
        pytest.param({'model.remat_policy': 'nothing_saveable'}, marks=pytest.mark.nightly),
        {'model.remat_policy': 'products'},
        {'model.linear_kernel': 'gpu'},
    ],
)
def test_flops_of_the_traced_step(fields):
    """The backward pass does not repeat the last product of a block."""
    config = small_config(**fields)
    program = program_on(config, **MESHES['mixed'])
    biases = 0
    if 'model.linear_kernel' in fields:  # of values, times a matrix: forward and twice backward
        biases = 3 * 2 * config.model.num_layers * config.model.hidden_size**2
    assert program.flops_of_train_step() == hand_counted_flops(program.config) + biases


@pytest.mark.parametrize('family', nightly_but(['hybrid'], ['resnet', 'hybrid']))
def test_flops_of_convolutions(family):
    """There are two backward products for each forward product, with any stride.

    The images need no gradient, so their convolution (7x7, to 16x16x8) has one.
    """
    program = program_on(small_config(family), data=1, fsdp=1, tensor=1)
    of_images = 2 * 16 * 16 * 8 * 7 * 7 * 3 * program.config.batch_size
    assert program.flops_of_train_step() == program.flops_per_step() - of_images


def images_at_once(program):
    """Number of images in a call of the model in the evaluation step."""
    sizes = set()

    def note_size(call, args, kwargs, context):
        if isinstance(context.module, type(program.model)) and context.method_name == '__call__':
            sizes.add(args[0].shape[0])
        return call(*args, **kwargs)

    batch = placed_batch(program, 0)
    with nn.intercept_methods(note_size):
        sums = program.eval_step(program.initial_state().params, batch)
    assert sums['count'] == program.config.batch_size
    (size,) = sizes
    return size


@pytest.mark.parametrize('kind', nightly_but([FrozenConfigDict], [ConfigDict, FrozenConfigDict]))
def test_with_accum_steps_makes_another_program(kind):
    """Training and evaluation steps of a program split the batch according to its config."""
    config = kind(small_config(accum_steps=0))
    program = Program(config, sharding.make_mesh(config.mesh))
    split = program.with_accum_steps(2)
    assert isinstance(split.config, kind)
    assert (config.accum_steps, program.config.accum_steps, split.config.accum_steps) == (0, 0, 2)
    assert (images_at_once(program), images_at_once(split)) == (16, 8)
    assert split.model is program.model
    assert split.abstract_state is program.abstract_state
    with refused('value', field='batch_size', value=16):
        program.with_accum_steps(3)


@pytest.mark.slow
@pytest.mark.parametrize('changed', [WEIGHTS, {'loss.label_smoothing': 0.2}], ids=str)
def test_class_weights_and_smoothing_do_not_change_the_evaluation(changed):
    params, found = None, []
    for fields in ({}, changed):
        program = program_on(small_config(**fields), data=1, fsdp=1, tensor=1)
        params = params or program.initial_state().params
        batch = placed_batch(program, 0)
        found.append((float(program.eval_step(params, batch)['loss']), train(program, 1)[1][0]))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.slow
def test_an_open_split_is_the_fastest_that_fits(monkeypatch):
    """On a CPU whose caches hold four of sixteen images (65 tokens), there are four parts."""
    monkeypatch.setattr(microbatch, 'TRAINED_AT_ONCE', 4 * 65)
    programs = {n: program_on(small_config(accum_steps=n), data=1) for n in (-1, 0, 1)}
    programs[0] = accumulation.choose(programs[0])
    assert [each.config.accum_steps for each in programs.values()] == [4, 4, 1]
    assert [each.eval_parts for each in programs.values()] == [2, 2, 2]  # of 800 tokens
    assert programs[0].with_accum_steps(8).eval_parts == 8  # the memory is short


@pytest.mark.slow
def test_recomputed_arrays_need_no_memory():
    """On a CPU this needs a loop over layers; otherwise XLA merges it with the forward pass."""
    needed = {}
    for policy in ('auto', 'products', 'nothing_saveable'):
        config = small_config(
            **{
                'model.unroll': 0,
                'model.remat_policy': policy,
                'model.num_layers': 6,
                'accum_steps': 1,
            }
        )
        needed[policy] = accumulation.bytes_needed(program_on(config, data=1).train_step)
    assert needed['nothing_saveable'] < 0.7 * needed['products'] < 0.5 * needed['auto']


def test_a_config_that_changes_later_does_not_change_the_program():
    config = ConfigDict(small_config())
    program = Program(config, sharding.make_mesh(config.mesh))
    config.accum_steps = 2
    assert images_at_once(program) == 16


@pytest.mark.parametrize(
    ('field', 'value', 'mesh'),
    [
        ('model.num_heads', 2, dict(data=2, fsdp=1, tensor=4)),
        ('model.mlp_dim', 66, dict(data=2, fsdp=1, tensor=4)),
        ('batch_size', 12, dict(data=2, fsdp=4, tensor=1)),
    ],
)
def test_mesh_that_does_not_fit(field, value, mesh):
    with refused('value', field=field, value=value):
        program_on(small_config(**{field: value}), **mesh)


def test_a_resnet_cannot_be_split_over_the_tensor_axis():
    with refused('inapplicable', field='mesh.tensor', value=4):
        program_on(small_config('resnet'), data=2, fsdp=1, tensor=4)
