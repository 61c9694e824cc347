"""train.log of a workdir, with the log lines of a run."""

import logging
import os
import sys

from vit_jax.errors import Formatter
from vit_jax.workdir import run_directory, storage_errors
from vit_jax.workdir.run_directory import LOG

log = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """A log file that is optional for the run: one warning reports that it cannot be written."""

    failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line; the first line opens the file."""
        try:
            if not self.failed:
                super().emit(record)
        except OSError:  # the file cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord | None) -> None:  # noqa: N802 - logging's name
        """Logs one warning, instead of a traceback for every line."""
        self.failed = True
        log.warning(
            '%s cannot be written (%s): the run continues without it',
            self.baseFilename,
            storage_errors.reason(sys.exc_info()[1]),
        )

    def close(self) -> None:
        """Closes the file. A line that could not be written is tried once more."""
        try:
            super().close()
        except OSError:
            if not self.failed:
                self.handleError(None)


def log_to(workdir: str) -> logging.Handler:
    """Creates the workdir and adds the log lines of this project to its train.log."""
    run_directory.make(workdir)
    handler = LogFile(os.path.join(workdir, LOG), encoding='utf-8', delay=True)
    handler.setFormatter(Formatter('%(asctime)s %(levelname)s %(message)s'))
    # The first handler logs its own warning before other handlers show the line that failed.
    logging.getLogger('vit_jax').handlers.insert(0, handler)
    return handler
