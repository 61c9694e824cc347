"""Trackers with fake clients, which record their input and refuse bad input as real clients do."""

import json
import sys
import types

import pytest

from tests.support.errors import refused
from tests.support.runs import TINY, check_message
from vit_jax import config as config_lib
from vit_jax.workdir import metrics
from vit_jax.workdir.trackers import Trackers, require

BOTH = ('wandb', 'mlflow')


class Wandb(types.ModuleType):
    """Fake wandb: init returns a run with id, log and finish."""

    def __init__(self):
        super().__init__('wandb')
        self.runs = {}

    def init(self, *, id, resume, name, dir, config, allow_val_change):  # noqa: A002 - its names
        assert resume == ('allow' if id else None)
        assert allow_val_change
        assert name == '/'.join(dir.split('/')[-2:])
        run = self.runs.setdefault(id or f'w{len(self.runs)}', types.SimpleNamespace(rows=[]))
        (run.id,) = (key for key, value in self.runs.items() if value is run)
        run.config = config
        run.code = None
        run.log = lambda values, *, step: run.rows.append({'step': step, **values})
        run.finish = lambda exit_code: setattr(run, 'code', exit_code)
        return run


class Mlflow(types.ModuleType):
    """Fake mlflow: functions that act on the only active run."""

    def __init__(self):
        super().__init__('mlflow')
        self.runs = {}
        self.active = None

    def start_run(self, *, run_id, run_name):
        assert self.active is None, 'Run is already active'
        self.active = run_id or f'm{len(self.runs)}'
        if self.active not in self.runs:
            self.runs[self.active] = types.SimpleNamespace(rows=[], params={}, title=run_name)
        self.runs[self.active].status = 'RUNNING'
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=self.active))

    def log_params(self, params):
        assert not self.runs[self.active].params, 'parameters cannot be changed'
        self.runs[self.active].params = params

    def log_metrics(self, values, *, step):
        self.runs[self.active].rows.append({'step': step, **values})

    def end_run(self, status):
        self.runs[self.active].status = status
        self.active = None


@pytest.fixture
def clients(monkeypatch):
    """The fake clients, in sys.modules."""
    fakes = types.SimpleNamespace(wandb=Wandb(), mlflow=Mlflow())
    for name in BOTH:
        monkeypatch.setitem(sys.modules, name, getattr(fakes, name))
    return fakes


CONFIG = config_lib.base()


def test_both_trackers_receive_every_row_and_resume_their_runs(clients, tmp_path):
    for step, complete in ((1, False), (2, True)):
        trackers = Trackers(BOTH, str(tmp_path), CONFIG)
        trackers.write(step, {'train/loss': 0.5})
        trackers.close(complete)
        trackers.close(complete=False)  # has no effect
    (wandb_run,) = clients.wandb.runs.values()
    (mlflow_run,) = clients.mlflow.runs.values()
    rows = [{'step': step, 'train/loss': 0.5} for step in (1, 2)]
    assert wandb_run.rows == mlflow_run.rows == rows
    assert wandb_run.config == mlflow_run.params == config_lib.flatten(CONFIG)
    assert mlflow_run.params['optimizer.learning_rate'] == CONFIG.optimizer.learning_rate
    assert wandb_run.code == 0
    assert mlflow_run.status == 'FINISHED'
    assert json.loads((tmp_path / 'trackers.json').read_text()) == {'wandb': 'w0', 'mlflow': 'm0'}


def test_without_trackers_nothing_is_imported_or_written(monkeypatch, tmp_path):
    for name in BOTH:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    require(())
    Trackers((), str(tmp_path), CONFIG).write(1, {'train/loss': 0.5})
    assert not list(tmp_path.iterdir())


def test_tracker_that_fails_during_training_is_one_warning(clients, tmp_path, caplog):
    def fail(values, *, step):
        raise ConnectionError('no route to host\nand more')

    trackers = Trackers(BOTH, str(tmp_path), CONFIG)
    (wandb_run,) = clients.wandb.runs.values()
    wandb_run.log = fail
    for step in (1, 2, 3):
        trackers.write(step, {'train/loss': 0.5})
    trackers.close(complete=True)
    assert caplog.text.count('wandb has failed (no route to host): the run continues without') == 1
    assert [row['step'] for row in clients.mlflow.runs['m0'].rows] == [1, 2, 3]


def test_tracker_that_cannot_start_a_run_is_an_error(clients, monkeypatch, tmp_path):
    def fail(**_):
        raise RuntimeError('no API key')

    monkeypatch.setattr(clients.mlflow, 'start_run', fail)
    with refused(kind='resource', field='trackers', value='mlflow') as error:
        Trackers(BOTH, str(tmp_path), CONFIG)
    assert str(error.value).startswith('mlflow cannot start a run (no API key). Fix the cause')
    assert clients.wandb.runs['w0'].code == 1
    assert not (tmp_path / 'trackers.json').exists()


@pytest.mark.parametrize('name', BOTH)
def test_missing_client_is_refused(name, monkeypatch, run_main, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    check_message(
        run_main(tmp_path, fields={'trackers': name}),
        f"error: trackers contains '{name}', and its client cannot be imported",
    )
    assert f'pip install {name}' in (tmp_path / 'train.log').read_text()
    assert not (tmp_path / 'checkpoints').exists()


def test_unknown_tracker_is_refused(run_main, tmp_path):
    result = run_main(tmp_path, fields={'trackers': 'wandb,neptune'})
    check_message(result, "'neptune'")
    check_message(result, 'expected wandb, mlflow, or both with a comma between them')


@pytest.mark.slow
def test_trackers_receive_the_rows_of_metrics_jsonl(clients, run_main, tmp_path):
    """An extended run resumes its tracker runs; a complete run starts none."""
    for num_steps in (2, 4, 4):
        fields = TINY | {
            'num_steps': num_steps,
            'eval_every': 2,
            'trackers': 'wandb,mlflow',
            'optimizer.warmup_steps': 1,
        }
        result = run_main(tmp_path, fields=fields)
        assert result.returncode == 0, result.stderr
    wandb_run = clients.wandb.runs['w0']
    mlflow_run = clients.mlflow.runs['m0']
    assert wandb_run.rows == mlflow_run.rows == metrics.read(str(tmp_path))
    assert len(wandb_run.rows) == 6
    assert mlflow_run.params['dataset.num_classes'] == 10  # a fact of the data
    assert len(clients.wandb.runs) == 1
    assert len(clients.mlflow.runs) == 1
