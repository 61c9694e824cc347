"""Where a run writes its numbers: metrics.jsonl, one object a line, and TensorBoard events."""

import json
import os

from vit_jax.errors import UserError
from vit_jax.processes import hosts

# Measured against the clock or the machine: these differ between equal runs.
TIMED = ('train/images_per_sec', 'train/data_wait', 'train/eta_sec', 'train/flops_per_sec',
         'train/mfu', 'train/memory_gb', 'eval/seconds')


class MetricsLog:
    """Appends rows to WORKDIR/metrics.jsonl and, when it is there, to a TensorBoard writer.

    Only process 0 has the files; the others know what was written at and after the first step.

    Attributes:
      rows: everything written so far, also by the runs that this one continues.
    """

    def __init__(self, workdir: str, start_step: int, writer=None):
        """Opens the file and cuts what lies after the step that the run continues from.

        Args:
          start_step: rows of later steps are of a run that was lost; they will be written again.
          writer: a clu.metric_writers.MetricWriter or None.
        """
        self._path = os.path.join(workdir, 'metrics.jsonl')
        self._writer = writer
        self.rows = []
        newest = hosts.from_main(lambda: self._begin(start_step))
        self._file = None
        if hosts.is_main():
            self._file = open(self._path, 'a', encoding='utf-8')  # noqa: SIM115 - for the whole run
        else:
            self.rows = newest

    def write(self, step: int, values: dict[str, float]) -> None:
        """Adds one row; it survives the death of the process."""
        values = {name: float(value) for name, value in values.items()}
        self.rows.append({'step': step, **values})
        if self._file is not None:
            self._file.write(json.dumps(self.rows[-1]) + '\n')
            self._file.flush()
        if self._writer is not None:
            self._writer.write_scalars(step, values)
            self._writer.flush()

    def has(self, step: int, name: str) -> bool:
        """Whether a value of that name was written at that step."""
        return any(row['step'] == step and name in row for row in self.rows)

    def sync(self) -> None:
        """Makes sure that the rows are on disk before a checkpoint that says they are."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes both."""
        for opened in (self._file, self._writer):
            if opened is not None:
                opened.close()

    def _begin(self, start_step):
        """Reads and cuts the file; returns the rows of the step that the run continues from."""
        self.rows = [row for row in read(self._path) if row['step'] <= start_step]
        _replace(self._path, ''.join(json.dumps(row) + '\n' for row in self.rows))
        return [row for row in self.rows if row['step'] == start_step]


def read(path: str) -> list[dict[str, float]]:
    """Rows of a metrics.jsonl, [] when there is none.

    A last line that a killed process left half written is dropped.

    Raises:
      UserError: another line is not JSON.
    """
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf-8') as file:
        lines = file.read().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f'{path}, line {number} is not JSON: {line[:80]!r}. Mend or remove '
                                'that line.') from error
    return rows


def _replace(path: str, text: str) -> None:
    with open(path + '.tmp', 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)
