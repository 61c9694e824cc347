"""report.html: one page that shows a run, or sets several side by side, without any other file.

In: workdirs. Out: plain data of what their files, their data and their models say (`collect` and
what it calls), charts of these in Vega-Lite (`charts`), and a page of HTML (`page`). Imports
errors, files, models, config, processes, data, workdir, weights, inspection, evaluators, training
and scoring; only this room uses Jinja2 and Vega.
"""

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.files import write_json, write_text
from vit_jax.processes import consensus
from vit_jax.workdir import record

log = logging.getLogger(__name__)

FILE = 'report.html'
# At the end of a run: so many images, and no longer than so many seconds, whichever comes first.
IMAGES, SECONDS = 2000, 60


def record_recipe(workdir: str, recipe: Mapping[str, Any]) -> None:
    """Writes what a run departs from, see collect.reference_of, or one line of the log."""
    if consensus.is_main():
        try:
            write_json(os.path.join(workdir, record.RECIPE), recipe)
        except UserError as error:
            log.warning(
                '%s is not written, and pages of the run will not say what it departs from: %s',
                record.RECIPE,
                error,
            )


def conclude(workdir: str) -> None:
    """Writes the page of a run that is complete; where that fails, one line of the log says so.

    Only process 0 writes. Of several processes none uses the model, which all would have to do
    together: the page then has what the files of the workdir say, and how to add the rest.
    """
    if not consensus.is_main():
        return
    path = os.path.join(workdir, FILE)
    with _attempt(path, 'The run is', workdir):
        from vit_jax.reporting import collect, page  # what is missing must not end the run

        run = collect.run(workdir, IMAGES if consensus.count() == 1 else 0, SECONDS)
        write_text(path, page.of_one(run))


def conclude_all(directory: str, notes: Mapping[str, str]) -> None:
    """Writes DIRECTORY/report.html, which sets runs side by side, or one line of the log.

    `notes` has what is to be said of each run, by workdir, such as 'diverges', or ''; they are kept
    in collect.NOTES. The page has what files say: models and data are not used, so that it takes
    seconds for any number.
    """
    path = os.path.join(directory, FILE)
    with _attempt(path, 'All runs are', directory):
        from vit_jax.reporting import collect, page

        write_json(
            os.path.join(directory, collect.NOTES),
            {os.path.relpath(workdir, directory): note for workdir, note in notes.items()},
        )
        runs = [collect.run(workdir, 0) for workdir in notes]
        write_text(path, page.of_several(runs, list(notes.values())))


@contextlib.contextmanager
def _attempt(path: str, done: str, workdir: str) -> Iterator[None]:
    """What has trained is complete, with or without a page: a failure is one line of the log."""
    try:
        yield
        log.info('  report      %s', path)  # the last line of what a run says when it is done
    except Exception as error:
        log.warning(
            '%s is not written (%s: %s). %s complete; python -m vit_jax.report %s tries again.',
            path,
            type(error).__name__,
            str(error).partition('\n')[0],
            done,
            shlex.quote(workdir),
        )
