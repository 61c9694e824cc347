"""The benchmark times what it says, beside a peer, and explains what it cannot do."""

import gzip
import json
import os
import re
import subprocess
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import interop, programs, small
from tests.support.runs import ROOT, check_message, environment, run_here
from vit_jax import benchmark, machine, weights
from vit_jax.inspection import runs
from vit_jax.measuring import peers, profile, report, workloads
from vit_jax.training import accumulation

CONFIG = f'--config={ROOT}/configs/quickstart.py'
SMALL = (CONFIG, '--config.batch_size=16', '--rounds=2', '--seconds=0.05', '--json')


@pytest.fixture
def installed(monkeypatch):
    def pretend(*missing):
        util = types.SimpleNamespace(find_spec=lambda name: name not in missing or None)
        monkeypatch.setattr(peers, 'importlib', types.SimpleNamespace(util=util))

    return pretend


@pytest.fixture(autouse=True)
def cache():
    """As it was before the command, which compiles anew."""
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update('jax_enable_compilation_cache', before)


def run(*argv):
    return run_here(*argv, command=benchmark)


@pytest.mark.slow
def test_steps_inference_and_input(tmp_path):
    result = run(*SMALL, '--parts=train,inference,input', f'--profile={tmp_path}/trace')
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    rows = found['subjects']
    assert set(rows) == {'matmul', 'train', 'inference', 'input', 'train with input'}
    for name, row in rows.items():
        assert name in result.stdout
        if name != 'matmul':
            assert row['slowest'] <= row['images_per_second'] <= row['fastest']
            np.testing.assert_allclose(row['images_per_second'], 16 / row['seconds'])
    assert all(
        rows['train'][stage] > 0 for stage in ('trace', 'lower', 'compile', 'first_step', 'memory')
    )
    np.testing.assert_allclose(  # a step is three times the work of the forward pass
        rows['train']['flops_per_second'] * rows['train']['seconds'],
        3 * rows['inference']['flops_per_second'] * rows['inference']['seconds'],
    )
    assert found['peak_memory']['vit_jax'] > 1e7
    assert found['model'] is None  # of no published size
    (tmp_path / 'found').write_text(result.stdout)
    assert runs.speeds([str(tmp_path / 'found')])['images_per_second'] == [
        rows['inference']['images_per_second']
    ]
    where = re.findall(r'[\d.]+ ms +[\d.]+% +(.+)', result.stdout)
    assert len(where) == len(set(where)) == 10
    assert any(re.match(r'(forward|backward) ViT\.encode.*EncoderBlock', place) for place in where)
    assert list((tmp_path / 'trace').rglob('*.trace.json.gz'))
    assert list((tmp_path / 'trace').rglob('*.xplane.pb'))


def test_large_steps_keep_no_memory(monkeypatch):
    """As in training: what malloc kept of a step of 9 GB grew to more than 23."""
    calls = []
    program = programs.program_on(programs.small_config(), data=1)
    needed = accumulation.bytes_needed(program.train_step)
    monkeypatch.setattr(machine, 'give_memory_back', lambda: calls.append(True))
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: 5.0 * needed)
    workloads.training(program)
    assert not calls
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: 3.0 * needed)
    workloads.training(program)
    assert calls


def test_no_more_than_two_steps_are_on_the_devices(monkeypatch):
    """With many XLA may wait forever for a CPU of several devices."""
    begun, most = [], []

    def step():
        begun.append(len(begun))
        most.append(len(begun) - len(waited))
        return begun[-1]

    waited = []
    monkeypatch.setattr(
        jax, 'block_until_ready', lambda found: None if found is None else waited.append(found)
    )
    assert workloads.seconds_of(step, 5) >= 0
    assert (begun, waited) == ([0, 1, 2, 3, 4],) * 2
    assert max(most) == 2


def test_operations_of_a_trace(tmp_path):
    """A GPU's are named where it computes many at once; a loop is what it repeats."""
    events = [
        {'name': name, 'dur': microseconds, 'args': {'hlo_op': operation}}
        for name, microseconds, operation in (
            ('nvjet_128x128', 30, 'command_buffer_1'),
            ('loop_fusion', 10, 'loop_fusion.2'),
            ('nvjet_128x128', 50, 'command_buffer_1'),
            ('softmax', 20, 'command_buffer_2'),
            ('while', 900, 'while.4'),
            ('call', 70, 'call'),
        )
    ]
    with gzip.open(tmp_path / 'host.trace.json.gz', 'wt') as file:
        json.dump({'traceEvents': [*events, {'name': 'a thread'}]}, file)
    assert profile.operations(str(tmp_path), 2, {}) == [
        ('nvjet_128x128', 40e-6),
        ('softmax', 10e-6),
        ('loop_fusion', 5e-6),
    ]
    assert profile.operations(str(tmp_path), 2, {'loop_fusion.2': 'softmax'}) == [
        ('nvjet_128x128', 40e-6),
        ('softmax', pytest.approx(15e-6)),
    ]


def test_operations_stand_where_the_model_has_them():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(3, name='dense')(x)) * nn.Dense(3)(x)

    layer, x = Layer(), jnp.ones((2, 3))
    params = layer.init(jax.random.key(0), x)
    step = jax.jit(jax.grad(lambda params: layer.apply(params, x).sum()))
    found = set(profile.places(step.lower(params).compile().as_text()).values())
    assert {
        'forward dense/dot_general',
        'forward Dense_0/dot_general',
        'backward dense/reduce_sum',
        'forward tanh',
    } <= found
    assert profile.places("""
  %all-reduce.1 = f32[3] all-reduce(%a), metadata={op_name="jit(step)/(a/add:b/add)"}
  ROOT %fusion.2 = f32[3] fusion(%b), metadata={op_name="jit(step)/transpose(jvp(ViT))/closed_call\
/Block/mlp/checkpoint/Block/mlp/mul" stack_frame_id=7}
""") == {'fusion.2': 'backward Block/mlp/mul'}


def test_what_libraries_say_while_a_trace_is_written_is_not_shown(tmp_path, capfd):
    def run(steps):
        os.write(2, b'Failed to create TPU profiler')
        jax.block_until_ready(jnp.ones(steps) + 1)

    profile.trace(run, 3, str(tmp_path))
    os.write(2, b'and afterwards')
    assert capfd.readouterr().err == 'and afterwards'


def test_the_table_has_whole_numbers():
    """Of a fast device images per second have more than four digits."""
    rows = {
        name: {'seconds': 1.0, 'images_per_second': x, 'slowest': 0.9 * x, 'fastest': 1.1 * x}
        for name, x in (('train', 9.8765), ('fast', 98765.4))
    }
    found = report.text(
        {
            'image_size': [224, 224],
            'recipe': 'R',
            'batch_size': 1,
            'accum_steps': 1,
            'dtype': 'D',
            'devices': 1,
            'device': 'X',
            'cores': 1,
            'jax': '1',
            'rounds': 1,
            'seconds_of_a_turn': 1,
            'subjects': rows,
            'peak_memory': {},
        }
    )
    assert re.search(r'train +9\.877 +\(8\.889 - 10\.86\)', found)
    assert re.search(r'fast +98,765 +\(88,889 - 108,642\)', found)


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields',
    [
        [],
        pytest.param(
            ['--config.loss.name=sigmoid', '--peer-dtype=bfloat16', '--config.optimizer.name=sgd'],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_peer_beside_it(fields):
    interop.require('transformers')
    result = run(*SMALL, '--peer=transformers', '--config.image_size=16', *fields)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert {'train by transformers', 'inference by transformers'} < set(found['subjects'])
    assert found['peak_memory']['transformers'] > 1e8
    assert 'times transformers' in result.stdout


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--parts=trian'], "--parts is 'trian'. Did you mean train?"),
        (['--rounds=0'], '--rounds is 0: expected a whole number, at least 1'),
        (['--seconds=nan'], '--seconds is nan: expected a finite number above 0'),
        (['--seconds=inf'], '--seconds is inf'),
        (['--seconds=0'], '--seconds is 0.0'),
        ([f'--profile={__file__}'], 'cannot be written (File exists)'),
        (['--peer=keras'], "--peer is 'keras'"),
        (['--peer-compile'], '--peer-dtype and --peer-compile are of a peer: add --peer=timm.'),
        (
            ['--peer=timm', '--config.model.pool=map', '--config.optimizer.name=lion'],
            "--peer=timm is for plain ViTs that learn labels: model.pool is 'map' "
            "(expected 'cls' or 'gap'); optimizer.name is 'lion' (expected 'adam' or 'sgd').",
        ),
        (['--config.batch_size=400000'], 'a training step needs'),
    ],
)
def test_mistakes(arguments, message, installed):
    installed()
    check_message(run(CONFIG, *arguments), message)


def test_what_weights_say_of_the_model_counts(monkeypatch, tmp_path):
    weights.save(small.make('vit', gelu='quick'), f'{tmp_path}/x.safetensors', 'vit_jax')
    seen = []
    monkeypatch.setattr(benchmark, 'Program', lambda config, mesh: seen.append(config.model.gelu))
    monkeypatch.setattr(benchmark, 'workloads_of', lambda *_: {})
    monkeypatch.setattr(benchmark, 'measured', lambda *_: {})
    monkeypatch.setattr(report, 'text', str)
    given = [CONFIG, f'--config.pretrained={tmp_path}/x.safetensors']
    for take, expected in (('', 'tanh'), ('model.gelu', 'quick')):
        assert run(*given, f'--config.transfer.take={take}').returncode == 0
        assert seen.pop() == expected
    check_message(run(CONFIG, '--config.pretrained=gone.npz'), 'gone.npz')


@pytest.mark.parametrize('package', ['torch', 'torchvision', 'timm'])
def test_a_peer_that_is_not_installed(package, installed):
    installed(package)
    check_message(
        run(CONFIG, '--peer=timm'),
        f'--peer=timm needs {package}, which is not installed: pip install {package}',
    )


@pytest.mark.slow
def test_a_peer_that_ends(installed, monkeypatch):
    installed()
    monkeypatch.setattr(sys, 'executable', '/bin/false')
    result = run(*SMALL, '--peer=timm', '--peer-compile')
    assert result.returncode == 1
    assert 'the process of timm has ended, with exit code 1' in result.stderr
    found = json.loads(result.stdout.splitlines()[-1])  # ours is measured all the same
    assert set(found['subjects']) == {'matmul', 'train', 'inference'}


@pytest.mark.slow
def test_without_tensorflow_and_pytorch():
    code = (
        'import sys\nfor name in ("tensorflow", "torch", "sklearn"): sys.modules[name] = None\n'
        'from vit_jax import benchmark\nsys.exit(benchmark.main())'
    )
    result = subprocess.run(
        [sys.executable, '-c', code, *SMALL, '--parts=train', '--config.accum_steps=0'],
        text=True,
        capture_output=True,
        env=environment(),
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout.splitlines()[-1])['subjects']['train']
    assert min(row['trace'], row['lower'], row['compile']) > 0.02  # once more, after the choice
