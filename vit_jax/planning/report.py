"""A plan: its numbers, the changes that help if it does not fit, and its text."""

import functools
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.parallel import sharding
from vit_jax.planning import estimate
from vit_jax.planning.estimate import Target
from vit_jax.training import accumulation, chips
from vit_jax.training.program import Program
from vit_jax.workdir import progress


def make(config: ConfigDict, target: Target, search: bool) -> dict[str, Any]:
    """Returns the numbers of a plan for --json, in bytes, FLOPs and seconds.

    Args:
      config: a complete config.
      target: the devices.
      search: whether to look for the largest batch or, if the step does not fit, for changes that
        help. The search takes up to six more compilations.
    """
    program, step = estimate.compile_split(target.program(config), target)
    config = program.config
    fits = step.needed <= target.limit
    plan = {
        'chip': target.name,
        'devices': len(target.devices),
        'mesh': dict(program.mesh.shape),
        'compiler': 'cpu' if target.simulated else 'tpu',
        'batch_size': config.batch_size,
        'accum_steps': config.accum_steps,
        'parameters': cost.of_model(program.model, config.image_size).parameters,
        'teacher_parameters': sum(x.size for x in jax.tree.leaves(program.abstract_constants)),
        'memory': estimate.memory(program, step.needed),
        'memory_limit': int(target.limit),
        'fits': fits,
        'whole_on_every_device': sharding.unsplit(program.abstract_state.params, program.mesh),
        'model_flops': program.flops_per_step(),
        'num_steps': program.num_steps,
    }
    if step.work is not None:
        plan |= step.work
        plan |= times(plan, target)
    if search and fits:
        largest = estimate.largest_batch(program, target, step)
        if largest is not None:
            batch_size, needed = largest
            plan['largest_batch'] = {'batch_size': batch_size, 'needed': needed}
    elif search:
        plan['helps'] = what_helps(program, target)
    return plan


def times(plan: dict[str, Any], target: Target) -> dict[str, Any]:
    """Returns step time, MFU and run time by the roofline; {} if the chip's speed is unknown."""
    seconds = estimate.step_seconds(target, plan)
    if seconds is None:
        return {}
    step_seconds = seconds['least']
    run_seconds = step_seconds * plan['num_steps']
    peak_flops = plan['devices'] * chips.CHIPS[target.name].flops
    return {
        'seconds': seconds,
        # At most 1, because a program may need less than three forward passes: images need no
        # gradient.
        'mfu_at_most': min(1.0, plan['model_flops'] / (step_seconds * peak_flops)),
        'images_per_sec_at_most': plan['batch_size'] / step_seconds,
        'run_seconds': run_seconds,
        'device_days': run_seconds * plan['devices'] / 86_400,
    }


def what_helps(program: Program, target: Target) -> list[dict[str, Any]]:
    """Compiles a program that does not fit with each of several changes.

    Returns:
      For each change a dict with `change` (values by field), `needed` (bytes), `fits`, and
      `least_seconds` (None if unknown).
    """
    changes: list[dict[str, int | str]] = []
    if program.mesh.shape['data'] > 1:
        changes.append({'mesh.fsdp': sharding.batch_parts(program.mesh), 'mesh.data': 1})
    if program.config.model.remat_policy != 'nothing_saveable':
        changes.append({'model.remat_policy': 'nothing_saveable'})
    results = []
    for change in changes:
        step = estimate.compile_step(target.program(program.config, change), target)
        results.append(_help(change, step, target))
    results += _fewest_parts(program, target)
    return results


def _fewest_parts(program, target):
    """The change of accum_steps: the fewest parts that fit, or else one image at a time.

    The list is empty if the program already computes one image at a time.
    """
    images = program.config.batch_size // sharding.batch_parts(program.mesh)
    if program.config.accum_steps == images:
        return []
    step_of = functools.cache(lambda program: estimate.compile_step(program, target))
    try:
        program = accumulation.choose(
            program, limit=target.limit, size_of=lambda program: step_of(program).needed
        )
    except UserError:  # not even one image at a time fits
        program = program.with_accum_steps(images)
    return [_help({'accum_steps': program.config.accum_steps}, step_of(program), target)]


def _help(change, step, target):
    """The entry of `what_helps` for a change and its step."""
    least_seconds = None
    if step.work is not None:
        seconds = estimate.step_seconds(target, step.work)
        if seconds is not None:
            least_seconds = seconds['least']
    return {
        'change': change,
        'needed': step.needed,
        'fits': step.needed <= target.limit,
        'least_seconds': least_seconds,
    }


def text(plan: dict[str, Any]) -> str:
    """Returns the plan as text."""
    lines = [
        _title(plan),
        *_memory_lines(plan),
        *_change_lines(plan),
        *_work_lines(plan),
        *_time_lines(plan),
    ]
    return '\n'.join(lines)


def _title(plan):
    mesh = ' x '.join(f'{name} {size}' for name, size in plan['mesh'].items())
    title = f'{plan["devices"]} {plan["chip"]}, mesh {mesh}, batch {plan["batch_size"]:,}'
    if plan['accum_steps'] > 1:
        title += f' in {plan["accum_steps"]} parts'
    title += f', {plan["parameters"]:,} parameters'
    if plan['teacher_parameters']:
        title += f', {plan["teacher_parameters"]:,} of the teacher'
    return title


# The lines about the memory of a device, with the fields of a plan's `memory`.
_MEMORY_LINES = {
    'parameters': 'params',
    'optimizer state': 'optimizer',
    'gradients': 'gradients',
    'teacher': 'teacher',
    'batches': 'batches',
    'activations and work': 'activations',
    'peak': 'peak',
    'available': 'limit',
}


def _memory_lines(plan):
    compiler = 'CPU for simulated devices, a rough estimate'
    if plan['compiler'] == 'tpu':
        compiler = 'TPU'
    lines = [f'memory per device, by the compiler of the {compiler}:']
    sizes = plan['memory'] | {'limit': plan['memory_limit']}
    for label, field in _MEMORY_LINES.items():
        if sizes[field]:
            lines.append(f'  {label:<22}{_gib(sizes[field]):>13}')
    for name in plan['whole_on_every_device']:
        lines.append(
            f'  mesh.fsdp {plan["mesh"]["fsdp"]} divides no axis of {name}: every device has all '
            'of it'
        )
    return lines


def _change_lines(plan):
    """The lines about whether the plan fits, the effect of changes, and the largest batch."""
    lines = []
    if not plan['fits']:
        lines.append('THIS DOES NOT FIT.')
    for change in plan.get('helps', []):
        fields = ' '.join(f'--config.{name}={value}' for name, value in change['change'].items())
        line = f'  with {fields}: {_gib(change["needed"])}, '
        if not change['fits']:
            lines.append(f'{line}does not fit either')
            continue
        line += 'fits'
        if change['least_seconds']:
            line += f', at least {1e3 * change["least_seconds"]:.2f} ms per step'
        lines.append(line)
        if 'accum_steps' in change['change']:
            lines.append('  these are the fewest parts: --config.accum_steps=0 chooses them')
    if 'largest_batch' in plan:
        largest = plan['largest_batch']
        lines.append(
            f'largest batch that fits: {largest["batch_size"]:,} ({_gib(largest["needed"])})'
        )
    return lines


def _gib(size):
    return f'{size / chips.GIB:.3f} GiB'


def _work_lines(plan):
    passes = 'three forward passes'
    if plan['teacher_parameters']:
        passes += ', one of the teacher'
    flops = f'FLOPs per step: {plan["model_flops"]:.4g} of the model ({passes})'
    if 'sent_bytes' not in plan:
        return [flops]
    sent_bytes = plan['sent_bytes']
    program_flops = plan['flops_per_device'] * plan['devices']
    lines = [
        f'{flops}, {program_flops:.4g} of the program, recomputation included',
        f'bytes that a device sends per step: {sum(sent_bytes.values()):,}',
    ]
    for kind, size in sorted(sent_bytes.items()):
        lines.append(f'  {kind:<22}{size:>18,} in {plan["collectives"][kind]:,} calls')
    return lines


def _time_lines(plan):
    if 'seconds' not in plan:
        if plan['fits']:
            return ['no times: the speed of this chip is unknown']
        return ['no times: there is no compiled step']
    ms = {name: 1e3 * seconds for name, seconds in plan['seconds'].items()}
    return [
        'step by the roofline (chips.py):',
        *(f'  {name:<22}{ms[name]:9.2f} ms' for name in ('arithmetic', 'memory', 'links')),
        f'  {"at least":<22}{ms["least"]:9.2f} ms when all three overlap, '
        f'{ms["one_after_another"]:.2f} ms when none do',
        f'  MFU at most {plan["mfu_at_most"]:.1%}, '
        f'{plan["images_per_sec_at_most"]:,.0f} images/s at most',
        f'whole run, {plan["num_steps"]:,} steps: at least '
        f'{progress.duration(plan["run_seconds"])}, {plan["device_days"]:,.1f} device-days, '
        'without evaluation, checkpoints and waiting for data',
    ]
