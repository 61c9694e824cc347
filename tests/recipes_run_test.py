"""Every recipe plans and trains three steps with a small model, on images of digits."""

import json
import subprocess
import sys

import pytest

from tests.support import small
from tests.support.runs import ROOT, environment
from vit_jax import weights
from vit_jax.workdir import metrics

ARGUMENTS = {
    'vit': 'b16,jft',
    'finetune': 'ti16,directory',
    'vtab': 'ti16,svhn',
    'augreg': 's16,imagenet21k,medium1',
    'bit_pretrain': 'r50x1,jft',
    'scaling': 'depth,16',
}
SMALL = {
    'dataset.name': 'digits',
    'dataset.train_split': 'train',
    'dataset.eval_split': 'test',
    'dataset.num_examples': 0,
    'dataset.num_classes': 0,
    'dataset.label': '',
    'image_size': 16,
    'batch_size': 16,
    'accum_steps': 1,
    'num_steps': 3,
    'num_epochs': 0,
    'optimizer.warmup_steps': 1,
    'model.dtype': 'float32',
    'transfer.take': '',
    'log_every': 1,
    'ema_decay': 0,
    'model.unroll': 1,
}
MODEL = {'patch_size': 8, 'hidden_size': 16, 'num_layers': 2, 'mlp_dim': 32, 'num_heads': 2}
RESNET = {'resnet.units': '1,1', 'resnet.width': 32}
RESNETS = ('bit', 'bit_pretrain', 'distill', 'axial_r50')
FEWSHOT = {
    'evals.fewshot.dataset': 'digits',
    'evals.fewshot.train_split': 'train',
    'evals.fewshot.test_split': 'test',
}


def config_of(name):
    """Returns FILE or FILE:ARGUMENT of a recipe."""
    if name == 'axial_r50':
        return 'configs/vit.py:axial_r50,jft'
    return f'configs/{name}.py' + (f':{ARGUMENTS[name]}' if name in ARGUMENTS else '')


def fields_of(name, folder):
    """Returns fields that make a recipe small; writes a teacher to the folder."""
    fields = SMALL | {f'model.{k}': v for k, v in (RESNET if name in RESNETS else MODEL).items()}
    if name == 'cifar10':
        fields['model.patch_size'] = 1  # the root makes 4x4
    if name == 'scaling':
        fields |= FEWSHOT
    if name == 'distill':
        path = str(folder / 'teacher.safetensors')
        weights.save(small.with_classes(small.make('bit'), list('0123456789')), path, 'vit_jax')
        fields |= {'teacher.weights': path, 'teacher.image_size': 16}
    return fields


NAMES = sorted(path.stem for path in (ROOT / 'configs').glob('*.py')) + ['axial_r50']


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        name
        if name == 'augreg'  # tests/objectives/teacher_test.py distils
        else pytest.param(name, marks=pytest.mark.nightly)
        for name in NAMES
    ],
)
def test_recipe_trains(name, run_main, tmp_path):
    result = run_main(tmp_path, config=config_of(name), fields=fields_of(name, tmp_path))
    assert result.returncode == 0, result.stderr
    rows = metrics.read(tmp_path)
    assert [row['step'] for row in rows if 'train/loss' in row] == [1, 2, 3]
    assert 'eval/loss' in rows[-1]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize('name', NAMES)
def test_recipe_plans(name, tmp_path):
    fields = fields_of(name, tmp_path) | {'dataset.num_examples': 1000, 'dataset.num_classes': 10}
    result = subprocess.run(
        [
            sys.executable,
            '-m',
            'vit_jax.plan',
            f'--config={config_of(name)}',
            '--chip=cpu',
            '--devices=1',
            '--no-search',
            '--json',
            *(f'--config.{field}={value}' for field, value in fields.items()),
        ],
        cwd=ROOT,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])['memory']['peak'] > 0
