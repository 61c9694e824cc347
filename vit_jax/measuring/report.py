"""The results of a benchmark, as JSON has them and as a table."""

import platform
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax.measuring.rounds import Timing
from vit_jax.measuring.workloads import Workload
from vit_jax.models import variants
from vit_jax.training import chips
from vit_jax.training.program import Program
from vit_jax.workdir import progress


def make(
    program: Program,
    subjects: Mapping[str, Workload],
    timings: Mapping[str, Timing],
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Everything that is known, in JSON's types: rates per second, times in seconds, bytes.

    For every subject: images_per_second, of the slowest and the fastest round, too, seconds of a
    step, FLOP/s and their shares of those of the matrix product and of the data sheet.
    """
    config, device = program.config, jax.devices()[0]
    ceiling = subjects['matmul'].flops / timings['matmul'].median
    sheet = chips.peak_flops(device.device_kind)
    found = {}
    for name, subject in subjects.items():
        timing, speed = timings[name], subject.flops / timings[name].median
        found[name] = {'seconds': timing.median} | subject.about
        if subject.images:
            found[name] |= {
                'images_per_second': subject.images / timing.median,
                'slowest': subject.images / timing.slowest,
                'fastest': subject.images / timing.fastest,
            }
        if subject.flops:
            found[name] |= {'flops_per_second': speed, 'share_of_matmul': speed / ceiling}
            if sheet:
                found[name]['share_of_data_sheet'] = speed / (sheet * program.mesh.size)
    return {
        'recipe': config.recipe,
        'model': variants.name_of(config.model),
        'batch_size': config.batch_size,
        'image_size': list(config.image_size),
        'dtype': config.model.dtype,
        'accum_steps': config.accum_steps or 1,
        'device': device.device_kind,
        'devices': program.mesh.size,
        'processor': platform.processor() or platform.machine(),
        'jax': jax.__version__,
        'rounds': rounds,
        'seconds_of_a_turn': seconds,
        'subjects': found,
        'peak_memory': {'vit_jax': progress.peak_memory()},
    }


def rate(value: float) -> str:
    """A number to four digits, and to more where it has more before the point."""
    return f'{value:,.4g}' if value < 9999.5 else f'{value:,.0f}'


def text(found: Mapping[str, Any]) -> str:
    """The table for people."""
    height, width = found['image_size']
    lines = [
        f'{found["recipe"]}: {height}x{width} px, batch {found["batch_size"]}'
        + (f' in {found["accum_steps"]} parts' if found['accum_steps'] > 1 else '')
        + f', {found["dtype"]}, {found["devices"]} x {found["device"]}, {found["cores"]} '
        f'cores, jax {found["jax"]}',
        f'median (slowest - fastest) of {found["rounds"]} rounds in which each has '
        f'{found["seconds_of_a_turn"]:g} s',
        '',
        f'{"":24}{"images/s":>10}{"":>22}{"ms/step":>10}{"GFLOP/s":>10}{"of matmul":>11}'
        + f'{"of data sheet":>15}',
    ]
    for name, row in found['subjects'].items():
        images = range_ = ''
        if 'images_per_second' in row:
            images, slowest, fastest = (
                rate(row[key]) for key in ('images_per_second', 'slowest', 'fastest')
            )
            range_ = f'({slowest} - {fastest})'
        line = f'{name:24}{images:>10}{range_:>22}{1e3 * row["seconds"]:10,.1f}'
        if 'flops_per_second' in row:
            line += f'{row["flops_per_second"] / 1e9:10,.1f}{row["share_of_matmul"]:11.0%}'
        if 'share_of_data_sheet' in row:
            line += f'{row["share_of_data_sheet"]:15.1%}'
        lines.append(line)
    for name, row in found['subjects'].items():
        ours, _, peer = name.partition(' by ')
        if peer:
            ratio = row['seconds'] / found['subjects'][ours]['seconds']
            lines.append(f'{ours}: {ratio:.2f} times {peer}')
    lines.append('')
    for name, row in found['subjects'].items():
        times = [
            f'{stage.replace("_", " ")} {row[stage]:.2f} s'
            for stage in ('trace', 'lower', 'compile', 'first_step')
            if stage in row
        ]
        if 'memory' in row:
            times.append(f'memory by the compiler {row["memory"] / 1e9:.2f} GB')
        if times:
            lines.append(f'{name}: {", ".join(times)}')
    lines += [
        f'largest memory of the process of {name}: {peak / 1e9:.2f} GB'
        for name, peak in found['peak_memory'].items()
    ]
    return '\n'.join(lines)
