"""A sweep of the quickstart without training."""

import json
import os

from tests.support.runs import ROOT, TINY, load, run_here
from vit_jax import config as config_lib
from vit_jax import sweep as command_lib
from vit_jax.training import loop

LR = 'optimizer.learning_rate'
QUICKSTART = f'--config={ROOT}/configs/quickstart.py'


def fields_of_a_sweep(image_directory):
    return TINY | {
        'num_epochs': 0.0,
        'num_steps': 30,
        'eval_every': 10,
        'checkpoint_every': 30,
        'dataset.name': str(image_directory),
        'dataset.train_split': 'train[:80%]',
        'dataset.num_examples': 48,
        'dataset.eval_split': 'train[80%:]',
        'dataset.test_split': 'test',
    }


def config_of(fields):
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(fields)
    return config


def command(workdir, *arguments):
    """Runs `python -m vit_jax.sweep` of the quickstart."""
    return run_here(QUICKSTART, f'--workdir={workdir}', *arguments, command=command_lib)


def valid_json(text):
    def refuse(name):
        raise AssertionError(f'{name} is not JSON')

    return json.loads(text, parse_constant=refuse)


def pretend(monkeypatch, accuracy):
    """Replaces training by a function from the config to an accuracy.

    Returns:
      A dict for the configs of the runs, by the names of their folders.
    """
    runs = {}

    def run(config, folder):
        runs[os.path.basename(folder)] = config_lib.flatten(config)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
            json.dump({'step': 1, 'eval/accuracy': accuracy(config)}, file)
        return 0

    monkeypatch.setattr(loop, 'train', run)
    return runs
