"""Bytes that compiled programs send, compared with numbers computed by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.support.programs import MESHES, program_on, small_config
from vit_jax.planning import collectives

LAYERS = 5
WIDTH = 16
BATCH = 32
DEVICES = 8


@pytest.fixture(scope='module')
def placed():
    """(axes of an array) -> its sharding over eight devices."""
    mesh = jax.make_mesh((DEVICES,), ('fsdp',), axis_types=(AxisType.Auto,))
    return lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))


def compiled(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return collectives.count(text)


def layers(placed):
    return (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=placed(None, 'fsdp')),
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=placed('fsdp')),
    )


def apply(kernels, x, placed):
    def layer(x, kernel):
        x = jax.lax.with_sharding_constraint(x, placed('fsdp'))
        return jnp.tanh(x @ jax.lax.with_sharding_constraint(kernel, placed())), None

    return jax.lax.scan(layer, x, kernels)[0]


def test_a_forward_pass_gathers_each_kernel(placed):
    counts = compiled(lambda w, x: apply(w, x, placed), *layers(placed))
    # Each device sends its eighth of every kernel to the seven others.
    assert LAYERS * 4 * WIDTH * WIDTH // 8 * 7 == 4480
    assert counts.sent == {'all-gather': 4480}
    assert counts.calls == {'all-gather': LAYERS}


def test_a_gradient_keeps_gathered_kernels_and_scatters_their_gradients(placed):

    def loss(w, x):
        return (apply(w, x, placed) ** 2).sum()

    def gradient(w, x):
        return jax.lax.with_sharding_constraint(jax.grad(loss)(w, x), placed(None, 'fsdp'))

    counts = compiled(gradient, *layers(placed))
    kernel = 4 * WIDTH * WIDTH
    assert counts.sent['all-gather'] == LAYERS * kernel // 8 * 7
    assert counts.sent.get('reduce-scatter', 0) + counts.sent.get('all-reduce', 0) / 2 == (
        LAYERS * kernel * 7 // 8
    )


def test_a_sum_over_devices_is_an_all_reduce(placed):
    x = jax.ShapeDtypeStruct((DEVICES, 24), jnp.float32, sharding=placed('fsdp'))
    counts = compiled(lambda x: x.sum(axis=0), x)
    assert counts == ({'all-reduce': 2 * 4 * 24 * 7 // 8}, {'all-reduce': 1})


@pytest.mark.parametrize('mesh', [pytest.param('data', marks=pytest.mark.slow), 'fsdp'])
def test_a_training_step_sends_gradients_or_gathers_kernels(mesh):
    program = program_on(small_config(), **MESHES[mesh])
    counts = collectives.count(program.train_step.as_text())
    kernel_bytes = 0
    for path, x in jax.tree.leaves_with_path(program.abstract_state.params['blocks']):
        if path[-1].key == 'kernel':
            kernel_bytes += 4 * x.size
    if mesh == 'data':
        assert 'all-gather' not in counts.sent
        params = sum(4 * x.size for x in jax.tree.leaves(program.abstract_state.params))
        rest = counts.sent['all-reduce'] - 2 * params * 7 / 8
        assert 0 <= rest < 500  # the metrics
    else:
        # Each layer gathers its kernels in the forward and in the backward pass. Embedding,
        # position and head are gathered too. In the last layer the class token of each image may be
        # gathered instead of the kernels.
        of_layers = 2 * kernel_bytes * 7 // 8
        of_all_but_one = of_layers * (1 - 1 / program.config.model.num_layers)
        assert of_all_but_one < counts.sent['all-gather'] < 1.3 * of_layers


LOOP = """HloModule test, num_partitions=8

%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (p: (s32[], f32[128], s32[])) -> (s32[], f32[128], s32[]) {
  %p = (s32[]{:T(128)}, f32[128]{0:T(128)S(1)}, s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %x = f32[128]{0} get-tuple-element(%p), index=1
  %sum = f32[128]{0} all-reduce(%x), channel_id=1, replica_groups=GROUPS, to_apply=%add.1
  ROOT %t = (s32[], f32[128], /*index=2*/s32[]) tuple(%next, %sum, %two)
}

%condition (p.1: (s32[], f32[128], s32[])) -> pred[] {
  %p.1 = (s32[], f32[128], s32[]) parameter(0)
  %limit = s32[] constant(7)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f32[128]) -> f32[128] {
  %x.1 = f32[128]{0} parameter(0)
  %start = s32[] constant(1)
  %step = s32[] constant(2)
  %t.1 = (s32[], f32[128], s32[]) tuple(%start, %x.1, %step)
  %loop = (s32[], f32[128], s32[]) while(%t.1), condition=%condition, body=%body
  ROOT %r = f32[128]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ('groups', 'size'),
    [
        ('{{0,1,2,3},{4,5,6,7}}', 4),
        ('[2,4]<=[8]', 4),
        ('[4,2]<=[2,4]T(1,0)', 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b'}", 8),
    ],
)
def test_iterations_of_a_loop_follow_from_its_counter(groups, size):
    counts = collectives.count(LOOP.replace('GROUPS', groups))
    assert counts.calls == {'all-reduce': 3}  # 1, 3, 5
    assert counts.sent == {'all-reduce': 3 * 2 * 512 * (size - 1) // size}


def test_a_copied_counter_is_followed():
    text = (
        LOOP.replace('GROUPS', '[2,4]<=[8]')
        .replace('%next = s32[] add(', '%higher = s32[] add(')
        .replace('%x = f32', '%next = s32[] copy(%higher)\n  %x = f32')
    )
    assert collectives.count(text).calls == {'all-reduce': 3}


@pytest.mark.parametrize(
    ('line', 'other'),
    [
        ('constant(7)', 'get-tuple-element(%p.1), index=2'),
        ('direction=LT', 'direction=NE'),
        ('constant(2)', 'get-tuple-element(%p), index=2'),
        ('add(%i, %two)', 'multiply(%i, %two)'),
    ],
)
def test_a_loop_without_a_constant_counter_is_an_error(line, other):
    text = LOOP.replace('GROUPS', '[2,4]<=[8]').replace(line, other)
    with pytest.raises(ValueError, match='sum of the compiled step is in a loop, and neither'):
        collectives.count(text)
    without_collectives = text.replace('all-reduce(', 'copy(')
    assert collectives.count(without_collectives) == ({}, {})


def test_the_number_of_iterations_by_the_compiler_takes_precedence():
    text = (
        LOOP.replace('GROUPS', '[2,4]<=[8]')
        .replace('direction=LT', 'direction=NE')
        .replace('body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    )
    assert collectives.count(text).calls == {'all-reduce': 5}


CHAIN = """HloModule test

%fused.START (p0: bf16[8,128]) -> bf16[64,128] {
  %p0 = bf16[8,128]{1,0} parameter(0)
  ROOT %g = bf16[64,128]{1,0} all-gather(%p0), channel_id=9, replica_groups=G, A={chain_id="2"}
}

%fused.DONE (p1: bf16[8,128]) -> bf16[64,128] {
  %p1 = bf16[8,128]{1,0} parameter(0)
  ROOT %g = bf16[64,128]{1,0} all-gather(%p1), channel_id=9, replica_groups=G, A={chain_id="2"}
}

%all-reduce-scatter (input: f32[64]) -> f32[8] {
  %input = f32[64]{0} parameter(0)
  %sum = f32[64]{0} all-reduce(%input), channel_id=3, replica_groups=[1,8]<=[8]
  %zero = u32[] constant(0)
  ROOT %part = f32[8]{0} dynamic-slice(%sum, %zero), dynamic_slice_sizes={8}
}

ENTRY %main (x: bf16[8,128], y: f32[64]) -> f32[8] {
  %x = bf16[8,128]{1,0} parameter(0)
  %y = f32[64]{0} parameter(1)
  %a = bf16[64,128]{1,0} fusion(%x), kind=kOutput, calls=%fused.START
  %b = bf16[64,128]{1,0} fusion(%x), kind=kOutput, calls=%fused.DONE
  %s = (bf16[8,128], bf16[8,128], u32[]) collective-permute-start(%x), channel_id=4
  %d = bf16[8,128] collective-permute-done(%s)
  ROOT %r = f32[8]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_a_gather_in_several_fusions_counts_once_and_a_sliced_sum_is_a_scatter():
    counts = collectives.count(CHAIN.replace('G,', '[1,8]<=[8],'))
    assert counts.sent == {
        'all-gather': 2 * 8 * 128 * 7,
        'collective-permute': 2 * 8 * 128,
        'reduce-scatter': 4 * 64 * 7 // 8,
    }
    assert counts.calls == {'all-gather': 1, 'collective-permute': 1, 'reduce-scatter': 1}
