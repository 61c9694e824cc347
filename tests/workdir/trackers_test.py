"""What trackers get, by fakes of their clients that keep it and refuse what the clients refuse."""

import json
import sys
import types

import pytest

from tests.support.runs import TINY, check_message
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.workdir import metrics
from vit_jax.workdir.trackers import Trackers, require

BOTH = ('wandb', 'mlflow')


class Wandb(types.ModuleType):
    """wandb.init -> a run with id, log and finish."""

    def __init__(self):
        super().__init__('wandb')
        self.runs = {}

    def init(self, *, id, resume, name, dir, config, allow_val_change):  # noqa: A002 - its names
        assert resume == ('allow' if id else None)
        assert allow_val_change
        assert name == '/'.join(dir.split('/')[-2:])
        run = self.runs.setdefault(id or f'w{len(self.runs)}', types.SimpleNamespace(rows=[]))
        (run.id,) = (key for key, value in self.runs.items() if value is run)
        run.config, run.code = config, None
        run.log = lambda values, *, step: run.rows.append({'step': step, **values})
        run.finish = lambda exit_code: setattr(run, 'code', exit_code)
        return run


class Mlflow(types.ModuleType):
    """The fluent functions of mlflow, of which one run is active."""

    def __init__(self):
        super().__init__('mlflow')
        self.runs, self.active = {}, None

    def start_run(self, *, run_id, run_name):
        assert self.active is None, 'Run is already active'
        self.active = run_id or f'm{len(self.runs)}'
        self.runs.setdefault(
            self.active, types.SimpleNamespace(rows=[], params={}, title=run_name)
        ).status = 'RUNNING'
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=self.active))

    def log_params(self, params):
        assert not self.runs[self.active].params, 'parameters cannot be changed'
        self.runs[self.active].params = params

    def log_metrics(self, values, *, step):
        self.runs[self.active].rows.append({'step': step, **values})

    def end_run(self, status):
        self.runs[self.active].status, self.active = status, None


@pytest.fixture
def clients(monkeypatch):
    """The fakes, where the clients would be imported from."""
    fakes = types.SimpleNamespace(wandb=Wandb(), mlflow=Mlflow())
    for name in BOTH:
        monkeypatch.setitem(sys.modules, name, getattr(fakes, name))
    return fakes


CONFIG = config_lib.base()


def test_both_get_every_row_and_a_run_goes_on(clients, tmp_path):
    for begin, complete in ((1, False), (2, True)):
        opened = Trackers(BOTH, str(tmp_path), CONFIG)
        opened.write(begin, {'train/loss': 0.5})
        opened.close(complete)
        opened.close(complete=False)  # has nothing to close
    (run,) = clients.wandb.runs.values()
    (other,) = clients.mlflow.runs.values()
    assert run.rows == other.rows == [{'step': step, 'train/loss': 0.5} for step in (1, 2)]
    assert run.config == other.params == config_lib.flatten(CONFIG)
    assert other.params['optimizer.learning_rate'] == CONFIG.optimizer.learning_rate
    assert (run.code, other.status) == (0, 'FINISHED')
    assert json.loads((tmp_path / 'trackers.json').read_text()) == {'wandb': 'w0', 'mlflow': 'm0'}


def test_without_trackers_nothing_is_imported_or_written(monkeypatch, tmp_path):
    for name in BOTH:
        monkeypatch.setitem(sys.modules, name, None)  # it cannot be imported
    require(())
    Trackers((), str(tmp_path), CONFIG).write(1, {'train/loss': 0.5})
    assert not list(tmp_path.iterdir())


def test_an_error_in_between_is_said_once(clients, tmp_path, caplog):
    def refuse(values, *, step):
        raise ConnectionError('no route to host\nand more')

    opened = Trackers(BOTH, str(tmp_path), CONFIG)
    (monkey,) = clients.wandb.runs.values()
    monkey.log = refuse
    for step in (1, 2, 3):
        opened.write(step, {'train/loss': 0.5})
    opened.close(complete=True)
    assert caplog.text.count('wandb has failed (no route to host): the run goes on without') == 1
    assert [row['step'] for row in clients.mlflow.runs['m0'].rows] == [1, 2, 3]


def test_an_error_at_the_beginning(clients, monkeypatch, tmp_path):
    def refuse(**_):
        raise RuntimeError('no API key')

    monkeypatch.setattr(clients.mlflow, 'start_run', refuse)
    with pytest.raises(UserError, match=r'mlflow cannot begin a run \(no API key\). Mend what'):
        Trackers(BOTH, str(tmp_path), CONFIG)
    assert clients.wandb.runs['w0'].code == 1
    assert not (tmp_path / 'trackers.json').exists()


@pytest.mark.parametrize('name', BOTH)
def test_a_client_that_is_missing(name, monkeypatch, run_main, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    check_message(
        run_main(tmp_path, fields={'trackers': name}),
        f"error: trackers has '{name}', whose client cannot be imported",
    )
    assert f'pip install {name}' in (tmp_path / 'train.log').read_text()
    assert not (tmp_path / 'checkpoints').exists()


def test_another_name(run_main, tmp_path):
    result = run_main(tmp_path, fields={'trackers': 'wandb,neptune'})
    check_message(result, "'neptune'")
    check_message(result, 'expected wandb, mlflow, or both with a comma between them')


@pytest.mark.slow
def test_a_run_and_its_metrics_say_the_same(clients, run_main, tmp_path):
    """Also of a run that is extended, and one that is complete begins none."""
    for num_steps in (2, 4, 4):
        fields = TINY | {
            'num_steps': num_steps,
            'eval_every': 2,
            'trackers': 'wandb,mlflow',
            'optimizer.warmup_steps': 1,
        }
        result = run_main(tmp_path, fields=fields)
        assert result.returncode == 0, result.stderr
    run, other = clients.wandb.runs['w0'], clients.mlflow.runs['m0']
    assert run.rows == other.rows == metrics.read(str(tmp_path))
    assert len(run.rows) == 6
    assert other.params['dataset.num_classes'] == 10  # which the data decides
    assert (len(clients.wandb.runs), len(clients.mlflow.runs)) == (1, 1)
