"""Compares training and inference on a GPU with timm: the table of docs/lab-notes/gpu-speed.md.

    python -m benchmarks.gpu [--rows b16,jft=512 ...] [--rounds=5] [--seconds=1] [--out=FILE]

A row is MODEL[,DATASET]=BATCH of configs/vit.py. `vit_jax.benchmark` measures the rows one after
another, so that each has the whole memory of the GPU. Rows that fail or take longer than --timeout
are skipped and listed at the end. If only timm fails, its cells are empty. The program prints each
row of the Markdown table when it is ready; --out adds the reports to a file, a line of JSON each.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys

from vit_jax import cli
from vit_jax.errors import UserError, check_at_least
from vit_jax.files import check_destination
from vit_jax.measuring import report, rounds
from vit_jax.training import chips

# Recipes for JFT-300M have no dropout; recipes for ImageNet have a rate of 0.1.
ROWS = ('s16=1024', 's16,jft=1024', 'b16=512', 'b16,jft=512', 'l16,jft=256', 'h14,jft=128')
PACKAGES = ('jax', 'flax', 'torch', 'timm')  # reports have their versions
COLUMNS = (
    'recipe',
    'batch',
    'part',
    'vit_jax',
    'timm, compiled',
    'times',
    'of the product',
    'of the data sheet',
    'as published',
)
# Billions of multiplications and additions for an image of 224 px, with all tokens in all layers.
# timm publishes these numbers, and other projects report utilisation with them.
PUBLISHED = {'s16': 4.61, 'b16': 17.58, 'l16': 61.6, 'h14': 167.4}


def recipe_and_batch(text):
    """Returns ('b16,jft', 512) for 'b16,jft=512'."""
    recipe, _, batch = text.partition('=')
    if not (batch.isascii() and batch.isdecimal()):
        raise argparse.ArgumentTypeError(f'{text!r}: expected RECIPE=BATCH, as in b16,jft=512')
    return recipe, int(batch)


def measure(recipe, batch, options):
    """Returns the JSON report of vit_jax.benchmark; raises UserError if the benchmark fails."""
    command = [
        sys.executable,
        '-m',
        'vit_jax.benchmark',
        f'--config=configs/vit.py:{recipe}',
        '--config.model.representation_size=0',
        # With large batches the warm-up would be longer than the run of 7 epochs.
        '--config.optimizer.warmup_steps=0',
        f'--config.batch_size={batch}',
        '--config.accum_steps=1',
        '--peer=timm',
        '--peer_compile',
        f'--rounds={options.rounds}',
        f'--seconds={options.seconds}',
        '--json',
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        lines = process.communicate(timeout=options.timeout)[0].splitlines()
    except subprocess.TimeoutExpired:
        raise UserError(
            f'no result after {options.timeout} s',
            kind='resource',
            field='--timeout',
            value=options.timeout,
        ) from None
    finally:
        # The whole group, because timm's process would keep its memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        return json.loads(lines[-1])  # also with exit code 1, if only timm has failed
    except (IndexError, ValueError):
        raise UserError(
            f'exit code {process.returncode} of {" ".join(command[1:])}',
            kind='other',
            value=process.returncode,
        ) from None


def rows_of(results, recipe):
    """Yields a row of Markdown for each part of a report."""
    subjects = results['subjects']
    peak_flops = chips.peak_flops(results['device'])
    published = PUBLISHED.get(recipe.partition(',')[0])
    for part, forward_passes in (('train', 3), ('inference', 1)):
        ours = subjects[part]
        rate = ours['images_per_second']
        cells = [recipe, results['batch_size'], part, _rate(ours)]
        timm = subjects.get(f'{part} by timm')
        if timm is None:
            cells += ['-', '-']
        else:
            cells += [_rate(timm), f'**{rate / timm["images_per_second"]:.2f}**']
        cells.append(f'{ours["share_of_matmul"]:.1%}')
        if peak_flops:
            cells.append(f'{ours["share_of_data_sheet"]:.1%}')
            if published:
                flops = forward_passes * 2e9 * published * rate
                cells.append(f'{flops / peak_flops:.1%}')
        yield _row(*cells)


def _rate(subject):
    median = report.rate(subject['images_per_second'])
    return f'{median} ({report.rate(subject["slowest"])} - {report.rate(subject["fastest"])})'


def _row(*cells):
    return f'| {" | ".join(map(str, cells))} |'


@cli.command
def main(argv=None):
    """Returns 0, or 1 if a row is missing."""
    options = _parser().parse_args(argv)
    rounds.check(options)
    check_at_least('--timeout', options.timeout, 1)
    if options.out:
        check_destination(options.out)
    print(_row(*COLUMNS), flush=True)
    print(_row(*('---' for _ in COLUMNS)), flush=True)
    failures = []
    for recipe, batch in options.rows:
        try:
            results = measure(recipe, batch, options)
        except UserError as error:
            failures.append(f'{recipe}: {error}')
            continue
        results['versions'] = {
            name: importlib.metadata.version(name)
            for name in PACKAGES
            if importlib.util.find_spec(name)
        }
        if options.out:
            with open(options.out, 'a') as file:
                file.write(json.dumps(results) + '\n')
        print(*rows_of(results, recipe), sep='\n', flush=True)
        if 'train by timm' not in results['subjects']:
            failures.append(f'{recipe} by timm, see the error above')
    if failures:
        raise UserError(f'These rows are missing: {"; ".join(failures)}.', kind='other')


def _parser():
    parser = cli.make_parser('gpu', __doc__)
    parser.add_argument(
        '--rows',
        nargs='+',
        type=recipe_and_batch,
        metavar='RECIPE=BATCH',
        default=[recipe_and_batch(row) for row in ROWS],
        help='rows of the table',
    )
    parser.add_argument('--rounds', type=int, default=5, help='number of rounds')
    parser.add_argument('--seconds', type=float, default=1.0, help='length of a turn in a round')
    parser.add_argument('--timeout', type=int, default=300, help='longest time of a row in seconds')
    parser.add_argument('--out', metavar='FILE', help='file that receives the reports')
    return parser


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes of a row too
    cli.leave(main())
