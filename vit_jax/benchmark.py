"""How fast a config trains and predicts on this machine, and how far the hardware's limit is.

    python -m vit_jax.benchmark --config=configs/vit.py:ti16 --config.batch_size=32
        [--parts=train,inference,input] [--rounds=5] [--seconds=3] [--peer=timm] [--json]
        [--profile=DIR] [--config.FIELD=VALUE ...]

Everything is timed in rounds in which the parts take turns; the table has medians, the fastest and
the slowest round. Images are noise in memory, except for `input`, which reads the data set of the
config, alone and while it feeds the training step. FLOP/s are those of the matrix products and
convolutions of the model (backward twice the forward pass), beside those of a plain matrix product
in the same rounds. With --json the last line of stdout is one JSON object.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import cli, machine, terminal
from vit_jax import config as config_lib
from vit_jax.errors import UserError, check_choice
from vit_jax.files import named
from vit_jax.measuring import peers, profile, report, rounds, workloads
from vit_jax.parallel import sharding
from vit_jax.training import accumulation, device_defaults, pretrained, resolve
from vit_jax.training.program import Program

PARTS = ('train', 'inference', 'input')


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    options, config = cli.parse_with_config(_parser(), argv)
    parts = options.parts.split(',')
    _check(options, parts)
    if options.peer:  # which needs memory of the same GPU
        os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
    machine.start_backend(device_defaults.host_devices({'': config}, trains=parts != ['inference']))
    device_defaults.shown_devices(config)  # raises UserError where JAX shows another number
    jax.config.update('jax_enable_compilation_cache', False)  # its time is measured
    if config.pretrained:
        config = config_lib.changed(config, pretrained.take_fields(config, None)[0])
    complete = workloads.complete(config)
    mesh = sharding.make_mesh(complete.mesh)
    complete = resolve.for_mesh(complete, mesh)
    if not complete.accum_steps:
        complete = accumulation.choose(Program(complete, mesh)).config
        config = config_lib.changed(config, {'accum_steps': complete.accum_steps})
    program = Program(complete, mesh)  # which compiles anew, because that is timed
    with contextlib.ExitStack() as stack:
        others = (
            [
                stack.enter_context(
                    peers.start(
                        options.peer,
                        complete,
                        options.peer_dtype or complete.model.dtype,
                        options.peer_compile,
                    )
                )
            ]
            if options.peer
            else []
        )
        for peer in others if options.peer_compile else ():
            peer.prepare([part for part in PARTS[:2] if part in parts])
        subjects = workloads_of(program, config, parts, others)
        if failure := _failure(others):  # what is ours is measured all the same
            others, subjects = [], {x: subjects[x] for x in subjects if ' by ' not in x}
        found = measured(program, subjects, others, options.rounds, options.seconds)
    terminal.write(report.text(found))
    if options.profile:
        _profile(subjects, parts, options.profile)
    if options.json:
        terminal.write(json.dumps(found))
    if failure:
        raise failure


def _check(options, parts):
    for part in parts:
        check_choice('--parts', part, PARTS)
    rounds.check(options)
    if (options.peer_dtype or options.peer_compile) and not options.peer:
        raise UserError('--peer-dtype and --peer-compile are of a peer: add --peer=timm.')
    if options.profile:  # now, not after the work
        with named(options.profile):
            os.makedirs(options.profile, exist_ok=True)


def _parser() -> cli.Parser:
    parser = cli.make_parser('benchmark', __doc__)
    parser.add_argument('--parts', default='train,inference', help=f'of {", ".join(PARTS)}')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=3.0, help='of a part in a round')
    parser.add_argument(
        '--peer',
        default='',
        help=f'the same model beside it, in its own process: one of {", ".join(peers.PEERS)}',
    )
    parser.add_argument(
        '--peer-dtype',
        '--peer_dtype',
        choices=('float32', 'bfloat16'),
        help="bfloat16 is PyTorch's autocast; default: model.dtype of the config",
    )
    parser.add_argument(
        '--peer-compile',
        '--peer_compile',
        action='store_true',
        help='by torch.compile, at the same time as XLA compiles',
    )
    parser.add_argument('--profile', metavar='DIR', help='where a trace of three steps is written')
    parser.add_argument('--json', action='store_true')
    return parser


def workloads_of(
    program: Program, config: ConfigDict, parts: Sequence[str], others: Sequence[peers.Peer]
) -> dict[str, workloads.Workload]:
    """What is timed, by name; a name of another project's ends with ' by ' and its own."""
    subjects = {'matmul': workloads.matmul(program)}
    if 'train' in parts:
        subjects['train'] = workloads.training(program)
    if 'inference' in parts:
        subjects['inference'] = workloads.inference(program)
    if 'input' in parts:
        subjects |= workloads.input_and_both(config)
    for part, peer in itertools.product(PARTS[:2], others):
        if part in parts:
            subjects[f'{part} by {peer.name}'] = peer.workload(
                part == 'train', subjects[part].flops
            )
    return subjects


def _failure(others):
    """The error of a peer that cannot have its turns; None once all can."""
    try:
        for peer in others:
            peer.wait()
    except UserError as error:
        return error
    return None


def measured(
    program: Program,
    subjects: Mapping[str, workloads.Workload],
    others: Sequence[peers.Peer],
    num_rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """What report.make makes of the times of all, `seconds` of each in every round, and cores."""
    timings = rounds.in_turn(
        {name: subject.run for name, subject in subjects.items()}, num_rounds, seconds
    )
    found = report.make(program, subjects, timings, num_rounds, seconds)
    found['cores'] = machine.cores()
    found['peak_memory'] |= {peer.name: peer.peak_memory() for peer in others}
    return found


def _profile(subjects, parts, directory):
    steps = 3
    name = next((part for part in parts if part != 'input'), 'train with input')
    profile.trace(subjects[name].run, steps, directory)
    places = profile.places(subjects[name].compiled.as_text())
    operations = profile.operations(directory, steps, places)
    if not operations:
        raise UserError(f'the trace in {directory} has no operations of a device.')
    total = sum(seconds for _, seconds in operations)
    terminal.write(
        f'\n{name}: what takes longest, of {1e3 * total:.1f} ms a step over all threads; trace '
        f'in {directory}'
    )
    for operation, seconds in operations[:10]:
        terminal.write(f'  {1e3 * seconds:9.2f} ms  {seconds / total:6.1%}  {operation}')


if __name__ == '__main__':
    cli.leave(main())
