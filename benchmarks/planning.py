"""Makes the plans of docs/lab-notes/plans.md, and prints the rows of its tables.

    python benchmarks/planning.py slices [NAME [OPTION...]]  # models on slices of their size
    python benchmarks/planning.py growth   # H/14 on 8 to 512 simulated chips
    python benchmarks/planning.py sharded  # G/14 on 128 chips, with several values of mesh.fsdp

Each row has the seconds and the peak memory of the plan itself. Plans for TPUs need libtpu:
pip install -e '.[plan]'.
"""

import json
import os
import subprocess
import sys
import time

GIB = 2**30
GB = 1e9

JFT = ['--config.dataset.num_examples=303000000', '--config.dataset.num_classes=18291']
REMAT = '--config.model.remat_policy=nothing_saveable'
KEEP = '--config.model.remat_policy=none'


def mesh(data, fsdp):
    """Returns the options of a mesh."""
    return [f'--config.mesh.data={data}', f'--config.mesh.fsdp={fsdp}']


# Name, config, chip, number of chips and options of the plans of `slices`.
SLICES = (
    ('B/16, v5e', 'b16,jft', 'v5e', 8, [*mesh(8, 1), REMAT]),
    ('L/16, v5e', 'l16,jft', 'v5e', 64, [*mesh(4, 16), REMAT]),
    ('H/14, v5p', 'h14,jft', 'v5p', 128, [*mesh(8, 16), KEEP]),
    ('H/14, v5p', 'h14,jft', 'v5p', 256, [*mesh(16, 16), KEEP, '--no_search']),
    ('H/14, v5p', 'h14,jft', 'v5p', 512, [*mesh(32, 16), KEEP, '--no_search']),
    ('G/14, v5p', 'G14,jft', 'v5p', 128, [*mesh(16, 8), REMAT]),
    ('G/14, v5p', 'G14,jft', 'v5p', 256, [*mesh(32, 8), REMAT, '--no_search']),
    ('G/14, v5p', 'G14,jft', 'v5p', 512, [*mesh(64, 8), REMAT, '--no_search']),
)


def plan(config, chip, devices, *options):
    """Runs vit_jax.plan; returns its numbers, with `wall` and `cpu` seconds and `rss` bytes."""
    command = [
        sys.executable,
        '-m',
        'vit_jax.plan',
        f'--config=configs/vit.py:{config}',
        f'--chip={chip}',
        f'--devices={devices}',
        '--json',
        *JFT,
        *options,
    ]
    print(' '.join(command[1:]), file=sys.stderr)
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f'The command failed: {" ".join(command)}')
    print(output.rpartition('\n{')[0], file=sys.stderr)
    return json.loads(output.splitlines()[-1]) | {
        'wall': time.perf_counter() - start,
        'cpu': usage.ru_utime + usage.ru_stime,
        'rss': usage.ru_maxrss * 1024,
    }


def print_row(name, numbers):
    """Prints a row of a table in Markdown."""
    memory = numbers['memory']
    state = memory['params'] + memory['optimizer']
    largest = '-'
    if 'largest_batch' in numbers:
        largest = f'{numbers["largest_batch"]["batch_size"]:,}'
    seconds = numbers['seconds']
    times = [1e3 * seconds[part] for part in ('arithmetic', 'memory', 'links')]
    cells = [
        name,
        f'{numbers["mesh"]["data"]} x {numbers["mesh"]["fsdp"]}',
        f'{numbers["batch_size"]:,}',
        f'{state / GIB:.2f}',
        f'{memory["activations"] / GIB:.2f}',
        f'{memory["peak"] / GIB:.2f}',
        largest,
        sent(numbers['sent_bytes']),
        ' / '.join(f'{time:.1f}' for time in times),
        f'{numbers["mfu_at_most"]:.0%}',
        f'{numbers["run_seconds"] / 3600:.1f}',
        f'{numbers["device_days"]:.1f}',
        f'{numbers["wall"]:.0f} ({numbers["cpu"]:.0f})',
        f'{numbers["rss"] / GIB:.1f}',
    ]
    print(f'| {" | ".join(cells)} |', flush=True)


def sent(sent_bytes):
    """Returns the GB sent per step, with the kinds of collectives of 0.005 GB or more."""
    kinds = [
        f'{kind} {size / GB:.2f}' for kind, size in sorted(sent_bytes.items()) if size >= 0.005 * GB
    ]
    return f'{sum(sent_bytes.values()) / GB:.2f} ({", ".join(kinds)})'


def slices(only='', *further_options):
    """Plans models on slices for their training; `only` is a part of a row's name."""
    for name, config, chip, devices, options in SLICES:
        row_name = f'{name} x {devices}'
        if only in row_name:
            print_row(row_name, plan(config, chip, devices, *options, *further_options))


def growth():
    """Plans H/14 on 8 to 512 chips, 8 images per device, with fsdp over all chips and over 16."""
    for largest_fsdp in (512, 16):
        for devices in (8, 16, 32, 64, 128, 256, 512):
            fsdp = min(devices, largest_fsdp)
            options = [
                KEEP,
                '--no_search',
                '--simulate',
                f'--config.batch_size={8 * devices}',
                '--config.num_steps=1000000',
                '--config.num_epochs=0',
                *mesh(devices // fsdp, fsdp),
            ]
            print_row(f'{devices}', plan('h14,jft', 'v5p', devices, *options))


def sharded():
    """Plans G/14 on 128 chips with several values of mesh.fsdp."""
    for fsdp in (1, 8, 16, 32, 128):
        options = ['--no_search', REMAT, *mesh(128 // fsdp, fsdp)]
        print_row(f'fsdp {fsdp}', plan('G14,jft', 'v5p', 128, *options))


if __name__ == '__main__':
    {'slices': slices, 'growth': growth, 'sharded': sharded}[sys.argv[1]](*sys.argv[2:])
