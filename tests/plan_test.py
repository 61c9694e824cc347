"""The command: its messages, and whole plans in separate processes."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from tests.support import small
from tests.support.runs import ROOT, environment
from vit_jax import machine, plan, weights
from vit_jax.training import accumulation

TINY = (
    '--config.model.hidden_size=32',
    '--config.model.num_layers=3',
    '--config.model.mlp_dim=64',
    '--config.model.num_heads=4',
    '--config.image_size=32',
    '--config.batch_size=64',
    '--config.model.representation_size=0',
)
# Importing TensorFlow, PyTorch and others raises ImportError.
CODE = """
import sys
for name in ('tensorflow', 'tensorflow_datasets', 'torch', 'clu', 'sklearn', 'matplotlib', 'tqdm'):
    sys.modules[name] = None
from vit_jax import plan
sys.exit(plan.main())
"""


def run(*arguments, config='configs/vit.py:b16'):
    """Plans in a process without TensorFlow and PyTorch; returns the numbers and the text."""
    result = subprocess.run(
        [sys.executable, '-c', CODE, f'--config={config}', '--json', *arguments],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    text, _, line = result.stdout.strip().rpartition('\n')
    return json.loads(line), text


@pytest.fixture
def main(monkeypatch, caplog):
    """A function that runs the command in this process: (arguments) -> (exit code, log)."""
    monkeypatch.chdir(ROOT)
    before = jax.config.jax_enable_compilation_cache
    yield lambda *arguments: (plan.main(list(arguments)), caplog.text)
    jax.config.update('jax_enable_compilation_cache', before)


B16 = '--config=configs/vit.py:b16'


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([B16, '--devices=8', '--chip=v5x'], "--chip is 'v5x'. Did you mean v5p, v5e?"),
        (
            [B16, '--devices=12', '--chip=v5e'],
            '--devices is 12: v5e has no slice of this size. The nearest slices are: 4 (2x2), 8 '
            '(2x4), 16 (4x4), 32 (4x8).',
        ),
        (
            [B16, '--devices=8', '--chip=v5e', '--topology=2x2'],
            '--topology is 2x2, which is not a slice of 8 v5e',
        ),
        ([B16, '--devices=8', '--chip=h100', '--topology=2x2'], 'only TPUs have a topology'),
        ([B16, '--devices=0'], '--devices is 0: expected a whole number, at least 1.'),
        (
            [B16, '--devices=8', '--chip=h100', '--config.mesh.fsdp=3'],
            "mesh {'data': -1, 'fsdp': 3, 'tensor': 1} does not fit 8 devices",
        ),
        (
            [B16, '--devices=8', '--chip=h100', '--config.batch_size=12'],
            'batch_size 12 is not divisible by 8 devices (data x fsdp): use 8, or other',
        ),
        (
            [B16, '--devices=8', '--chip=h100', '--config.mesh.tensor=8'],
            'model.num_heads 12 is not divisible by mesh.tensor 8.',
        ),
        (
            ['--config=configs/vit.py:b16,jft', '--devices=8', '--chip=h100'],
            'dataset.num_examples is 0: expected a positive number, because a plan reads no data. '
            'Add --config.dataset.num_examples=',
        ),
        (
            ['--config=configs/vit.py:b16,jft', '--devices=8', '--config.dataset.num_examples=9'],
            'dataset.num_classes is 0: expected a positive number',
        ),
        (
            [B16, '--devices=2049', '--chip=h100'],
            '--devices is 2,049: expected at most 2,048 simulated devices',
        ),
        ([B16, '--devices=8', '--config.model.hiden_size=3'], 'Did you mean model.hidden_size'),
        (['--config=configs/vit.py:b17', '--devices=8'], "unknown model 'b17'"),
        (['--config=configs/nothing.py', '--devices=8'], 'no config file'),
        (['--devices=8'], 'add --config=FILE'),
        ([B16, '--devices=8', 'more'], "unexpected argument 'more'"),
    ],
)
def test_impossible_options_are_refused(main, arguments, message):
    code, log = main(*arguments)
    assert code == 1
    assert message in log


def test_devices_of_this_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(machine, 'available_memory', lambda: 32_000)
    options = argparse.Namespace(chip='cpu', devices=4, topology='', simulate=False)
    assert plan.make_target(options).limit == accumulation.HEADROOM * 8000


def test_a_missing_libtpu_is_refused(main, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    code, log = main(B16, '--devices=8', '--chip=v5e')
    assert code == 1
    assert "pip install -e '.[plan]'" in log


@pytest.mark.slow
def test_simulated_gpus_without_tensorflow_or_pytorch():
    """The kernels of the blocks are gathered in bfloat16."""
    p, text = run(
        *TINY,
        '--chip=h100',
        '--devices=16',
        '--config.mesh.fsdp=16',
        '--config.model.dtype=bfloat16',
        '--config.model.dropout_rate=0',
        '--no_search',
    )
    assert p['mesh'] == {'data': 1, 'fsdp': 16, 'tensor': 1}
    blocks = 3 * (4 * 32 * 32 + 2 * 32 * 64)  # numbers in the kernels
    gathered = 2 * 2 * blocks * 15 // 16  # in bfloat16, for the forward and the backward pass
    head = 4 * 32 * 1000 * 15 // 16
    assert 0 < p['sent_bytes']['all-gather'] - gathered - head < gathered
    assert p['sent_bytes']['reduce-scatter'] >= gathered // 2
    assert p['memory']['optimizer'] == pytest.approx(2 * p['memory']['params'], abs=16)
    assert p['fits']
    assert p['flops_per_device'] * 16 < p['model_flops'] * 1.01
    assert f'{p["parameters"]:,} parameters' in text
    assert p['seconds']['least'] == max(
        p['seconds'][name] for name in ('arithmetic', 'memory', 'links')
    )
    assert p['device_days'] == pytest.approx(p['seconds']['least'] * p['num_steps'] * 16 / 86_400)


@pytest.mark.slow
def test_simulated_gpus_for_weights(tmp_path):
    """The devices are created before the weights are read, which starts JAX."""
    weights.save(small.make('vit'), f'{tmp_path}/x.npz', 'google')
    p, _ = run(
        *TINY,
        '--chip=h100',
        '--devices=16',
        '--no_search',
        f'--config.pretrained={tmp_path}/x.npz',
        '--config.dataset.num_examples=50000',
        '--config.dataset.num_classes=10',
        config='configs/finetune.py:b16,cifar10',
    )
    assert p['mesh'] == {'data': 16, 'fsdp': 1, 'tensor': 1}


@pytest.mark.slow
def test_tpu_compiler(main, capsys):
    """Plans for eight chips and for simulated devices have equal FLOPs and state."""
    if 'VIT_JAX_CI' not in os.environ:
        pytest.importorskip('libtpu', reason='needs libtpu: make .venv/interop')
    arguments = (*TINY, '--chip=v5e', '--devices=8', '--config.mesh.fsdp=8')
    p, text = run(*arguments, '--no_search')
    assert p['compiler'] == 'tpu'
    assert p['fits']
    assert main(B16, *arguments, '--simulate', '--no_search', '--json')[0] == 0
    simulated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert simulated['compiler'] == 'cpu'
    assert p['flops_per_device'] == simulated['flops_per_device']
    for name in ('params', 'optimizer', 'gradients', 'batches'):
        assert p['memory'][name] == simulated['memory'][name]
    assert 'by the compiler of the TPU' in text


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_predicted_peak_agrees_with_a_measurement():
    """The prediction is within 15 % of the resident memory of a training process, 3 GiB."""
    result = subprocess.run(
        [sys.executable, 'benchmarks/step_memory.py', '--batch_size=16'],
        cwd=ROOT,
        text=True,
        env=environment(as_a_user=True) | {'PYTHONPATH': str(ROOT)},
        capture_output=True,
        timeout=500,
        check=True,
    )
    assert abs(float(result.stdout.rpartition(':')[2].strip().rstrip('%'))) < 15, result.stdout


MESHES = """
from vit_jax import config
from vit_jax.parallel import feeding, sharding
from vit_jax.planning import targets
mesh = config.base().mesh
for chip, number in (('v5e', 64), ('v5p', 256)):
    devices = targets.tpu_devices(chip, targets.shape_of(chip, number))
    for fsdp in (2**k for k in range(number.bit_length())):
        for tensor in (1, 2, 4):
            if number // fsdp % tensor == 0:
                mesh.update(data=number // fsdp // tensor, fsdp=fsdp, tensor=tensor)
                feeding.data_share(sharding.make_mesh(mesh, devices), 0)
"""


@pytest.mark.slow
def test_every_mesh_gives_equal_parts_to_the_hosts_of_a_slice():
    """For 16 x 16 on 4 x 8 x 8 chips a side of the torus is cut."""
    if 'VIT_JAX_CI' not in os.environ:
        pytest.importorskip('libtpu', reason='needs libtpu: make .venv/interop')
    result = subprocess.run(
        [sys.executable, '-c', MESHES],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
