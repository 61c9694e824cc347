"""report.html: one page about a run or a fit, or a page that compares runs, in one file.

In: workdirs, or the content of a fit. Out: plain data from the files, the data and the models of
the runs (`collect` and the modules that it calls), charts of these in Vega-Lite (`charts`), and a
page of HTML (`page` for runs, `fit_page` for a fit).
Imports errors, files, models, config, processes, data, workdir, weights, inspection, evaluators,
training and scoring; only this package uses Jinja2 and Vega.
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
# Limits of the evaluation for the page of a finished run.
IMAGES = 2000
SECONDS = 60


def record_recipe(workdir: str, recipe: Mapping[str, Any]) -> None:
    """Writes the recipe of a run, for collect.reference_of; logs a warning if that fails.

    Args:
      workdir: the workdir of the run.
      recipe: `file` and `config`, by dotted field, of --config.
    """
    if not consensus.is_main():
        return
    try:
        write_json(os.path.join(workdir, record.RECIPE), recipe)
    except UserError as error:
        log.warning(
            'Did not write %s, so pages of the run compare it with the defaults: %s',
            record.RECIPE,
            error,
        )


def conclude(workdir: str, images: int = IMAGES) -> None:
    """Writes the page of a finished run; logs a warning if that fails.

    Only process 0 writes. In a run of several processes the page has only the content of the
    workdir's files, because all processes would have to run the model together. The page explains
    how to add the rest.

    Args:
      workdir: the workdir of the run.
      images: largest number of evaluated images; 0 uses only the workdir's files.
    """
    if not consensus.is_main():
        return
    path = os.path.join(workdir, FILE)
    with warning_if_not_written(path, _again('The run is', workdir)):
        from vit_jax.reporting import collect, page  # a missing package must not fail the run

        if consensus.count() > 1:
            images = 0
        write_text(path, page.of_one(collect.run(workdir, images, SECONDS)))
        _log_page(path)


def conclude_all(directory: str, notes: Mapping[str, str]) -> None:
    """Writes DIRECTORY/report.html, which compares runs; logs a warning if that fails.

    The page has only the content of files, not of models and data, so it takes seconds for any
    number of runs.

    Args:
      directory: contains the workdirs.
      notes: the note of each run, such as 'diverges' or '', by workdir; they are saved in
        collect.NOTES.
    """
    path = os.path.join(directory, FILE)
    with warning_if_not_written(path, _again('All runs are', directory)):
        from vit_jax.reporting import collect, page

        write_json(
            os.path.join(directory, collect.NOTES),
            {os.path.relpath(workdir, directory): note for workdir, note in notes.items()},
        )
        runs = [collect.run(workdir, 0) for workdir in notes]
        write_text(path, page.of_several(runs, list(notes.values())))
        _log_page(path)


def _log_page(path):
    log.info('  report      %s', path)  # the last line of the log of a finished run


def _again(done, workdir):
    return f'{done} complete; python -m vit_jax.report {shlex.quote(workdir)} tries again.'


@contextlib.contextmanager
def warning_if_not_written(path: str, advice: str) -> Iterator[None]:
    """Converts any error to a warning: training is complete with or without the page.

    Args:
      path: the page that the context writes.
      advice: the end of the warning: what is complete, and how to try again.
    """
    try:
        yield
    except Exception as error:
        log.warning(
            'Did not write %s (%s: %s). %s',
            path,
            type(error).__name__,
            str(error).partition('\n')[0],
            advice,
        )
