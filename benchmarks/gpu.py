"""Training and inference beside timm with torch.compile: the table of docs/lab-notes/gpu-speed.md.

    python -m benchmarks.gpu [--rows b16,jft=512 ...] [--rounds=5] [--seconds=1] [--out=FILE]

A row is MODEL[,DATASET]=BATCH of configs/vit.py. They are measured one after another, by
`vit_jax.benchmark`, so that each has the memory of the GPU to itself; what fails or takes longer
than --timeout is left out, and named; where timm alone fails, its cells are. Prints rows of
Markdown, one as soon as it is known; --out adds the reports to a file, a line of JSON for each.
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

# Recipes for JFT-300M have no dropout, those for ImageNet 0.1.
ROWS = ('s16=1024', 's16,jft=1024', 'b16=512', 'b16,jft=512', 'l16,jft=256', 'h14,jft=128')
PACKAGES = ('jax', 'flax', 'torch', 'timm')  # whose versions reports have
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
# Billions of multiplications and additions for an image of 224 px, all tokens in all layers, as
# timm publishes them and shares of other projects count.
PUBLISHED = {'s16': 4.61, 'b16': 17.58, 'l16': 61.6, 'h14': 167.4}


def recipe_and_batch(text):
    """('b16,jft', 512) of 'b16,jft=512'."""
    recipe, _, batch = text.partition('=')
    if not (batch.isascii() and batch.isdecimal()):
        raise argparse.ArgumentTypeError(f'{text!r}: expected RECIPE=BATCH, as in b16,jft=512')
    return recipe, int(batch)


def measure(recipe, batch, options):
    """The report of a row, as vit_jax.benchmark has it in JSON; raises UserError if it fails."""
    command = [
        sys.executable,
        '-m',
        'vit_jax.benchmark',
        f'--config=configs/vit.py:{recipe}',
        '--config.model.representation_size=0',
        # With large batches a warm-up has more steps than 7 epochs of ImageNet.
        '--config.optimizer.warmup_steps=0',
        f'--config.batch_size={batch}',
        '--config.accum_steps=1',
        '--peer=timm',
        '--peer-compile',
        f'--rounds={options.rounds}',
        f'--seconds={options.seconds}',
        '--json',
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        lines = process.communicate(timeout=options.timeout)[0].splitlines()
    except subprocess.TimeoutExpired:
        raise UserError(f'no result after {options.timeout} s') from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # timm's process, too, which keeps memory
            os.killpg(process.pid, signal.SIGKILL)
    try:
        return json.loads(lines[-1])  # also with an exit code of 1, where timm has failed
    except (IndexError, ValueError):
        raise UserError(f'exit code {process.returncode} of {" ".join(command[1:])}') from None


def rows_of(found, recipe):
    """A row of Markdown for each part of a report."""
    subjects, peak = found['subjects'], chips.peak_flops(found['device'])
    published = PUBLISHED.get(recipe.partition(',')[0])
    for part, factor in (('train', 3), ('inference', 1)):
        ours, timm = subjects[part], subjects.get(f'{part} by timm')
        rate, shares = ours['images_per_second'], [ours['share_of_matmul']]
        if peak:
            shares.append(ours['share_of_data_sheet'])
        if peak and published:
            shares.append(factor * 2e9 * published * rate / peak)
        beside = (_rate(timm), f'**{rate / timm["images_per_second"]:.2f}**') if timm else '--'
        yield _row(
            recipe, found['batch_size'], part, _rate(ours), *beside, *map('{:.1%}'.format, shares)
        )


def _rate(subject):
    median, slowest, fastest = (
        report.rate(subject[name]) for name in ('images_per_second', 'slowest', 'fastest')
    )
    return f'{median} ({slowest} - {fastest})'


def _row(*cells):
    return f'| {" | ".join(map(str, cells))} |'


@cli.command
def main(argv=None):
    """Returns 0, or 1 if a row is missing."""
    parser = cli.make_parser('gpu', __doc__)
    parser.add_argument(
        '--rows',
        nargs='+',
        type=recipe_and_batch,
        metavar='RECIPE=BATCH',
        default=[recipe_and_batch(row) for row in ROWS],
    )
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=1.0, help='of a turn')
    parser.add_argument('--timeout', type=int, default=300, help='seconds that a row may take')
    parser.add_argument('--out', metavar='FILE')
    options = parser.parse_args(argv)
    rounds.check(options)
    check_at_least('--timeout', options.timeout, 1)
    if options.out:
        check_destination(options.out)
    print(_row(*COLUMNS), _row(*['---'] * len(COLUMNS)), sep='\n', flush=True)
    failed = []
    for recipe, batch in options.rows:
        try:
            found = measure(recipe, batch, options)
        except UserError as error:
            failed.append(f'{recipe}: {error}')
            continue
        found['versions'] = {
            name: importlib.metadata.version(name)
            for name in PACKAGES
            if importlib.util.find_spec(name)
        }
        if options.out:
            with open(options.out, 'a') as file:
                file.write(json.dumps(found) + '\n')
        print(*rows_of(found, recipe), sep='\n', flush=True)
        if 'train by timm' not in found['subjects']:
            failed.append(f'{recipe} by timm, as said above')
    if failed:
        raise UserError('not measured: ' + '; '.join(failed))


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a row's processes end, too
    cli.leave(main())
