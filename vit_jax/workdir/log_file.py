"""train.log of a workdir, which takes the log lines of a run."""

import logging
import os
import sys

from vit_jax.errors import Formatter
from vit_jax.workdir import run_directory, storage_errors
from vit_jax.workdir.run_directory import LOG

log = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """A log file without which the run goes on, after one message, when it cannot be written."""

    failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, and opens the file for the first one."""
        try:
            if not self.failed:
                super().emit(record)
        except OSError:  # it cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord | None) -> None:  # noqa: N802 - the name of logging
        """Says what is wrong, once, instead of a traceback for every line."""
        self.failed = True
        log.warning(
            '%s cannot be written (%s): the run goes on without it',
            self.baseFilename,
            storage_errors.reason(sys.exc_info()[1]),
        )

    def close(self) -> None:
        """Closes the file, which tries once more to write a line that it could not."""
        try:
            super().close()
        except OSError:
            if not self.failed:
                self.handleError(None)


def log_to(workdir: str) -> logging.Handler:
    """Adds the project's log lines to the workdir's train.log, and makes the directory."""
    run_directory.make(workdir)
    handler = LogFile(os.path.join(workdir, LOG), encoding='utf-8', delay=True)
    handler.setFormatter(Formatter('%(asctime)s %(levelname)s %(message)s'))
    # First, so that what it has to say of itself stands before the line that it could not write.
    logging.getLogger('vit_jax').handlers.insert(0, handler)
    return handler
