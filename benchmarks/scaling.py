"""Measures how time and memory grow with image size, patch size, depth, width and batch size.

    python -m benchmarks.scaling --config=configs/vit.py:ti16 --config.batch_size=4 \\
        [--config.model.dtype=float32] [--only=image_size,depth] [--rounds=3] [--seconds=2] \\
        [--out=FILE.png]

The program changes one number of the config at a time. The models for all values of a number
alternate on the same noise, as training steps and as inference. It prints images/s (medians), the
memory of a device by the compiler, and fitted exponents: time per image and memory are proportional
to the number to the power of the exponent. The picture shows time and memory for each number.
"""

import jax
import numpy as np

from benchmarks.choices import workload
from vit_jax import cli, machine
from vit_jax import config as config_lib
from vit_jax.drawing import canvas
from vit_jax.errors import check_choice
from vit_jax.files import check_destination
from vit_jax.measuring import rounds, workloads
from vit_jax.parallel import sharding
from vit_jax.training import device_defaults, resolve

PARTS = ('training', 'inference')
# The values of each number, and a function from a value to fields. Heads have width 64, and the MLP
# is four times as wide as the tokens (table 1).
ROWS = {
    'image_size': ((128, 160, 224, 320, 384, 512), lambda n: {'image_size': (n, n)}),
    'patch_size': ((8, 14, 16, 28, 32), lambda n: {'model.patch_size': (n, n)}),
    'depth': ((2, 4, 8, 12), lambda n: {'model.num_layers': n}),
    'width': (
        (64, 128, 192, 384, 768),
        lambda n: {'model.hidden_size': n, 'model.num_heads': n // 64, 'model.mlp_dim': 4 * n},
    ),
    'batch_size': ((2, 4, 8, 16, 32), lambda n: {'batch_size': n}),
}


def measure(config, row, num_rounds, seconds):
    """Measures a row of ROWS.

    Returns:
      For each value of the number a dict with the seconds per image of each part, under its name,
      and the memory in GB, under '<part> GB'.
    """
    numbers, fields = ROWS[row]
    subjects = {}
    for number in numbers:
        config_of_number = config_lib.changed(config, fields(number))
        for part in PARTS:
            subjects[number, part] = workload(config_of_number, part)
    functions = {key: subject.run for key, subject in subjects.items()}
    timings = rounds.in_turn(functions, num_rounds, seconds)
    results = {number: {} for number in numbers}
    for (number, part), subject in subjects.items():
        results[number][part] = timings[number, part].median / subject.images
        results[number][f'{part} GB'] = subject.about['memory'] / 1e9
    return results


def exponent(numbers, values):
    """Returns the exponent p of the best fit values = c numbers^p, linear in the logarithms."""
    return np.polyfit(np.log(numbers), np.log(values), 1)[0]


def show(row, results):
    """Prints the table of a row."""
    heading = f'{row:12}'
    exponents = f'{"exponent":12}'
    numbers = list(results)
    for part in PARTS:
        heading += f'{part + ", images/s":>22}{"GB":>8}'
        times = [result[part] for result in results.values()]
        memory = [result[f'{part} GB'] for result in results.values()]
        exponents += f'{exponent(numbers, times):22.2f}{exponent(numbers, memory):8.2f}'
    print(f'\n{heading}')
    for number, result in results.items():
        line = f'{number:<12}'
        for part in PARTS:
            line += f'{1 / result[part]:22,.4g}{result[f"{part} GB"]:8.2f}'
        print(line)
    print(exponents, flush=True)


def draw(results_of_rows, title, path):
    """Writes a picture of time per image and memory for each number, with logarithmic axes."""
    figure = canvas.new(5.0, title)
    figure.set_layout_engine('constrained')
    charts = figure.subplots(2, len(results_of_rows), sharex='col', sharey='row', squeeze=False)
    for (time_axes, memory_axes), (row, results) in zip(
        charts.T, results_of_rows.items(), strict=True
    ):
        numbers = list(results)
        for part in PARTS:
            milliseconds = [1e3 * result[part] for result in results.values()]
            memory = [result[f'{part} GB'] for result in results.values()]
            time_axes.plot(numbers, milliseconds, 'o-', ms=3, label=part)
            memory_axes.plot(numbers, memory, 'o-', ms=3)
        for axes in (time_axes, memory_axes):
            axes.set(xscale='log', yscale='log')
            axes.grid(alpha=0.3)
            axes.minorticks_off()
            axes.yaxis.set_major_formatter('{x:g}')
            axes.set_xticks(numbers, list(map(str, numbers)), fontsize=6)
        memory_axes.set_xlabel(row.replace('_', ' '))
    charts[0, 0].set_ylabel('ms per image')
    charts[1, 0].set_ylabel('GB')
    canvas.legend(figure, charts[0, 0])
    figure.savefig(path, dpi=150)


@cli.command
def main(argv=None):
    """Measures, prints and draws."""
    parser = cli.make_parser('scaling', __doc__)
    parser.add_argument(
        '--only', default=','.join(ROWS), metavar='NAME,...', help='numbers to change'
    )
    parser.add_argument('--rounds', type=int, default=3, help='number of rounds')
    parser.add_argument('--seconds', type=float, default=2.0, help='length of a turn in a round')
    parser.add_argument('--out', metavar='FILE.png', help='file of the picture')
    options, config = cli.parse_with_config(parser, argv)
    rounds.check(options)
    if options.out:
        check_destination(options.out, '.png')
    rows = dict.fromkeys(options.only.split(','))
    for row in rows:
        check_choice('--only', row, tuple(ROWS))
    machine.start_backend(device_defaults.host_devices({'': config}))
    mesh = sharding.make_mesh(config.mesh)
    dtype = resolve.for_mesh(workloads.complete(config), mesh).model.dtype
    device = f'{jax.device_count()} x {jax.devices()[0].device_kind}, {dtype}'
    print(f'{config.recipe} on {device}; memory of a device, by the compiler')
    results_of_rows = {}
    for row in rows:
        results_of_rows[row] = measure(config, row, options.rounds, options.seconds)
        show(row, results_of_rows[row])
    if options.out:
        draw(results_of_rows, f'One number changed at a time, {device}', options.out)


if __name__ == '__main__':
    cli.leave(main())
