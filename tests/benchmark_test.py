"""The benchmark times its parts and a peer, and refuses impossible options."""

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
def pretend_installed(monkeypatch):
    """A function: all packages except `missing` seem to be installed."""

    def pretend(*missing):
        util = types.SimpleNamespace(find_spec=lambda name: name not in missing or None)
        monkeypatch.setattr(peers, 'importlib', types.SimpleNamespace(util=util))

    return pretend


@pytest.fixture(autouse=True)
def cache():
    """Restores the setting of the compilation cache, which the command changes."""
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update('jax_enable_compilation_cache', before)


def run(*argv):
    return run_here(*argv, command=benchmark)


@pytest.mark.slow
def test_training_inference_and_input_are_timed(tmp_path):
    result = run(*SMALL, '--parts=train,inference,input', f'--profile={tmp_path}/trace')
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    rows = results['subjects']
    assert set(rows) == {'matmul', 'train', 'inference', 'input', 'train with input'}
    for name, row in rows.items():
        assert name in result.stdout
        if name != 'matmul':
            assert row['slowest'] <= row['images_per_second'] <= row['fastest']
            np.testing.assert_allclose(row['images_per_second'], 16 / row['seconds'])
    assert all(
        rows['train'][stage] > 0 for stage in ('trace', 'lower', 'compile', 'first_step', 'memory')
    )
    np.testing.assert_allclose(  # a step counts as three forward passes
        rows['train']['flops_per_second'] * rows['train']['seconds'],
        3 * rows['inference']['flops_per_second'] * rows['inference']['seconds'],
    )
    assert results['peak_memory']['vit_jax'] > 1e7
    assert results['model'] is None  # the model has no name
    (tmp_path / 'results').write_text(result.stdout)
    assert runs.speeds([str(tmp_path / 'results')])['images_per_second'] == [
        rows['inference']['images_per_second']
    ]
    places = re.findall(r'[\d.]+ ms +[\d.]+% +(.+)', result.stdout)
    assert len(places) == len(set(places)) == 10
    assert any(re.match(r'(forward|backward) ViT\.encode.*EncoderBlock', place) for place in places)
    assert list((tmp_path / 'trace').rglob('*.trace.json.gz'))
    assert list((tmp_path / 'trace').rglob('*.xplane.pb'))


def test_large_steps_give_memory_back(monkeypatch):
    """Malloc would otherwise keep it, as in training: a step of 9 GB once grew to 23 GB."""
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


def test_at_most_two_steps_are_on_the_devices(monkeypatch):
    """With many steps XLA may wait forever on a CPU with several devices."""
    started = []
    finished = []
    running = []  # number of steps on the devices after each start

    def step():
        number = len(started)
        started.append(number)
        running.append(len(started) - len(finished))
        return number

    def wait(number):
        if number is not None:
            finished.append(number)

    monkeypatch.setattr(jax, 'block_until_ready', wait)
    assert workloads.seconds_of(step, 5) >= 0
    assert started == [0, 1, 2, 3, 4]
    assert finished == [0, 1, 2, 3, 4]
    assert max(running) == 2


def test_operations_of_a_trace_are_added_up_by_place(tmp_path):
    """Command buffers of a GPU have the names of their kernels. Loops are not counted twice."""
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


def test_operations_have_their_places_in_the_model():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(3, name='dense')(x)) * nn.Dense(3)(x)

    layer = Layer()
    x = jnp.ones((2, 3))
    params = layer.init(jax.random.key(0), x)
    step = jax.jit(jax.grad(lambda params: layer.apply(params, x).sum()))
    places = set(profile.places(step.lower(params).compile().as_text()).values())
    assert {
        'forward dense/dot_general',
        'forward Dense_0/dot_general',
        'backward dense/reduce_sum',
        'forward tanh',
    } <= places
    assert profile.places("""
  %all-reduce.1 = f32[3] all-reduce(%a), metadata={op_name="jit(step)/(a/add:b/add)"}
  ROOT %fusion.2 = f32[3] fusion(%b), metadata={op_name="jit(step)/transpose(jvp(ViT))/closed_call\
/Block/mlp/checkpoint/Block/mlp/mul" stack_frame_id=7}
""") == {'fusion.2': 'backward Block/mlp/mul'}


def test_stderr_is_muted_while_a_trace_is_written(tmp_path, capfd):
    def run(steps):
        os.write(2, b'Failed to create TPU profiler')
        jax.block_until_ready(jnp.ones(steps) + 1)

    profile.trace(run, 3, str(tmp_path))
    os.write(2, b'and afterwards')
    assert capfd.readouterr().err == 'and afterwards'


def test_rates_of_more_than_four_digits_are_whole_numbers():
    rows = {
        name: {'seconds': 1.0, 'images_per_second': x, 'slowest': 0.9 * x, 'fastest': 1.1 * x}
        for name, x in (('train', 9.8765), ('fast', 98765.4))
    }
    table = report.text(
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
    assert re.search(r'train +9\.877 +\(8\.889 - 10\.86\)', table)
    assert re.search(r'fast +98,765 +\(88,889 - 108,642\)', table)


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields',
    [
        [],
        pytest.param(
            ['--config.loss.name=sigmoid', '--peer_dtype=bfloat16', '--config.optimizer.name=sgd'],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_peer_is_timed_in_its_own_process(fields):
    interop.require('transformers')
    result = run(*SMALL, '--peer=transformers', '--config.image_size=16', *fields)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    assert {'train by transformers', 'inference by transformers'} < set(results['subjects'])
    assert results['peak_memory']['transformers'] > 1e8
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
        (['--peer-compile'], '--peer_dtype and --peer_compile need a peer: add --peer=timm.'),
        (
            ['--peer=timm', '--config.model.pool=map', '--config.optimizer.name=lion'],
            "--peer=timm supports plain ViTs that learn labels: model.pool is 'map' "
            "(expected 'cls' or 'gap'); optimizer.name is 'lion' (expected 'adam' or 'sgd').",
        ),
        (['--config.batch_size=400000'], 'a training step needs'),
    ],
)
def test_impossible_options_are_refused(arguments, message, pretend_installed):
    pretend_installed()
    check_message(run(CONFIG, *arguments), message)


def test_fields_of_weights_are_used(monkeypatch, tmp_path):
    weights.save(small.make('vit', gelu='quick'), f'{tmp_path}/x.safetensors', 'vit_jax')
    gelus = []
    monkeypatch.setattr(benchmark, 'Program', lambda config, mesh: gelus.append(config.model.gelu))
    monkeypatch.setattr(benchmark, 'workloads_of', lambda *_: {})
    monkeypatch.setattr(benchmark, 'measured', lambda *_: {})
    monkeypatch.setattr(report, 'text', str)
    given = [CONFIG, f'--config.pretrained={tmp_path}/x.safetensors']
    for take, expected in (('', 'tanh'), ('model.gelu', 'quick')):
        assert run(*given, f'--config.transfer.take={take}').returncode == 0
        assert gelus.pop() == expected
    check_message(run(CONFIG, '--config.pretrained=gone.npz'), 'gone.npz')


@pytest.mark.parametrize('package', ['torch', 'torchvision', 'timm'])
def test_a_peer_that_is_not_installed_is_refused(package, pretend_installed):
    pretend_installed(package)
    check_message(
        run(CONFIG, '--peer=timm'),
        f'--peer=timm needs {package}, which is not installed: pip install {package}',
    )


@pytest.mark.slow
def test_our_results_are_printed_if_the_peer_ends(pretend_installed, monkeypatch):
    pretend_installed()
    monkeypatch.setattr(sys, 'executable', '/bin/false')
    result = run(*SMALL, '--peer=timm', '--peer_compile')
    assert result.returncode == 1
    assert 'The process of timm ended with exit code 1' in result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    assert set(results['subjects']) == {'matmul', 'train', 'inference'}


@pytest.mark.slow
def test_the_benchmark_runs_without_tensorflow_and_pytorch():
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
    # The stages are timed again after the choice of accum_steps.
    assert min(row['trace'], row['lower'], row['compile']) > 0.02
