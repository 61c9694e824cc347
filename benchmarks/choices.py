"""Images per second with several values of fields, in one process and in turn.

    python -m benchmarks.choices --config=configs/vit.py:ti16 --config.batch_size=16 \\
        --config.model.unroll=1,12 [--part=inference] [--rounds=5] [--seconds=3]

One or more fields have values with commas between them, as of vit_jax.sweep, and every combination
is timed on the same noise. So are the choices of vit_jax/training/device_defaults.py compared. With
--config.mesh.host_devices=1,2 the CPU is shown as two devices, of which the first one is also used
alone.
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
    """The training step or the inference of a config, on as many devices as it says."""
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
    parser.add_argument('--part', choices=('training', 'inference'), default='training')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=3.0)
    texts, others = grids.separate(sys.argv[1:] if argv is None else argv)
    first = [f'--config.{field}={text.partition(",")[0]}' for field, text in texts.items()]
    options, config = cli.parse_with_config(parser, others + first)
    grid = grids.read(texts, config)
    configs = {
        name_of(member): config_lib.changed(config, member) for member in grids.combinations(grid)
    }
    rounds.check(options)
    trains = options.part == 'training'
    machine.start_backend(
        max(device_defaults.host_devices({'': each}, trains=trains) for each in configs.values())
    )
    subjects = {name: workload(each, options.part) for name, each in configs.items()}
    timings = rounds.in_turn(
        {name: subject.run for name, subject in subjects.items()}, options.rounds, options.seconds
    )
    print(f'{options.part}, images/s: median (slowest - fastest) of {options.rounds} rounds')
    first = None
    for name, timing in timings.items():
        rates = [
            subjects[name].images / seconds
            for seconds in (timing.median, timing.slowest, timing.fastest)
        ]
        median, slowest, fastest = map(report.rate, rates)
        first = first or rates[0]
        print(f'{name:40}{median:>10}  ({slowest} - {fastest}){rates[0] / first:8.2f} times')


if __name__ == '__main__':
    cli.leave(main())
