"""Measures how fast a config trains and predicts on this machine, relative to the hardware's peak.

    python -m vit_jax.benchmark --config=configs/vit.py:ti16 --config.batch_size=32
        [--parts=train,inference,input] [--rounds=5] [--seconds=3]
        [--peer=timm [--peer_dtype=bfloat16] [--peer_compile]] [--json]
        [--profile=DIR] [--config.FIELD=VALUE ...]

The parts alternate in rounds. The table shows the median, the slowest and the fastest round. Images
are noise in memory, except for `input`, which reads the data set of the config, alone and together
with the training step. FLOP/s count the matrix products and convolutions of the model, where the
backward pass counts as two forward passes. They are compared with a plain matrix product in the
same rounds. With --json the last line of stdout is one JSON object.
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
    if options.peer:  # leaves memory of the GPU to the peer
        os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
    trains = parts != ['inference']
    machine.start_backend(device_defaults.host_devices({'': config}, trains=trains))
    # This raises UserError if JAX shows another number.
    device_defaults.shown_devices(config.mesh.host_devices)
    jax.config.update('jax_enable_compilation_cache', False)  # compilation is timed
    if config.pretrained:
        fields_of_weights, *_ = pretrained.take_fields(config, None)
        config = config_lib.changed(config, fields_of_weights)
    program, config = _make_program(config)
    results, subjects, peer_error = _measure(program, config, parts, options)
    terminal.write(report.text(results))
    if options.profile:
        _profile(subjects, parts, options.profile)
    if options.json:
        terminal.write(json.dumps(results))
    if peer_error is not None:
        raise peer_error


def _check(options, parts):
    for part in parts:
        check_choice('--parts', part, PARTS)
    rounds.check(options)
    if (options.peer_dtype or options.peer_compile) and not options.peer:
        raise UserError(
            '--peer_dtype and --peer_compile need a peer: add --peer=timm.',
            kind='missing',
            field='--peer',
        )
    if options.profile:  # before the measurements, so that an error ends the command at its start
        with named(options.profile):
            os.makedirs(options.profile, exist_ok=True)


def _parser() -> cli.Parser:
    parser = cli.make_parser('benchmark', __doc__)
    parser.add_argument(
        '--parts', default='train,inference', help=f'parts to time: {", ".join(PARTS)}'
    )
    parser.add_argument('--rounds', type=int, default=5, help='number of rounds')
    parser.add_argument(
        '--seconds', type=float, default=3.0, help='length of the turn of a part in a round'
    )
    parser.add_argument(
        '--peer',
        default='',
        help='project whose implementation of the same model is timed for comparison, in its own '
        f'process: one of {", ".join(peers.PEERS)}',
    )
    parser.add_argument(
        '--peer_dtype',
        '--peer-dtype',
        choices=('float32', 'bfloat16'),
        help="dtype of the peer; bfloat16 is PyTorch's autocast; default: model.dtype",
    )
    parser.add_argument(
        '--peer_compile',
        '--peer-compile',
        action='store_true',
        help='compile the peer by torch.compile, while XLA compiles',
    )
    parser.add_argument('--profile', metavar='DIR', help='directory for a trace of three steps')
    parser.add_argument(
        '--json', action='store_true', help='print one JSON object as the last line'
    )
    return parser


def _make_program(config):
    """The program of a config, and the config with the accum_steps of the program."""
    complete = workloads.complete(config)
    mesh = sharding.make_mesh(complete.mesh)
    complete = resolve.for_mesh(complete, mesh)
    if not complete.accum_steps:
        complete = accumulation.choose(Program(complete, mesh)).config
        config = config_lib.changed(config, {'accum_steps': complete.accum_steps})
    # A new program, which is not compiled yet, because compilation is timed.
    return Program(complete, mesh), config


def _measure(program, config, parts, options):
    """The results, the workloads that were timed, and the error of the peer or None.

    If the peer fails, only the workloads of this project are timed.
    """
    with contextlib.ExitStack() as stack:
        others = []
        if options.peer:
            dtype = options.peer_dtype or program.config.model.dtype
            peer = peers.start(options.peer, program.config, dtype, options.peer_compile)
            others.append(stack.enter_context(peer))
            if options.peer_compile:
                peer.prepare([part for part in PARTS[:2] if part in parts])
        subjects = workloads_of(program, config, parts, others)
        peer_error = _wait_for(others)
        if peer_error is not None:
            others = []
            subjects = {name: subjects[name] for name in subjects if ' by ' not in name}
        results = measured(program, subjects, others, options.rounds, options.seconds)
    return results, subjects, peer_error


def workloads_of(
    program: Program, config: ConfigDict, parts: Sequence[str], others: Sequence[peers.Peer]
) -> dict[str, workloads.Workload]:
    """Returns the workloads to time, by name.

    Args:
      program: the program of the config.
      config: the config, for the input pipeline.
      parts: the names of the parts to time, from PARTS.
      others: the peers, whose workloads are named 'PART by PEER'.
    """
    subjects = {'matmul': workloads.matmul(program)}
    if 'train' in parts:
        subjects['train'] = workloads.training(program)
    if 'inference' in parts:
        subjects['inference'] = workloads.inference(program)
    if 'input' in parts:
        subjects |= workloads.input_and_both(config)
    for part, peer in itertools.product(PARTS[:2], others):
        if part in parts:
            flops = subjects[part].flops
            subjects[f'{part} by {peer.name}'] = peer.workload(part == 'train', flops)
    return subjects


def _wait_for(others):
    """Waits until all peers are ready; returns the error of a peer that failed, or None."""
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
    """Times workloads in rounds, and returns the results of report.make with cores and memory.

    Args:
      program: the program of the config.
      subjects: the workloads by name.
      others: the peers.
      num_rounds: number of rounds.
      seconds: duration of each workload in a round.
    """
    functions = {name: subject.run for name, subject in subjects.items()}
    timings = rounds.in_turn(functions, num_rounds, seconds)
    results = report.make(program, subjects, timings, num_rounds, seconds)
    results['cores'] = machine.cores()
    for peer in others:
        results['peak_memory'][peer.name] = peer.peak_memory()
    return results


def _profile(subjects, parts, directory):
    """Traces three steps of the first part, and prints the operations that took longest."""
    num_steps = 3
    name = next((part for part in parts if part != 'input'), 'train with input')
    profile.trace(subjects[name].run, num_steps, directory)
    places = profile.places(subjects[name].compiled.as_text())
    operations = profile.operations(directory, num_steps, places)
    if not operations:
        raise UserError(
            f'The trace in {directory} has no operations of a device.',
            kind='content',
            file=directory,
        )
    total = sum(seconds for _, seconds in operations)
    terminal.write(
        f'\n{name}: the longest operations, of {1e3 * total:.1f} ms per step over all threads; the '
        f'trace is in {directory}'
    )
    for operation, seconds in operations[:10]:
        terminal.write(f'  {1e3 * seconds:9.2f} ms  {seconds / total:6.1%}  {operation}')


if __name__ == '__main__':
    cli.leave(main())
