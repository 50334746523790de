"""Where dsagen's log lines go: DSAGEN_LOG says how much, DSAGEN_LOG_DEST where to."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from dsagen import knobs
from dsagen.errors import KnobError

LOGGER_NAME = "dsagen"
_LEVELS = {
    "quiet": logging.CRITICAL + 1,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_FORMAT = "dsagen %(levelname)s: %(message)s"


def configure_logging(verbose: int = 0) -> None:
    """Give the `dsagen` logger its level and its one handler, from the knobs; `verbose` 1 means info, 2 debug.

    Raises KnobError for a destination that cannot be opened. Calling it again replaces the handler.
    """
    level = _LEVELS[knobs.LOG.get()]
    if verbose:
        level = min(level, logging.INFO if verbose == 1 else logging.DEBUG)
    logger = logging.getLogger(LOGGER_NAME)
    handler = _handler(knobs.LOG_DEST.get())
    handler.setFormatter(logging.Formatter(_FORMAT))
    for old in logger.handlers:
        old.close()
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _handler(destination: str) -> logging.Handler:
    if destination in ("stderr", "stdout"):
        return logging.StreamHandler(sys.stderr if destination == "stderr" else sys.stdout)
    try:
        return logging.FileHandler(Path(destination))
    except OSError as error:
        raise KnobError(
            f"DSAGEN_LOG_DEST={destination!r}: cannot be written ({error.strerror}): name a file in an existing "
            "folder, stderr or stdout"
        ) from None
