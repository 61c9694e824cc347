"""Compares images per second for several values of fields, in one process.

    python -m benchmarks.choices --config=configs/vit.py:ti16 --config.batch_size=16 \\
        --config.model.unroll=1,12 [--part=inference] [--rounds=5] [--seconds=3]

One or more fields have values with commas between them, like in vit_jax.sweep. Every combination is
timed on the same noise, and combinations alternate. The choices of
vit_jax/training/device_defaults.py were compared with this program. With
--config.mesh.host_devices=1,2 the CPU is shown as two devices, and the value 1 uses the first one.
"""

import sys

import jax

from vit_jax import cli, machine
from vit_jax import config as config_lib
from vit_jax.campaigns import grids
from vit_jax.campaigns.outcome import name_of
from vit_jax.measuring import report, rounds, workloads
from vit_jax.parallel import sharding
from vit_jax.training import accumulation, device_defaults, resolve
from vit_jax.training.program import Program


def workload(config, part):
    """Returns the training step or the inference of a config, on mesh.host_devices devices."""
    complete = workloads.complete(config)
    devices = jax.devices()[: complete.mesh.host_devices or None]
    mesh = sharding.make_mesh(complete.mesh, devices)
    complete = resolve.for_mesh(complete, mesh)
    program = Program(complete, mesh)
    if not complete.accum_steps:
        program = accumulation.choose(program)
    return getattr(workloads, part)(program)


@cli.command
def main(argv=None):
    """Prints medians, slowest and fastest rounds, and ratios to the first combination."""
    parser = cli.make_parser('choices', __doc__)
    parser.add_argument(
        '--part', choices=('training', 'inference'), default='training', help='the part to time'
    )
    parser.add_argument('--rounds', type=int, default=5, help='number of rounds')
    parser.add_argument('--seconds', type=float, default=3.0, help='length of a turn in a round')
    texts, other_arguments = grids.separate(sys.argv[1:] if argv is None else argv)
    first_values = [f'--config.{field}={text.partition(",")[0]}' for field, text in texts.items()]
    options, config = cli.parse_with_config(parser, other_arguments + first_values)
    grid = grids.read(texts, config)
    configs = {
        name_of(changes): config_lib.changed(config, changes)
        for changes in grids.combinations(grid)
    }
    rounds.check(options)
    trains = options.part == 'training'
    host_devices = [
        device_defaults.host_devices({'': config}, trains=trains) for config in configs.values()
    ]
    machine.start_backend(max(host_devices))
    subjects = {name: workload(config, options.part) for name, config in configs.items()}
    functions = {name: subject.run for name, subject in subjects.items()}
    timings = rounds.in_turn(functions, options.rounds, options.seconds)
    print(f'{options.part}, images/s: median (slowest - fastest) of {options.rounds} rounds')
    first_rate = None
    for name, timing in timings.items():
        images = subjects[name].images
        rate = images / timing.median
        if first_rate is None:
            first_rate = rate
        median = report.rate(rate)
        slowest = report.rate(images / timing.slowest)
        fastest = report.rate(images / timing.fastest)
        print(f'{name:40}{median:>10}  ({slowest} - {fastest}){rate / first_rate:8.2f} times')


if __name__ == '__main__':
    cli.leave(main())
