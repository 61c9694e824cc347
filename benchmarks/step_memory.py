"""Peak memory of training steps on this machine, predicted by vit_jax.plan and measured.

    python benchmarks/step_memory.py [--model=s16] [--batch_size=64] [--dtype=float32]

The measured figure is the peak resident memory of a process (VmHWM) that trains on one CPU device,
minus what it had before it made the state; the batches under way are made as in training. Linux.
"""

import argparse
import json
import subprocess
import sys

import jax
import numpy as np


def options():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--model', default='s16')
    parser.add_argument('--batch_size', type=int, default=64)
    parser.add_argument('--dtype', default='float32')
    parser.add_argument('--only', choices=('predict', 'measure'), help='used by itself')
    return parser.parse_args()


def predict(given):
    """Bytes of the peak."""
    command = [
        sys.executable,
        '-m',
        'vit_jax.plan',
        f'--config=configs/vit.py:{given.model}',
        '--chip=cpu',
        '--devices=1',
        '--no-search',
        '--json',
        '--config.accum_steps=1',
        f'--config.batch_size={given.batch_size}',
        f'--config.model.dtype={given.dtype}',
    ]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE)
    if done.returncode:  # it has said why
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])['memory']['peak']


def status(field):
    """Bytes of a field of /proc/self/status."""
    with open('/proc/self/status', encoding='ascii') as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def measure(given):
    """(peak, before) bytes of this process."""
    from vit_jax import config as config_lib
    from vit_jax.parallel import feeding, sharding
    from vit_jax.training import resolve
    from vit_jax.training.program import Program

    config = config_lib.base(given.model)
    config.update(batch_size=given.batch_size, accum_steps=1, num_steps=10)
    config.model.update(
        dtype=given.dtype, representation_size=config.model.hidden_size, dropout_rate=0.1
    )
    mesh = sharding.make_mesh(config.mesh)
    config = resolve.with_data(resolve.checked(config), 1000, 1000)
    program = Program(resolve.for_mesh(config, mesh), mesh)
    step = program.train_step
    rng = np.random.default_rng(0)
    # Compilation leaves memory to the allocator that is not in use: it goes back first.
    import ctypes

    ctypes.CDLL('libc.so.6').malloc_trim(0)
    before = status('VmRSS')
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')  # VmHWM starts again
    state = program.initial_state()
    batches = [
        jax.tree.map(
            lambda x: jax.device_put(rng.integers(0, 2, x.shape).astype(x.dtype), x.sharding),
            program.abstract_batch,
        )
        for _ in range(1 + feeding.BATCHES_UNDER_WAY)
    ]
    for batch in batches:
        state, values = step(state, batch)
    assert np.isfinite(float(values['loss']))
    return status('VmHWM'), before


def main():
    """Prints both and their ratio."""
    given = options()
    if given.only == 'measure':
        print(json.dumps(measure(given)))
        return
    predicted = predict(given)
    out = subprocess.run(
        [sys.executable, *sys.argv, '--only=measure'], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    peak, before = json.loads(out)
    gib = 2**30
    print(
        f'{given.model}, batch {given.batch_size}, {given.dtype}: predicted '
        f'{predicted / gib:.3f} GiB, measured {(peak - before) / gib:.3f} GiB '
        f'({peak / gib:.3f} of the process, {before / gib:.3f} before the state): '
        f'{predicted / (peak - before) - 1:+.1%}'
    )


if __name__ == '__main__':
    main()
