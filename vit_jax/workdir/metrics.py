"""The metrics of a run, in metrics.jsonl (one object per line) and in TensorBoard events."""

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import TextIO

from vit_jax.errors import UserError
from vit_jax.evaluators.metric import Metric
from vit_jax.files import read_text, write_text
from vit_jax.processes import consensus
from vit_jax.workdir import descriptions, storage_errors

log = logging.getLogger(__name__)

FILE = 'metrics.jsonl'
ACCURACY = 'eval/accuracy'


class MetricsLog:
    """Appends rows to WORKDIR/metrics.jsonl and to TensorBoard events in the workdir.

    Attributes:
      path: the path of metrics.jsonl.
      rows: all rows, including the rows from before the run was resumed. Only process 0 has the
        files; the other processes have the rows of evaluations, of the first step and of later
        steps.
    """

    def __init__(self, workdir: str):
        """Creates a log without rows. Call `open` before writing."""
        self.path = os.path.join(workdir, FILE)
        self.rows: list[dict[str, float]] = []
        self._workdir = workdir
        self._crc = 0
        self._file: TextIO | None = None
        self._writer = None

    def open(self, start_step: int) -> None:
        """Opens the files and drops the rows after `start_step`, which the run writes again."""

        def keep_rows():
            self.rows = [row for row in read(self._workdir) if row['step'] <= start_step]
            self._crc = _crc(self.rows)
            if start_step and not self.rows:
                log.warning(
                    '%s has no row up to step %d: the curves begin there.', self.path, start_step
                )
            self._rewrite()
            return [
                row
                for row in self.rows
                if row['step'] == start_step or any(map(descriptions.is_scored, row))
            ]

        rows_for_others = consensus.from_main(keep_rows)
        if consensus.is_main():
            from clu import metric_writers  # it imports TensorFlow, which reading does not need

            self._writer = metric_writers.SummaryWriter(self._workdir)
        else:
            self.rows = rows_for_others

    def write(self, step: int, values: dict[str, float]) -> None:
        """Adds one row and flushes it, so that it survives the end of the process.

        If the disk is full, the row is written with the next checkpoint.
        """
        values = {name: float(value) for name, value in values.items()}
        self.rows.append({'step': step, **values})
        self._crc = _crc(self.rows[-1:], self._crc)
        if self._file:
            try:
                self._file.write(json.dumps(self.rows[-1]) + '\n')
                self._file.flush()
            except (OSError, ValueError) as error:  # ValueError: the file could not be opened again
                self._warn(self.path, error)
                self._complete = False
        if self._writer:
            try:
                self._writer.write_scalars(step, values)
                self._writer.flush()
            except Exception as error:  # TensorFlow raises its own kinds
                self._warn('TensorBoard events', error)
                self._writer = None

    def summary(self) -> list[int]:
        """The number of rows and their checksum, for `compare` when the run resumes."""
        return [len(self.rows), self._crc]

    def compare(self, summary: list[int] | None) -> None:
        """Warns if the rows differ from a `summary`.

        Reading alone cannot detect a flipped bit that turns a digit into another digit.
        """
        if not consensus.is_main() or not self.rows:
            return
        count, crc = summary or (0, 0)
        steps = [row['step'] for row in self.rows]
        is_sorted = steps == sorted(steps)
        if not is_sorted or len(steps) < count or _crc(self.rows[:count]) != crc:
            log.warning(
                '%s has changed since this run saved its checkpoint: a row was changed or added, '
                'or is missing. The run uses the rows as they are.',
                self.path,
            )

    def _warn(self, name, error):
        if self._complete:
            log.warning('%s cannot be written (%s)', name, storage_errors.reason(error) or error)

    def sync(self) -> None:
        """Waits until the rows are on disk; a checkpoint relies on them.

        Raises:
          UserError: the rows cannot be written.
        """
        if self._file and self._complete:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._warn(self.path, error)
                self._complete = False
        if self._file and not self._complete:
            with contextlib.suppress(OSError):  # close() tries to write the row again
                self._file.close()
            self._rewrite()

    def _rewrite(self):
        write_text(self.path, ''.join(json.dumps(row) + '\n' for row in self.rows))
        self._file = open(self.path, 'a', encoding='utf-8')  # noqa: SIM115 - for the whole run
        self._complete = True

    def close(self) -> None:
        for file in (self._file, self._writer):
            if file is not None:
                with contextlib.suppress(Exception):  # close() tries to write the rest again
                    file.close()


def read(workdir: str) -> list[dict[str, float]]:
    """Reads the rows of metrics.jsonl; returns [] if there is no file.

    An incomplete last line is dropped, because a killed process may leave one.

    Raises:
      UserError: the file cannot be read, or a line is not a row.
    """
    path = os.path.join(workdir, FILE)
    try:
        text = read_text(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(
            f'{path} cannot be read ({error}): expected one JSON object per line. '
            'Restore the file, or move it away to continue without its rows.',
            kind='unreadable',
            file=path,
        ) from error
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(line))
        except (ValueError, RecursionError) as error:
            is_last = number == len(lines) and not text.endswith('\n')
            if not is_last or not isinstance(error, json.JSONDecodeError):
                raise UserError(
                    f'{path}, line {number} is {line[:80]!r}: expected '
                    '{"step": NUMBER, "NAME": NUMBER, ...}. Fix or remove that line.',
                    kind='content',
                    file=path,
                    value=line[:80],
                ) from error
            log.warning('%s ends within line %d: dropping that row, %r', path, number, line[:80])
    return rows


def _crc(rows, start=0):
    return zlib.crc32(''.join(json.dumps(row) + '\n' for row in rows).encode(), start)


def _row(line):
    row = json.loads(line)
    if (
        not isinstance(row, dict)
        or not isinstance(row.get('step'), int)
        or not all(isinstance(value, int | float) for value in row.values())
    ):
        raise ValueError('not a row')
    return row


def scores(rows: Iterable[Mapping[str, float]], name: str) -> dict[int, float]:
    """The values of one metric by step, from the rows that have it."""
    return {int(row['step']): row[name] for row in rows if name in row}


def best(values: Mapping[int, float], steps: Iterable[int], metric: Metric) -> int | None:
    """The step of the best value of a metric, or None. Ties go to the newest step."""
    return max(
        (step for step in steps if step in values),
        default=None,
        key=lambda step: (metric.goodness(values[step]), step),
    )


def since_best(values: Mapping[int, float], metric: Metric) -> int:
    """Number of values, in the order of steps, that follow the first best value."""
    if not values:
        return 0
    goodness = [metric.goodness(values[step]) for step in sorted(values)]
    return len(goodness) - 1 - goodness.index(max(goodness))
