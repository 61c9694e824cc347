"""Plans of docs/lab-notes/plans.md: the command, its seconds and memory, and rows of the tables.

    python benchmarks/planning.py slices [NAME [OPTION...]]  # models on slices of their size
    python benchmarks/planning.py growth   # H/14 on 8 to 512 chips, simulated
    python benchmarks/planning.py sharded  # G/14 on 128 chips, split in several ways

TPU plans need libtpu: pip install -e '.[plan]'.
"""

import json
import os
import subprocess
import sys
import time

JFT = ['--config.dataset.num_examples=303000000', '--config.dataset.num_classes=18291']
REMAT, KEEP = (f'--config.model.remat_policy={policy}' for policy in ('nothing_saveable', 'none'))


def mesh(data, fsdp):
    """The two options."""
    return [f'--config.mesh.data={data}', f'--config.mesh.fsdp={fsdp}']


def plan(config, chip, devices, *options):
    """Runs one plan; its numbers, with `wall` seconds and `rss` bytes of its process."""
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
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(' '.join(command))
    print(out.rpartition('\n{')[0], file=sys.stderr)
    return json.loads(out.splitlines()[-1]) | {
        'wall': time.perf_counter() - start,
        'cpu': usage.ru_utime + usage.ru_stime,
        'rss': usage.ru_maxrss * 1024,
    }


def row(name, p):
    """A row of a table in Markdown."""
    gib, gigabyte = 2**30, 1e9
    m, sent = p['memory'], p['sent_bytes']
    state = m['params'] + m['optimizer']
    kinds = ', '.join(
        f'{kind} {size / gigabyte:.2f}'
        for kind, size in sorted(sent.items())
        if size >= 0.005 * gigabyte
    )
    largest = f'{p["largest_batch"]["batch_size"]:,}' if 'largest_batch' in p else '-'
    s = p['seconds']
    cells = [
        name,
        f'{p["mesh"]["data"]} x {p["mesh"]["fsdp"]}',
        f'{p["batch_size"]:,}',
        *(f'{x / gib:.2f}' for x in (state, m['activations'], m['peak'])),
        largest,
        f'{sum(sent.values()) / gigabyte:.2f} ({kinds})',
        ' / '.join(f'{1e3 * s[k]:.1f}' for k in ('arithmetic', 'memory', 'links')),
        f'{p["mfu_at_most"]:.0%}',
        f'{p["run_seconds"] / 3600:.1f}',
        f'{p["device_days"]:.1f}',
        f'{p["wall"]:.0f} ({p["cpu"]:.0f})',
        f'{p["rss"] / gib:.1f}',
    ]
    return f'| {" | ".join(cells)} |'


def slices(only='', *more):
    """Models on slices that they are trained on; `only` is a part of the row's name."""
    for name, config, chip, devices, options in (
        ('B/16, v5e', 'b16,jft', 'v5e', 8, [*mesh(8, 1), REMAT]),
        ('L/16, v5e', 'l16,jft', 'v5e', 64, [*mesh(4, 16), REMAT]),
        ('H/14, v5p', 'h14,jft', 'v5p', 128, [*mesh(8, 16), KEEP]),
        ('H/14, v5p', 'h14,jft', 'v5p', 256, [*mesh(16, 16), KEEP, '--no-search']),
        ('H/14, v5p', 'h14,jft', 'v5p', 512, [*mesh(32, 16), KEEP, '--no-search']),
        ('G/14, v5p', 'G14,jft', 'v5p', 128, [*mesh(16, 8), REMAT]),
        ('G/14, v5p', 'G14,jft', 'v5p', 256, [*mesh(32, 8), REMAT, '--no-search']),
        ('G/14, v5p', 'G14,jft', 'v5p', 512, [*mesh(64, 8), REMAT, '--no-search']),
    ):
        if only in f'{name} x {devices}':
            print(
                row(f'{name} x {devices}', plan(config, chip, devices, *options, *more)), flush=True
            )


def growth():
    """H/14 with eight images per device on 8 to 512 chips: fsdp over all of them, and over 16."""
    for most in (512, 16):
        for devices in (8, 16, 32, 64, 128, 256, 512):
            fsdp = min(devices, most)
            print(
                row(
                    f'{devices}',
                    plan(
                        'h14,jft',
                        'v5p',
                        devices,
                        KEEP,
                        '--no-search',
                        '--simulate',
                        f'--config.batch_size={8 * devices}',
                        '--config.num_steps=1000000',
                        '--config.num_epochs=0',
                        *mesh(devices // fsdp, fsdp),
                    ),
                ),
                flush=True,
            )


def sharded():
    """G/14 on 128 chips, split in several ways."""
    for fsdp in (1, 8, 16, 32, 128):
        print(
            row(
                f'fsdp {fsdp}',
                plan('G14,jft', 'v5p', 128, '--no-search', REMAT, *mesh(128 // fsdp, fsdp)),
            ),
            flush=True,
        )


if __name__ == '__main__':
    {'slices': slices, 'growth': growth, 'sharded': sharded}[sys.argv[1]](*sys.argv[2:])
