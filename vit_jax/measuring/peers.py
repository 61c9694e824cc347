"""The same model, batch and optimizer in another project, timed in a process of its own."""

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import UserError, check_choice
from vit_jax.measuring.workloads import Workload

# By peer, the packages that it needs.
PEERS = {'timm': ('torch', 'torchvision', 'timm'), 'transformers': ('torch', 'transformers')}
# The values of these fields that a peer can follow.
VALUES = {
    'model.attention': ('full',),
    'model.pool': ('cls', 'gap'),
    'model.representation_size': (0,),
    'model.num_registers': (0,),
    'model.stem_norm': (False,),
    'model.norm_after_pool': (False,),
    'model.position': ('learned_1d',),
    'model.position_at': ('stem',),
    'masked.target': ('none',),
    'optimizer.name': ('adam', 'sgd'),
    'optimizer.lr_factors': ('',),
    'optimizer.layer_decay': (1.0,),
    'ema_decay': (0.0,),
}


def start(name: str, config: ConfigDict, dtype: str, compiled: bool) -> 'Peer':
    """The peer of one of PEERS, trained and applied by PyTorch.

    Args:
      config: complete; the model, image size, batch, loss and optimizer are the peer's, too.
      dtype: 'float32', or 'bfloat16' for PyTorch's autocast.
      compiled: whether by torch.compile.

    Raises UserError unless the project is installed and has such a model.
    """
    check_choice('--peer', name, PEERS)
    for package in PEERS[name]:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f'--peer={name} needs {package}, which is not installed: pip install {package}'
            )
    return Peer(
        name,
        config,
        ['-m', 'vit_jax.measuring.peer_process'],
        {'peer': name, 'dtype': dtype, 'compiled': compiled},
    )


class Peer:
    """A process that trains or applies a model of another project when it is asked to.

    A context: the process ends with it.
    """

    def __init__(
        self, name: str, config: ConfigDict, program: Sequence[str], settings: Mapping[str, Any]
    ):
        """Raises UserError unless the peer can do the work of the config.

        Args:
          program: what Python runs, as peer_process.py.
          settings: what is said to it besides the config.
        """
        given = config_lib.flatten(config)
        beyond = (
            ['the model has a ResNet']
            if 'model.resnet.units' in given
            else [
                f'{field} is {given[field]!r} (expected {" or ".join(map(repr, values))})'
                for field, values in VALUES.items()
                if given[field] not in values
            ]
        )
        if beyond:
            raise UserError(
                f'--peer={name} is for plain ViTs that learn labels: {"; ".join(beyond)}.'
            )
        self.name, self._images, self._prepared = name, config.batch_size, 0
        self._process = subprocess.Popen(
            [sys.executable, *program],
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._say({'config': config.to_dict(), **settings})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def prepare(self, parts: Sequence[str]) -> None:
        """Lets it compute a step of 'train' and 'inference', or one, while others compile."""
        for part in parts:
            self._say([part == 'train', 1])
        self._prepared = len(parts)

    def wait(self) -> None:
        """Returns once it is ready for its turns, with what it prepares; raises if it fails."""
        for _ in range(self._prepared):
            self._answer()
        self.peak_memory()

    def workload(self, training: bool, flops: int) -> Workload:
        """Its training step, or its inference, with the FLOPs that count for both projects."""
        return Workload(lambda count: self._ask([training, count]), self._images, flops)

    def peak_memory(self) -> int:
        """Bytes that it has had at most: of the GPU, or resident."""
        return self._ask(None)

    def _say(self, value):
        with contextlib.suppress(BrokenPipeError):  # it has ended, and may have said why
            self._process.stdin.write(json.dumps(value) + '\n')

    def _ask(self, question):
        self._say(question)
        return self._answer()

    def _answer(self):
        try:
            answer = json.loads(self._process.stdout.readline())
        except json.JSONDecodeError:
            raise UserError(
                f'the process of {self.name} has ended, with exit code '
                f'{self._process.wait()}. If it ran out of memory (-9), lower '
                'batch_size.'
            ) from None
        if isinstance(answer, dict):
            raise UserError(f'{self.name} failed: {answer["error"]}')
        return answer
