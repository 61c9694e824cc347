"""Sends the rows of metrics.jsonl to experiment trackers through their own clients."""

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.files import read_json, write_json
from vit_jax.processes import consensus
from vit_jax.workdir.checkpoint import first_line

log = logging.getLogger(__name__)

FILE = 'trackers.json'  # the name of the run for each tracker


class _Wandb:
    """A run of Weights & Biases. The WANDB_* variables select project, entity and mode."""

    def __init__(self, client, run, title, workdir, config):
        self._run = client.init(
            id=run,
            resume='allow' if run else None,
            name=title,
            dir=workdir,
            config=config,
            allow_val_change=True,
        )
        self.name = self._run.id

    def write(self, step, values):
        self._run.log(values, step=step)

    def close(self, complete):
        self._run.finish(exit_code=int(not complete))


class _Mlflow:
    """A run of MLflow. The MLFLOW_* variables select server and experiment."""

    def __init__(self, client, run, title, workdir, config):
        del workdir
        self._client = client
        self.name = client.start_run(run_id=run, run_name=title).info.run_id
        if run is None:  # MLflow does not allow changes of the parameters of a resumed run
            client.log_params(config)

    def write(self, step, values):
        self._client.log_metrics(values, step=step)

    def close(self, complete):
        self._client.end_run('FINISHED' if complete else 'KILLED')


KINDS = {'wandb': _Wandb, 'mlflow': _Mlflow}


def require(names: Sequence[str]) -> None:
    """Raises UserError, on all processes, unless process 0 can import the clients."""

    def require_here():
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise UserError(
                    f'trackers contains {name!r}, and its client cannot be imported '
                    f'({error}): pip install {name}, or remove it from --config.trackers.',
                    kind='missing',
                    field='trackers',
                    value=name,
                ) from error

    consensus.from_main(require_here)


class Trackers:
    """The tracker runs of a training run, on process 0 only.

    WORKDIR/trackers.json records their names, so that a resumed run continues them. If a tracker
    fails after the start, a warning reports it and training continues without that tracker.
    """

    def __init__(self, names: Sequence[str], workdir: str, config: Mapping[str, Any]):
        """Starts or resumes a run of each tracker.

        Args:
          names: the trackers, keys of KINDS.
          workdir: the directory of the run.
          config: the complete config of the run.

        Raises:
          UserError: a tracker cannot start a run.
        """
        self._runs: dict[str, _Wandb | _Mlflow] = {}
        if names:
            consensus.from_main(lambda: self._begin(names, workdir, config))

    def _begin(self, names, workdir, config):
        path = os.path.join(workdir, FILE)
        known = read_json(path, dict) if os.path.exists(path) else {}
        title = '/'.join(os.path.abspath(workdir).split(os.sep)[-2:])
        for name in names:
            try:
                self._runs[name] = KINDS[name](
                    importlib.import_module(name),
                    known.get(name),
                    title,
                    os.path.abspath(workdir),
                    config_lib.flatten(config),
                )
            except Exception as error:  # clients raise many kinds
                self.close(complete=False)
                raise UserError(
                    f'{name} cannot start a run ({first_line(error)}). Fix the cause, for example '
                    f'with the environment variables of {name}, or remove {name} from '
                    f'--config.trackers. To start new runs of all trackers, remove {path}.',
                    kind='resource',
                    field='trackers',
                    value=name,
                ) from error
            known[name] = self._runs[name].name
        write_json(path, known)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row with the names of metrics.jsonl."""
        for name in list(self._runs):
            self._try(name, 'write', step, {key: float(value) for key, value in values.items()})

    def close(self, complete: bool) -> None:
        """Ends the runs.

        Args:
          complete: whether the run is complete; False after a signal or an error.
        """
        for name in list(self._runs):
            self._try(name, 'close', complete)
        self._runs = {}

    def _try(self, name, action, *args):
        try:
            getattr(self._runs[name], action)(*args)
        except Exception as error:  # clients raise many kinds
            del self._runs[name]
            log.warning('%s has failed (%s): the run continues without it', name, first_line(error))
