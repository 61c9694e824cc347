"""Compares the peak memory of a training step, predicted by vit_jax.plan, with a measurement.

    python benchmarks/step_memory.py [--model=s16] [--batch_size=64] [--dtype=float32]

The measurement is the peak resident memory (VmHWM) of a process that trains on one CPU device,
minus its memory before the state is created. The process has as many prefetched batches as in
training. The program needs Linux.
"""

import argparse
import ctypes
import json
import subprocess
import sys

import jax
import numpy as np


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--model', default='s16', help='a name of configs/vit.py')
    parser.add_argument('--batch_size', type=int, default=64, help='number of images in a batch')
    parser.add_argument('--dtype', default='float32', help='model.dtype')
    parser.add_argument('--only', choices=('measure',), help='for the process that measures')
    return parser.parse_args()


def predict(options):
    """Returns the predicted peak in bytes."""
    command = [
        sys.executable,
        '-m',
        'vit_jax.plan',
        f'--config=configs/vit.py:{options.model}',
        '--chip=cpu',
        '--devices=1',
        '--no_search',
        '--json',
        '--config.accum_steps=1',
        f'--config.batch_size={options.batch_size}',
        f'--config.model.dtype={options.dtype}',
    ]
    process = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE)
    if process.returncode:  # the error is on stderr
        raise SystemExit(process.returncode)
    return json.loads(process.stdout.splitlines()[-1])['memory']['peak']


def status(field):
    """Returns the bytes of a field of /proc/self/status."""
    with open('/proc/self/status', encoding='ascii') as file:
        for line in file:
            if line.startswith(field):
                kilobytes = int(line.split()[1])
                return 1024 * kilobytes
    raise ValueError(f'/proc/self/status has no {field}')


def measure(options):
    """Trains, and returns the bytes of this process at the peak and before the state is created."""
    from vit_jax import config as config_lib
    from vit_jax.parallel import feeding, sharding
    from vit_jax.training import resolve
    from vit_jax.training.program import Program

    config = config_lib.base(options.model)
    config.update(batch_size=options.batch_size, accum_steps=1, num_steps=10)
    config.model.update(
        dtype=options.dtype, representation_size=config.model.hidden_size, dropout_rate=0.1
    )
    mesh = sharding.make_mesh(config.mesh)
    config = resolve.with_data(config_lib.checked(config), 1000, 1000)
    program = Program(resolve.for_mesh(config, mesh), mesh)
    step = program.train_step
    rng = np.random.default_rng(0)
    # Returns unused memory of the compilation to the system.
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    before = status('VmRSS')
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')  # resets VmHWM
    state = program.initial_state()

    def random_array(shape):
        return jax.device_put(rng.integers(0, 2, shape.shape).astype(shape.dtype), shape.sharding)

    batches = [
        jax.tree.map(random_array, program.abstract_batch)
        for _ in range(1 + feeding.BATCHES_UNDER_WAY)
    ]
    for batch in batches:
        state, metrics = step(state, batch)
    assert np.isfinite(float(metrics['loss']))
    return status('VmHWM'), before


def main():
    """Prints both numbers and their relative difference."""
    options = parse_options()
    if options.only == 'measure':
        print(json.dumps(measure(options)))
        return
    predicted = predict(options)
    process = subprocess.run(
        [sys.executable, *sys.argv, '--only=measure'], check=True, text=True, stdout=subprocess.PIPE
    )
    peak, before = json.loads(process.stdout)
    measured = peak - before
    gib = 2**30
    print(
        f'{options.model}, batch {options.batch_size}, {options.dtype}: predicted '
        f'{predicted / gib:.3f} GiB, measured {measured / gib:.3f} GiB '
        f'({peak / gib:.3f} of the process, {before / gib:.3f} before the state): '
        f'{predicted / measured - 1:+.1%}'
    )


if __name__ == '__main__':
    main()
