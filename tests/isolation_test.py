"""Models and training steps run without TensorFlow and PyTorch."""

import subprocess
import sys

import pytest

from tests.support import interop, small
from tests.support.pages import write_workdir
from tests.support.runs import ROOT, environment
from vit_jax import weights

STEPS = """
import functools, sys
for name in ('tensorflow', 'tensorflow_datasets', 'torch', 'clu', 'sklearn', 'matplotlib'):
    sys.modules[name] = None  # importing it raises ImportError
import jax, jax.numpy as jnp
from vit_jax import config, models, predict
from vit_jax.evaluators import evaluator
from vit_jax.objectives import registry
from vit_jax.training import optimizer, state as train_state, steps
from vit_jax.workdir import checkpoint
c = config.base()
model = models.build('ti16', 3, num_layers=2)
objective = registry.build(c, model)
schedule = optimizer.make_schedule(c.optimizer, 10)
tx = optimizer.make_optimizer(c.optimizer, schedule)
state = jax.jit(lambda: train_state.init_state(model, tx, (32, 32, 3), 0, False))()
batch = {'image': jnp.ones((4, 32, 32, 3)), 'label': jnp.arange(4) % 3, 'mask': jnp.ones(4)}
step = jax.jit(functools.partial(steps.train_step, objective=objective, tx=tx, schedule=schedule,
                                 seed=0, options=steps.StepOptions()))
state, metrics = step(state, batch)
assert abs(float(metrics['loss']) - 1.0986) < 1e-3, metrics
evaluate = functools.partial(evaluator.sums_in_parts, sums=objective.evaluator.sums)
sums = jax.jit(evaluate)(state.params, batch)
assert float(sums['count']) == 4
"""


def python(code):
    return subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_train_and_eval_step_without_tensorflow():
    result = python(STEPS)
    assert result.returncode == 0, result.stderr


CONVERT = """
import os, sys
for name in ('tensorflow', 'tensorflow_datasets', 'torch', 'timm', 'transformers', 'clu'):
    sys.modules[name] = None  # importing it raises ImportError
import jax, jax.numpy as jnp
from vit_jax import models, weights
fields = models.fields('ti16') | dict(num_layers=1, gelu='erf')
model = models.build(fields, 3)
params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 32, 32, 3)))['params']
w = weights.Weights(jax.device_get(params), fields, 3, None, None, 'vit_jax', 'test')
os.chdir(FOLDER)
for layout, path in (('timm', 'x.safetensors'), ('huggingface', 'hf'),
                     ('torchvision', 'y.safetensors')):
    weights.save(w, path, layout)
    w = weights.load(path)
assert (w.params['embedding']['kernel'] == params['embedding']['kernel']).all()
"""


@pytest.mark.slow
def test_layouts_of_pytorch_libraries_work_without_pytorch(tmp_path):
    result = python(CONVERT.replace('FOLDER', repr(str(tmp_path))))
    assert result.returncode == 0, result.stderr


def test_pth_files_are_read_without_pytorch(tmp_path):
    saved = small.make('vit', gelu='erf')
    path = str(tmp_path / 'x.pth')
    interop.require('torch')
    weights.save(saved, path, 'timm')
    result = python(
        'import sys\nsys.modules["torch"] = None\nfrom vit_jax import weights\n'
        f'loaded = weights.load({path!r})\nprint(loaded.params["cls"].tobytes().hex())'
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == saved.params['cls'].tobytes().hex()


REPORT = """
import sys
for name in ('tensorflow', 'tensorflow_datasets', 'torch', 'clu', 'sklearn', 'matplotlib'):
    sys.modules[name] = None  # importing it raises ImportError
from vit_jax import report
assert report.main(['FOLDER', '--images=0']) == 0
assert report.main(['FOLDER', '--out=FOLDER/more.html']) == 0
"""


@pytest.mark.slow
def test_report_without_the_training_packages(tmp_path):
    """A report with images names the missing packages."""
    workdir = write_workdir(tmp_path / 'run')
    result = python(REPORT.replace('FOLDER', str(workdir)))
    assert result.returncode == 0, result.stderr
    assert 'curve-0' in (workdir / 'report.html').read_text()
    assert (
        'install it with pip install -e &#39;.[train]&#39;' in (workdir / 'more.html').read_text()
    )


IMPORTS = """
import importlib, sys
for name in ('models', 'main', 'workdir.checkpoint', 'training.steps', 'training.program',
             'weights', 'evaluators.classification', 'processes.launch', 'convert', 'predict',
             'plan', 'web', 'publishing', 'figures', 'report', 'reporting.collect',
             'reporting.page'):
    importlib.import_module(f'vit_jax.{name}')
    unwanted = {'tensorflow', 'torch', 'timm'} & set(sys.modules)
    assert not unwanted, f'vit_jax.{name} imports {unwanted}'
"""


def test_importing_the_package_imports_no_tensorflow():
    result = python(IMPORTS)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_data_does_not_import_keras():
    code = (
        'import os, sys; from vit_jax.data import pipeline, host_tensorflow; '
        'assert "keras" not in sys.modules; '
        'assert host_tensorflow.tf.keras.layers.Dense(3).units == 3; '
        'assert os.environ["TF_USE_LEGACY_KERAS"] == "0"'
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_missing_package_is_one_message_with_its_extra():
    result = python(
        "import sys; sys.modules['tensorflow'] = None\n"
        "sys.argv = ['main', '--config=configs/quickstart.py', '--workdir=/nowhere']\n"
        'import runpy; runpy.run_module("vit_jax.main", run_name="__main__")'
    )
    assert result.returncode == 1
    assert "Install it with: pip install -e '.[train]'" in result.stderr
