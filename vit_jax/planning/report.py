"""A plan: all its numbers, what to change when it does not fit, and the text of both."""

from ml_collections import ConfigDict

from vit_jax.models import cost
from vit_jax.planning import estimate
from vit_jax.planning.estimate import Target
from vit_jax.training import sharding
from vit_jax.training.program import Program
from vit_jax.workdir import progress

GIB = 2**30
DAY = 86_400


def make(config: ConfigDict, target: Target, search: bool) -> dict:
    """The numbers of a plan, as --json prints them; bytes, FLOPs, seconds.

    Args:
      config: settled.
      search: whether to look for the largest batch, or for what helps when nothing fits: up to four
        more compilations.
    """
    config = estimate.choose_parts(config, target)
    program = Program(config, sharding.make_mesh(config.mesh, target.devices))
    mesh = dict(program.mesh.shape)
    step = estimate.compile_step(config, target)
    fits = step.needed <= target.limit
    model = cost.of_model(program.model, config.image_size)
    plan = {
        'chip': target.name, 'devices': len(target.devices), 'mesh': mesh,
        'compiler': 'cpu' if target.simulated else 'tpu',
        'batch_size': config.batch_size, 'accum_steps': config.accum_steps,
        'parameters': model.parameters,
        'memory': estimate.memory(config, target, step.needed)._asdict(),
        'memory_limit': int(target.limit), 'fits': fits,
        'whole_on_every_device': sharding.unsplit(program.abstract_state.params, program.mesh),
        'model_flops': program.flops_per_step(),
        'num_steps': program.num_steps,
    }
    if step.counts is not None:
        plan |= {'flops_per_device': step.counts.flops, 'sent_bytes': step.counts.sent,
                 'collectives': step.counts.calls, 'memory_traffic': step.traffic}
        plan |= times(plan, target, estimate.step_time(target, step))
    if search and fits:
        largest = estimate.largest_batch(config, target, step)
        plan['largest_batch'] = {'batch_size': largest[0], 'needed': largest[1]}
    elif search:
        plan['helps'] = what_helps(config, target)
    return plan


def times(plan: dict, target: Target, time: estimate.Time | None) -> dict:
    """Step time, MFU and the whole run, from the roofline; {} where the chip's speed is unknown."""
    if time is None:
        return {}
    run = time.least * plan['num_steps']
    return {
        'seconds': time._asdict() | {'least': time.least,
                                     'one_after_another': time.one_after_another},
        # Patches need no gradient: a program may do less than three forward passes.
        'mfu_at_most': min(1.0, plan['model_flops'] / (
            time.least * plan['devices'] * target.chip.flops)),
        'images_per_sec_at_most': plan['batch_size'] / time.least,
        'run_seconds': run, 'device_days': run * plan['devices'] / DAY}


def what_helps(config: ConfigDict, target: Target) -> list[dict]:
    """Changes of a config that does not fit, each compiled.

    Returns:
      change (values by field), needed (bytes), fits, least_seconds (of a step, None when unknown).
    """
    mesh = sharding.make_mesh(config.mesh, target.devices).shape
    parts = mesh['data'] * mesh['fsdp']
    images = config.batch_size // parts
    changes = []
    if mesh['data'] > 1:
        changes.append({'mesh.fsdp': parts, 'mesh.data': 1})
    if config.model.remat_policy == 'none':
        changes.append({'model.remat_policy': 'nothing_saveable'})
    more = [n for n in range(config.accum_steps + 1, images + 1) if images % n == 0]
    if more:
        # About eight images at a time.
        changes.append({'accum_steps': min(more, key=lambda n: abs(images / n - 8))})
    results = []
    for change in changes:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(change)
        step = estimate.compile_step(changed, target)
        time = step.counts and estimate.step_time(target, step)
        results.append({'change': change, 'needed': step.needed,
                        'fits': step.needed <= target.limit,
                        'least_seconds': time.least if time else None})
    return results


def text(plan: dict) -> str:
    """The plan for a person."""
    memory, mesh = plan['memory'], plan['mesh']
    lines = [
        f'{plan["devices"]} {plan["chip"]}, mesh ' + ' x '.join(
            f'{name} {size}' for name, size in mesh.items())
        + f', batch {plan["batch_size"]:,}'
        + (f' in {plan["accum_steps"]} parts' if plan['accum_steps'] > 1 else '')
        + f', {plan["parameters"]:,} parameters',
        'memory per device, by the compiler of the '
        + ('TPU:' if plan['compiler'] == 'tpu' else 'CPU for simulated devices, a rough estimate:'),
        *(f'  {name:<22}{memory[field] / GIB:9.3f} GiB' for name, field in (
            ('parameters', 'params'), ('optimizer state', 'optimizer'), ('gradients', 'gradients'),
            ('batches', 'batches'), ('activations and work', 'activations'), ('peak', 'peak'))),
        f'  {"may be used":<22}{plan["memory_limit"] / GIB:9.3f} GiB',
    ]
    lines += [f'  mesh.fsdp {mesh["fsdp"]} divides no axis of {name}: every device holds it whole'
              for name in plan['whole_on_every_device']]
    if not plan['fits']:
        lines.append('THIS DOES NOT FIT.')
    lines += [f'  with {fields(change["change"])}: {change["needed"] / GIB:.3f} GiB, '
              + (f'fits{at_least(change)}' if change['fits'] else 'does not fit either')
              for change in plan.get('helps', [])]
    if 'largest_batch' in plan:
        largest = plan['largest_batch']
        lines.append(f'largest batch that fits: {largest["batch_size"]:,} '
                     f'({largest["needed"] / GIB:.3f} GiB)')
    lines.append(f'FLOPs per step: {plan["model_flops"]:.4g} of the model (three forward passes)')
    if 'sent_bytes' in plan:
        lines[-1] += (f', {plan["flops_per_device"] * plan["devices"]:.4g} of the program, '
                      'recomputation included')
        total = sum(plan['sent_bytes'].values())
        lines.append(f'bytes that a device sends per step: {total:,}')
        lines += [f'  {kind:<22}{size:>18,} in {plan["collectives"][kind]:,} calls'
                  for kind, size in sorted(plan['sent_bytes'].items())]
    return '\n'.join(lines + time_lines(plan))


def time_lines(plan: dict) -> list[str]:
    """What is said of time."""
    if 'seconds' not in plan:
        return ['no times: ' + ('the speed of this chip is not known' if plan['fits'] else
                                'there is no compiled step')]
    s = plan['seconds']
    return [
        'step by the roofline (chips.py):',
        *(f'  {name:<22}{1e3 * s[field]:9.2f} ms' for name, field in (
            ('arithmetic', 'arithmetic'), ('memory', 'memory'), ('links', 'links'))),
        f'  {"at least":<22}{1e3 * s["least"]:9.2f} ms when all three overlap, '
        f'{1e3 * s["one_after_another"]:.2f} ms when none do',
        f'  MFU at most {plan["mfu_at_most"]:.1%}, '
        f'{plan["images_per_sec_at_most"]:,.0f} images/s at most',
        f'whole run, {plan["num_steps"]:,} steps: at least '
        f'{progress.duration(plan["run_seconds"])}, {plan["device_days"]:,.1f} device-days, '
        'without evaluation, checkpoints and waiting for data']


def at_least(change: dict) -> str:
    """', 12.3 ms a step at least' where that is known."""
    seconds = change['least_seconds']
    return f', {1e3 * seconds:.2f} ms a step at least' if seconds else ''


def fields(change: dict) -> str:
    """'--config.mesh.fsdp=8 --config.mesh.data=1'."""
    return ' '.join(f'--config.{name}={value}' for name, value in change.items())
