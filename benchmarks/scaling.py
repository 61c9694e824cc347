"""How time and memory grow with image size, patch size, depth, width and batch size.

    python -m benchmarks.scaling --config=configs/vit.py:ti16 --config.batch_size=4 \\
        [--config.model.dtype=float32] [--only=image_size,depth] [--rounds=3] [--seconds=2] \\
        [--out=FILE.png]

From the model of the config on, one number at a time is changed; the models of a row of numbers are
timed in turn on the same noise, as training steps and as inference. Prints images/s (medians),
memory of a device by the compiler, and fitted exponents: time per image, and memory, grow with the
number to that power. The picture has both against each number.
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
# What is changed, and the fields that this means. Heads stay 64 wide and MLPs four times as wide as
# the tokens (table 1).
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
    """{number: {part: seconds per image, part + ' GB': memory}} of a name in ROWS."""
    numbers, fields = ROWS[row]
    subjects = {
        (number, part): workload(config_lib.changed(config, fields(number)), part)
        for number in numbers
        for part in PARTS
    }
    timings = rounds.in_turn({key: each.run for key, each in subjects.items()}, num_rounds, seconds)
    found = {number: {} for number in numbers}
    for (number, part), subject in subjects.items():
        found[number][part] = timings[number, part].median / subject.images
        found[number][f'{part} GB'] = subject.about['memory'] / 1e9
    return found


def exponent(numbers, values):
    """Of the power of the numbers that fits the values best, as a straight line of logarithms."""
    return np.polyfit(np.log(numbers), np.log(values), 1)[0]


def show(row, found):
    """Prints the table of a row."""
    print(f'\n{row:12}' + ''.join(f'{part + ", images/s":>22}{"GB":>8}' for part in PARTS))
    for number, values in found.items():
        print(
            f'{number:<12}'
            + ''.join(f'{1 / values[part]:22,.4g}{values[part + " GB"]:8.2f}' for part in PARTS)
        )
    numbers = list(found)
    print(
        f'{"exponent":12}'
        + ''.join(
            f'{exponent(numbers, [each[part] for each in found.values()]):22.2f}'
            f'{exponent(numbers, [each[part + " GB"] for each in found.values()]):8.2f}'
            for part in PARTS
        ),
        flush=True,
    )


def draw(found, title, path):
    """Writes the picture: time per image and memory against each number, all axes logarithmic."""
    figure = canvas.new(5.0, title)
    figure.set_layout_engine('constrained')
    charts = figure.subplots(2, len(found), sharex='col', sharey='row', squeeze=False)
    for (time, memory), (row, values) in zip(charts.T, found.items(), strict=True):
        for part in PARTS:
            time.plot(
                list(values), [1e3 * each[part] for each in values.values()], 'o-', ms=3, label=part
            )
            memory.plot(list(values), [each[f'{part} GB'] for each in values.values()], 'o-', ms=3)
        for axes in (time, memory):
            axes.set(xscale='log', yscale='log')
            axes.grid(alpha=0.3)
            axes.minorticks_off()
            axes.yaxis.set_major_formatter('{x:g}')
            axes.set_xticks(list(values), list(map(str, values)), fontsize=6)
        memory.set_xlabel(row.replace('_', ' '))
    charts[0, 0].set_ylabel('ms per image')
    charts[1, 0].set_ylabel('GB')
    canvas.legend(figure, charts[0, 0])
    figure.savefig(path, dpi=150)


@cli.command
def main(argv=None):
    """Measures, prints and draws."""
    parser = cli.make_parser('scaling', __doc__)
    parser.add_argument('--only', default=','.join(ROWS), metavar='NAME,...')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--seconds', type=float, default=2.0)
    parser.add_argument('--out', metavar='FILE.png')
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
    found = {}
    for row in rows:
        found[row] = measure(config, row, options.rounds, options.seconds)
        show(row, found[row])
    if options.out:
        draw(found, f'One number changed at a time, {device}', options.out)


if __name__ == '__main__':
    cli.leave(main())
