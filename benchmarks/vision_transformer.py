"""Compares training and inference with vision_transformer's own code, and with timm.

    git clone https://github.com/google-research/vision_transformer CLONE
    python -m benchmarks.vision_transformer CLONE --config=configs/vit.py:ti16 \\
        --config.batch_size=32 --config.model.dtype=float32 \\
        --config.model.representation_size=0 [--peer=timm] [--parts=train,inference]

vision_transformer's model and `make_update_fn` run in their own process
(benchmarks/vision_transformer_process.py), in float32, with the same shapes, dropout and optimizer
but without weight decay. The program prints the table of vit_jax.benchmark.
"""

import contextlib
import pathlib

import jax

from vit_jax import benchmark, cli, machine
from vit_jax.errors import UserError, check_choice
from vit_jax.measuring import peers, report, rounds, workloads
from vit_jax.parallel import sharding
from vit_jax.training import device_defaults, resolve
from vit_jax.training.program import Program

PROCESS = pathlib.Path(__file__).with_name('vision_transformer_process.py')


@cli.command
def main(argv=None):
    """Measures and prints."""
    parser = cli.make_parser('vision_transformer', __doc__)
    parser.add_argument('clone', metavar='CLONE', help='clone of vision_transformer')
    parser.add_argument('--peer', choices=peers.PEERS, help='a further project to compare with')
    parser.add_argument('--parts', default='train,inference', help='parts to time')
    parser.add_argument('--rounds', type=int, default=5, help='number of rounds')
    parser.add_argument('--seconds', type=float, default=3.0, help='length of a turn in a round')
    options, config = cli.parse_with_config(parser, argv)
    rounds.check(options)
    parts = options.parts.split(',')
    for part in parts:
        check_choice('--parts', part, benchmark.PARTS[:2])
    if not pathlib.Path(options.clone, 'vit_jax', 'models_vit.py').exists():
        raise UserError(
            f'{options.clone} has no vit_jax/models_vit.py: expected a clone of '
            'google-research/vision_transformer.',
            kind='missing',
            file=options.clone,
        )
    machine.start_backend(device_defaults.host_devices({'': config}, trains=parts != ['inference']))
    jax.config.update('jax_enable_compilation_cache', False)  # compilation is timed
    complete = workloads.complete(config)
    mesh = sharding.make_mesh(complete.mesh)
    complete = resolve.for_mesh(complete, mesh)
    program = Program(complete, mesh)
    with contextlib.ExitStack() as stack:
        settings = {'clone': options.clone}
        peer = peers.Peer('vision_transformer', complete, [str(PROCESS)], settings)
        others = [stack.enter_context(peer)]
        if options.peer:
            peer = peers.start(options.peer, complete, complete.model.dtype, False)
            others.append(stack.enter_context(peer))
        subjects = benchmark.workloads_of(program, config, parts, others)
        results = benchmark.measured(program, subjects, others, options.rounds, options.seconds)
    print(report.text(results))


if __name__ == '__main__':
    cli.leave(main())
