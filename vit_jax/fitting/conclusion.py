"""The end of a fit: its page, and the last lines in the terminal."""

import dataclasses
import logging
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax import reporting
from vit_jax.data.photo_table import Row
from vit_jax.errors import counted
from vit_jax.files import write_text
from vit_jax.fitting import budget, outcome, tries
from vit_jax.fitting.collect import SPLITS, TEST, VALIDATION
from vit_jax.fitting.outcome import Outcome
from vit_jax.fitting.suspects import Suspect
from vit_jax.fitting.tries import Score
from vit_jax.workdir import metrics, progress

if TYPE_CHECKING:
    from vit_jax.reporting import fit_page

log = logging.getLogger(__name__)

TRIES, RUN = 'tries', 'run'
TABLES = ('photos.csv', 'suspects.csv', outcome.MISTAKES, outcome.CONFUSION)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A complete fit.

    Attributes:
      folder: with everything that is written.
      entries: of fit.json, by stage.
      rows: all good photos, with their splits.
      class_names: in the order of their numbers.
      model: the path of the calibrated model.
      best: the path of the model that is calibrated.
      probe: the path of the linear probe.
      outcome: the scores of the calibrated model.
      suspects: all photos, the most suspicious first.
    """

    folder: str
    entries: Mapping[str, Any]
    rows: Sequence[Row]
    class_names: Sequence[str]
    model: str
    best: str
    probe: str
    outcome: Outcome
    suspects: Sequence[Suspect]

    def doubtful(self) -> list[Suspect]:
        """The photos with another class that is more probable than their label."""
        return [suspect for suspect in self.suspects if suspect.margin() > 0]


def conclude(fit: Fit) -> None:
    """Write all pages, and log the last lines; a page that fails is a warning."""
    path = os.path.join(fit.folder, reporting.FILE)
    comparison = _write_pages_of_runs(fit)
    page = ''
    with reporting.warning_if_not_written(
        path, 'The fit is complete; the same command writes the page again.'
    ):
        from vit_jax.reporting import fit_page  # a missing package must not fail the fit

        write_text(path, fit_page.of_fit(content(fit, comparison)))
        page = path
    log.info('%s', '\n'.join(last_lines(fit, page)))


def _write_pages_of_runs(fit):
    """Write a page for each run, and the page that compares them.

    The pages of the tries have no predictions, which would take a minute each.

    Returns:
      The path of the page that compares them, from the folder of the fit; '' without runs.
    """
    notes = {}
    for path, score in _scores_of_runs(fit.entries).items():
        workdir = os.path.join(fit.folder, path)
        notes[workdir] = ''
        if score is None:
            notes[workdir] = 'diverges'
        if not os.path.exists(os.path.join(workdir, reporting.FILE)):
            reporting.conclude(workdir, reporting.IMAGES if path == RUN else 0)
    if notes.keys() <= {os.path.join(fit.folder, RUN)}:  # there are no tries
        return ''
    reporting.conclude_all(os.path.join(fit.folder, TRIES), notes)
    return _existing(fit.folder, os.path.join(TRIES, reporting.FILE))


def _scores_of_runs(entries):
    """The score of each run, None where it diverges, by its path from the folder of the fit."""
    scores = {}
    for stage, score in entries.items():
        if stage.startswith('try '):
            scores[os.path.join(TRIES, stage.removeprefix('try '))] = score
    if RUN in entries:
        scores[RUN] = entries[RUN]
    return scores


def _existing(folder, path):
    """A path from the folder, '' if the file does not exist."""
    if os.path.exists(os.path.join(folder, path)):
        return path
    return ''


def content(fit: Fit, comparison: str) -> 'fit_page.Content':
    """The content of the page.

    Args:
      fit: a complete fit.
      comparison: the path of the page that compares the runs, from the folder of the fit.
    """
    from vit_jax.reporting import fit_page

    doubtful = fit.doubtful()
    of_split = Counter(row.split for row in fit.rows)
    settings = fit.entries['settings']
    return fit_page.Content(
        name=os.path.basename(os.path.abspath(fit.folder)),
        settings=settings,
        class_names=fit.class_names,
        splits={split: of_split[split] for split in SPLITS},
        scored_on=TEST,
        chosen_on=VALIDATION,
        outcome=fit.outcome.as_json(),
        mistakes=[fit_page.Example(*mistake) for mistake in fit.outcome.mistakes],
        suspects=[fit_page.Example(*suspect) for suspect in doubtful],
        num_suspects=len(doubtful),
        scan=fit.entries['scan'],
        duplicates=fit.entries['duplicates'],
        attempts=attempts(fit),
        comparison=comparison,
        files=[name for name in TABLES if _existing(fit.folder, name)],
        commands=next_commands(fit),
    )


def attempts(fit: Fit) -> list['fit_page.Attempt']:
    """Every model that was trained, in the order of training."""
    from vit_jax.reporting.fit_page import Attempt

    plan = budget.from_json(fit.entries['plan'])
    probe = fit.entries['probe']
    result = [
        Attempt(
            name='linear probe',
            learning_rate=None,
            is_augmented=False,
            steps=None,
            score=Score(*probe['score']).accuracy,
            seconds=probe['seconds'],
            page='',
            is_chosen=fit.best == fit.probe,
        )
    ]
    scores = _scores_of_runs(fit.entries)
    scores_of_tries = {
        os.path.basename(path): score for path, score in scores.items() if path != RUN
    }
    planned = [
        (os.path.join(TRIES, name), rate, is_augmented)
        for name, rate, is_augmented in tries.plan_of_tries(plan, scores_of_tries)
    ]
    scored = [item for item in planned if scores.get(item[0])]
    if RUN in scores:
        rate = plan.rates[0]
        is_augmented = False
        if scored:
            best = max(scored, key=lambda item: Score(*scores[item[0]]).goodness())
            _, rate, is_augmented = best
        planned.append((RUN, rate, is_augmented))
    for path, rate, is_augmented in planned:
        workdir = os.path.join(fit.folder, path)
        rows = metrics.read(workdir)
        accuracy = None
        if scores[path] is not None:
            accuracy = Score(*scores[path]).accuracy
        result.append(
            Attempt(
                name='long run' if path == RUN else f'try {os.path.basename(path)}',
                learning_rate=rate,
                is_augmented=is_augmented,
                steps=int(rows[-1]['step']) if rows else 0,
                score=accuracy,
                seconds=progress.taken(rows, plan.batch_size),
                page=_existing(fit.folder, os.path.join(path, reporting.FILE)),
                is_chosen=fit.best == workdir,
            )
        )
    return result


def next_commands(fit: Fit) -> list[tuple[str, str]]:
    """(purpose, command) of the next steps; each command is quoted for a shell."""
    photos = os.path.dirname(fit.rows[0].file)

    def command(name, *arguments):
        return shlex.join(['python', '-m', f'vit_jax.{name}', *arguments])

    def written(name):
        return os.path.join(fit.folder, name)

    return [
        (
            'Classify photos: name your own files or folders.',
            command('predict', f'--pretrained={fit.model}', photos),
        ),
        (
            'Export the model to ONNX, which runs without vit_jax.',
            command('convert', fit.model, written('model.onnx'), '--to=onnx'),
        ),
        (
            'Make a folder whose page classifies photos in a browser.',
            command('convert', fit.model, written('web'), '--to=web'),
        ),
    ]


def last_lines(fit: Fit, page: str) -> list[str]:
    """The last lines of the command.

    Args:
      fit: a complete fit.
      page: the path of its page; '' if it is not written.
    """
    suspects = os.path.join(fit.folder, 'suspects.csv')
    report = []
    if page:
        report.append(f'Report: {page}')
    return [
        *outcome.lines(fit.outcome, TEST),
        f'{counted(len(fit.doubtful()), "photo")} may have a wrong label: the first rows of '
        f'{suspects}',
        *report,
        'Next:',
        *[f'  {command}' for _, command in next_commands(fit)],
    ]
