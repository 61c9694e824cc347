"""The results of a benchmark, for JSON and as a table."""

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
    """Returns all results in JSON's types: rates per second, times in seconds, memory in bytes.

    Args:
      program: the program of the config.
      subjects: the workloads by name; 'matmul' is one of them.
      timings: their times.
      rounds: number of rounds.
      seconds: length of a turn.
    """
    config = program.config
    device = jax.devices()[0]
    peak_flops = chips.peak_flops(device.device_kind)
    if peak_flops is not None:
        peak_flops *= program.mesh.size
    matmul_flops = subjects['matmul'].flops / timings['matmul'].median
    results = {
        name: _result(subject, timings[name], matmul_flops, peak_flops)
        for name, subject in subjects.items()
    }
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
        'subjects': results,
        'peak_memory': {'vit_jax': progress.peak_memory()},
    }


def _result(
    subject: Workload, timing: Timing, matmul_flops: float, peak_flops: float | None
) -> dict[str, float]:
    """Times and rates of a workload, compared with a matrix product and with the data sheet."""
    result = {'seconds': timing.median} | subject.about
    if subject.images:
        result['images_per_second'] = subject.images / timing.median
        result['slowest'] = subject.images / timing.slowest
        result['fastest'] = subject.images / timing.fastest
    if subject.flops:
        flops = subject.flops / timing.median
        result['flops_per_second'] = flops
        result['share_of_matmul'] = flops / matmul_flops
        if peak_flops is not None:
            result['share_of_data_sheet'] = flops / peak_flops
    return result


def rate(value: float) -> str:
    """Formats a number with four significant digits, or as a whole number if it has more."""
    return f'{value:,.4g}' if value < 9999.5 else f'{value:,.0f}'


def text(results: Mapping[str, Any]) -> str:
    """Returns the results as a table, with lines about compilation and memory below."""
    lines = [
        _title(results),
        f'median (slowest - fastest) of {results["rounds"]} rounds with turns of '
        f'{results["seconds_of_a_turn"]:g} s',
        '',
        f'{"":24}{"images/s":>10}{"":>22}{"ms/step":>10}{"GFLOP/s":>10}{"of matmul":>11}'
        f'{"of data sheet":>15}',
    ]
    subjects = results['subjects']
    for name, result in subjects.items():
        lines.append(_row(name, result))
    for name, result in subjects.items():
        our_name, _, peer = name.partition(' by ')
        if peer:
            ratio = result['seconds'] / subjects[our_name]['seconds']
            lines.append(f'{our_name}: {ratio:.2f} times {peer}')
    lines.append('')
    for name, result in subjects.items():
        details = _compilation(result)
        if details:
            lines.append(f'{name}: {", ".join(details)}')
    for name, peak in results['peak_memory'].items():
        lines.append(f'peak memory of the process of {name}: {peak / 1e9:.2f} GB')
    return '\n'.join(lines)


def _title(results):
    height, width = results['image_size']
    batch = f'batch {results["batch_size"]}'
    if results['accum_steps'] > 1:
        batch += f' in {results["accum_steps"]} parts'
    return (
        f'{results["recipe"]}: {height}x{width} px, {batch}, {results["dtype"]}, '
        f'{results["devices"]} x {results["device"]}, {results["cores"]} cores, '
        f'jax {results["jax"]}'
    )


def _row(name, result):
    images = ''
    image_range = ''
    if 'images_per_second' in result:
        images = rate(result['images_per_second'])
        image_range = f'({rate(result["slowest"])} - {rate(result["fastest"])})'
    row = f'{name:24}{images:>10}{image_range:>22}{1e3 * result["seconds"]:10,.1f}'
    if 'flops_per_second' in result:
        row += f'{result["flops_per_second"] / 1e9:10,.1f}{result["share_of_matmul"]:11.0%}'
    if 'share_of_data_sheet' in result:
        row += f'{result["share_of_data_sheet"]:15.1%}'
    return row


def _compilation(result):
    """A line with the seconds of each stage of compilation, and the memory of the program."""
    details = []
    for stage in ('trace', 'lower', 'compile', 'first_step'):
        if stage in result:
            details.append(f'{stage.replace("_", " ")} {result[stage]:.2f} s')
    if 'memory' in result:
        details.append(f'memory by the compiler {result["memory"] / 1e9:.2f} GB')
    return details
