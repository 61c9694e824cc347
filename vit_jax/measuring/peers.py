"""The same model, batch and optimizer in another project (a peer), timed in its own process."""

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

# The packages that each peer needs.
PEERS = {'timm': ('torch', 'torchvision', 'timm'), 'transformers': ('torch', 'transformers')}
# The values of fields that peers support.
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
    """Starts the process of a peer, which trains and applies its model by PyTorch.

    Args:
      name: a key of PEERS.
      config: a complete config. The peer has its model, image size, batch, loss and optimizer.
      dtype: 'float32', or 'bfloat16' for PyTorch's autocast.
      compiled: whether to use torch.compile.

    Raises:
      UserError: the project is not installed, or it does not support the model.
    """
    check_choice('--peer', name, PEERS)
    for package in PEERS[name]:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f'--peer={name} needs {package}, which is not installed: pip install {package}',
                kind='missing',
                field='--peer',
                value=package,
            )
    return Peer(
        name,
        config,
        ['-m', 'vit_jax.measuring.peer_process'],
        {'peer': name, 'dtype': dtype, 'compiled': compiled},
    )


class Peer:
    """A process that trains or applies a model of another project on request.

    As a context manager it kills the process at the end.
    """

    def __init__(
        self, name: str, config: ConfigDict, program: Sequence[str], settings: Mapping[str, Any]
    ):
        """Starts the process.

        Args:
          name: name of the project.
          config: a complete config.
          program: arguments of Python, such as the path of peer_process.py.
          settings: further values that the process needs.

        Raises:
          UserError: the peer does not support the config.
        """
        unsupported = _unsupported(config)
        if unsupported:
            raise UserError(
                f'--peer={name} supports plain ViTs that learn labels: {"; ".join(unsupported)}.',
                kind='value',
                field='--peer',
                value=name,
            )
        self.name = name
        self._images = config.batch_size
        self._num_prepared = 0
        self._process = subprocess.Popen(
            [sys.executable, *program],
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._send({'config': config.to_dict(), **settings})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def prepare(self, parts: Sequence[str]) -> None:
        """Starts a step of 'train', 'inference' or both, which compiles them, without waiting."""
        for part in parts:
            self._send([part == 'train', 1])
        self._num_prepared = len(parts)

    def wait(self) -> None:
        """Waits until the process is ready and the prepared steps are computed.

        Raises:
          UserError: the process failed.
        """
        for _ in range(self._num_prepared):
            self._receive()
        self.peak_memory()

    def workload(self, training: bool, flops: int) -> Workload:
        """Returns the peer's training step or its inference.

        Args:
          training: whether it is the training step.
          flops: the FLOPs of this project's step, which both projects are credited with.
        """
        return Workload(lambda count: self._request([training, count]), self._images, flops)

    def peak_memory(self) -> int:
        """Returns the peak memory of the process in bytes: of the GPU, or resident."""
        return self._request(None)

    def _request(self, request):
        self._send(request)
        return self._receive()

    def _send(self, value):
        # A process that has ended may still have sent an error, which _receive reads.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(value) + '\n')

    def _receive(self):
        try:
            response = json.loads(self._process.stdout.readline())
        except json.JSONDecodeError:
            raise UserError(
                f'The process of {self.name} ended with exit code {self._process.wait()}. If it '
                'ran out of memory (-9), lower batch_size.',
                kind='resource',
                field='--peer',
                value=self.name,
            ) from None
        if isinstance(response, dict):
            raise UserError(
                f'{self.name} failed: {response["error"]}',
                kind='other',
                field='--peer',
                value=self.name,
            )
        return response


def _unsupported(config):
    """The values of a config that peers do not support, as texts."""
    values = config_lib.flatten(config)
    if 'model.resnet.units' in values:
        return ['the model has a ResNet']
    unsupported = []
    for field, supported_values in VALUES.items():
        if values[field] not in supported_values:
            expected = ' or '.join(map(repr, supported_values))
            unsupported.append(f'{field} is {values[field]!r} (expected {expected})')
    return unsupported
