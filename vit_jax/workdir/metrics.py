"""The numbers of a run, in metrics.jsonl (one object per line) and in TensorBoard events."""

import json
import os
import pathlib

from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.workdir import record

FILE = 'metrics.jsonl'


class MetricsLog:
    """Appends rows to WORKDIR/metrics.jsonl and to the TensorBoard events beside it.

    `rows` are all rows, including those of the runs that this one continues; `path` is that of
    metrics.jsonl. Only process 0 has the files; the others know the rows of the first step and what
    follows.
    """

    def __init__(self, workdir: str, start_step: int):
        """Opens the files, and drops the rows after `start_step`, which will be written again."""
        def keep_rows():
            self.rows = [row for row in read(workdir) if row['step'] <= start_step]
            record.write_text(self.path, ''.join(json.dumps(row) + '\n' for row in self.rows))
            return [row for row in self.rows if row['step'] == start_step]

        self.path = os.path.join(workdir, FILE)
        newest = consensus.from_main(keep_rows)
        self._file = self._writer = None
        if consensus.is_main():
            from clu import metric_writers  # imports TensorFlow, which reading does not need

            self._file = open(self.path, 'a', encoding='utf-8')  # noqa: SIM115 - for the whole run
            self._writer = metric_writers.SummaryWriter(workdir)
        else:
            self.rows = newest

    def write(self, step: int, values: dict[str, float]) -> None:
        """Adds one row, which survives the death of the process."""
        values = {name: float(value) for name, value in values.items()}
        self.rows.append({'step': step, **values})
        if self._file:
            self._file.write(json.dumps(self.rows[-1]) + '\n')
            self._file.flush()
            self._writer.write_scalars(step, values)
            self._writer.flush()

    def sync(self) -> None:
        """Waits until the rows are on disk, as a checkpoint that is about to be saved relies on."""
        if self._file:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._writer.close()


def read(workdir: str) -> list[dict[str, float]]:
    """Rows of a run's metrics, [] where there are none; UserError if a line is not JSON.

    Except for the last line, which is dropped, because a killed process may leave half of it.
    """
    path = pathlib.Path(workdir, FILE)
    lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f'{path}, line {number} is not JSON: {line[:80]!r}. Mend or remove '
                                'that line.') from error
    return rows
