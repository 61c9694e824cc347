"""A plan: all its numbers, what to change when it does not fit, and the text for both."""

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
    """The numbers of a plan of a complete config, in bytes, FLOPs and seconds, as --json has them.

    With `search` it looks for the largest batch or, if the step does not fit, for what helps: up to
    six more compilations.
    """
    program, step = estimate.compile_split(target.program(config), target)
    config, fits = program.config, step.needed <= target.limit
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
        if largest is not None:  # never here: the batch of the program itself fits
            batch_size, needed = largest
            plan['largest_batch'] = {'batch_size': batch_size, 'needed': needed}
    elif search:
        plan['helps'] = what_helps(program, target)
    return plan


def times(plan: dict[str, Any], target: Target) -> dict[str, Any]:
    """Step time, MFU and run time by the roofline; {} if the speed of the chip is unknown."""
    seconds = estimate.step_seconds(target, plan)
    if seconds is None:
        return {}
    least, peak = seconds['least'], plan['devices'] * chips.CHIPS[target.name].flops
    run = least * plan['num_steps']
    return {
        'seconds': seconds,
        # Images need no gradient: a program may do less than three forward passes.
        'mfu_at_most': min(1.0, plan['model_flops'] / (least * peak)),
        'images_per_sec_at_most': plan['batch_size'] / least,
        'run_seconds': run,
        'device_days': run * plan['devices'] / 86_400,
    }


def what_helps(program: Program, target: Target) -> list[dict[str, Any]]:
    """Compiles a program that does not fit with several changes.

    Each has change (values by field), needed (bytes), fits, least_seconds (None when unknown).
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
    """What helps if the batch is split: the fewest parts that fit, or else one image at a time.

    The list is empty if the program computes one image at a time already.
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
    """The row of `what_helps` for a change and the step that is compiled with it."""
    seconds = None
    if step.work is not None:
        seconds = estimate.step_seconds(target, step.work)
    return {
        'change': change,
        'needed': step.needed,
        'fits': step.needed <= target.limit,
        'least_seconds': seconds['least'] if seconds else None,
    }


def text(plan: dict[str, Any]) -> str:
    """The plan in words."""
    mesh = ' x '.join(f'{name} {size}' for name, size in plan['mesh'].items())
    split = f' in {plan["accum_steps"]} parts' if plan['accum_steps'] > 1 else ''
    size = plan['teacher_parameters']
    teacher = f', {size:,} of the teacher' if size else ''
    return '\n'.join(
        [
            f'{plan["devices"]} {plan["chip"]}, mesh {mesh}, batch {plan["batch_size"]:,}{split}, '
            f'{plan["parameters"]:,} parameters{teacher}',
            *_memory_lines(plan),
            *_work_lines(plan),
            *_time_lines(plan),
        ]
    )


def _memory_lines(plan):
    compiler = (
        'TPU:' if plan['compiler'] == 'tpu' else 'CPU for simulated devices, a rough estimate:'
    )
    sizes = plan['memory'] | {'limit': plan['memory_limit']}
    lines = [f'memory per device, by the compiler of the {compiler}']
    lines += [
        f'  {name:<22}{sizes[field] / chips.GIB:9.3f} GiB'
        for name, field in (
            ('parameters', 'params'),
            ('optimizer state', 'optimizer'),
            ('gradients', 'gradients'),
            ('teacher', 'teacher'),
            ('batches', 'batches'),
            ('activations and work', 'activations'),
            ('peak', 'peak'),
            ('may be used', 'limit'),
        )
        if sizes[field]
    ]
    lines += [
        f'  mesh.fsdp {plan["mesh"]["fsdp"]} divides no axis of {name}: every device holds it whole'
        for name in plan['whole_on_every_device']
    ]
    if not plan['fits']:
        lines.append('THIS DOES NOT FIT.')
    for change in plan.get('helps', []):
        fields = ' '.join(f'--config.{name}={value}' for name, value in change['change'].items())
        least = change['least_seconds']
        at_least = f', {1e3 * least:.2f} ms a step at least' if least else ''
        lines.append(
            f'  with {fields}: {change["needed"] / chips.GIB:.3f} GiB, '
            + (f'fits{at_least}' if change['fits'] else 'does not fit either')
        )
        if 'accum_steps' in change['change'] and change['fits']:
            lines.append('  these are the fewest parts: --config.accum_steps=0 chooses them')
    if largest := plan.get('largest_batch'):
        lines.append(
            f'largest batch that fits: {largest["batch_size"]:,} '
            f'({largest["needed"] / chips.GIB:.3f} GiB)'
        )
    return lines


def _work_lines(plan):
    teacher = ', one of the teacher' if plan['teacher_parameters'] else ''
    flops = (
        f'FLOPs per step: {plan["model_flops"]:.4g} of the model (three forward passes{teacher})'
    )
    if 'sent_bytes' not in plan:
        return [flops]
    sent = plan['sent_bytes']
    return [
        f'{flops}, {plan["flops_per_device"] * plan["devices"]:.4g} of the program, '
        'recomputation included',
        f'bytes that a device sends per step: {sum(sent.values()):,}',
        *(
            f'  {kind:<22}{size:>18,} in {plan["collectives"][kind]:,} calls'
            for kind, size in sorted(sent.items())
        ),
    ]


def _time_lines(plan):
    if 'seconds' not in plan:
        return [
            'no times: '
            + (
                'the speed of this chip is not known'
                if plan['fits']
                else 'there is no compiled step'
            )
        ]
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
