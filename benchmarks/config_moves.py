"""Count how often the config moves between files from `loop.train` to the first training step.

A move is a call from one file of vit_jax/ into another that passes the config, or the return from
such a call, which is a move back up. Few moves make the way of the config easy to follow.

    python -m benchmarks.config_moves

It prints each move into a file, indented by its depth, and the two counts. To count in another
version of the project, run this file with that version on PYTHONPATH.
"""

import os
import sys
import tempfile

from ml_collections import ConfigDict, FrozenConfigDict

import vit_jax
from vit_jax import cli
from vit_jax.training import loop

PACKAGE = os.path.dirname(os.path.abspath(vit_jax.__file__)) + os.sep
OPTIONS = [
    '--config=configs/quickstart.py',
    '--config.num_steps=1',
    '--config.num_epochs=0',
    '--config.optimizer.warmup_steps=0',
    '--config.report=False',
]


def is_config(value: object) -> bool:
    """Whether a value is the config of a run, and not a part of it."""
    return isinstance(value, ConfigDict | FrozenConfigDict) and 'dataset' in value


class Moves:
    """A profile function that records the moves of the config between files."""

    def __init__(self):
        self.depth = 0
        self.down: list[str] = []
        self.back_up = 0
        self.inside: set[int] = set()  # frames of calls that were moves

    def __call__(self, frame, event, _):
        """Follow one event of `sys.setprofile`."""
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return
        if event == 'call' and self._is_move(frame, file):
            name = f'{file.removeprefix(PACKAGE)}:{frame.f_code.co_name}'
            self.down.append('    ' * self.depth + name)
            self.inside.add(id(frame))
            self.depth += 1
            if frame.f_code.co_name == 'train_step':
                sys.setprofile(None)
        elif event == 'return' and id(frame) in self.inside:
            self.inside.remove(id(frame))
            self.depth -= 1
            self.back_up += 1

    def _is_move(self, frame, file):
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename == file:
            return False
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(is_config(frame.f_locals.get(name)) for name in arguments)


def main():
    """Count and print."""
    config = cli.read_config(OPTIONS)
    moves = Moves()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(moves)
        loop.train(config, folder)
        sys.setprofile(None)
    print('\n'.join(moves.down))
    count = len(moves.down) + moves.back_up
    print(f'{count} moves between files, {moves.back_up} of them back up')


if __name__ == '__main__':
    main()
