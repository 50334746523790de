"""Where dsagen's log lines go: DSAGEN_LOG says how much, DSAGEN_LOG_DEST where to."""

from __future__ import annotations

import contextlib
import errno
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


class _LogFile(logging.FileHandler):
    """A log file that, where it cannot be written any more, says so once instead of once a line with a traceback."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            with contextlib.suppress(OSError):
                print(f"dsagen: DSAGEN_LOG_DEST={self.baseFilename!r}: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        # What could not be written is lost, and was told.
        with contextlib.suppress(OSError):
            super().close()


class _Owner:
    """What this module did to the logger: its own handler, and whether a command line decided for good."""

    handler: logging.Handler | None = None
    command_line: bool = False


def configure_logging(verbose: int = 0) -> None:
    """For a command line, which owns its process: level, one handler, and no way up to the root logger.

    `verbose` 1 means info, 2 debug, where the knob says less. Raises KnobError for a destination that cannot be opened.
    Calling it again replaces the handler.
    """
    level = _LEVELS[knobs.LOG.get()]
    if verbose:
        level = min(level, logging.INFO if verbose == 1 else logging.DEBUG)
    _replace_handler(_handler(knobs.LOG_DEST.get()))
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(level)
    logger.propagate = False
    _Owner.command_line = True


def configure_library_logging() -> None:
    """For a process that is somebody else's: obey the knobs that are set, on the `dsagen` logger alone.

    DSAGEN_LOG sets the level. A handler is added where DSAGEN_LOG_DEST asks for one, or where DSAGEN_LOG is set and
    no handler of the application would print the lines. With neither set nothing changes. Raises KnobError.
    """
    if _Owner.command_line:
        return
    logger = logging.getLogger(LOGGER_NAME)
    if knobs.LOG.is_set():
        logger.setLevel(_LEVELS[knobs.LOG.get()])
    _replace_handler(None)
    if knobs.LOG_DEST.is_set() or (knobs.LOG.is_set() and not logger.hasHandlers()):
        _replace_handler(_handler(knobs.LOG_DEST.get()))


def _replace_handler(handler: logging.Handler | None) -> None:
    """Take the own handler off and add another; those of the application stay."""
    logger = logging.getLogger(LOGGER_NAME)
    if _Owner.handler is not None:
        logger.removeHandler(_Owner.handler)
        _Owner.handler.close()
    if handler is not None:
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    _Owner.handler = handler


def _handler(destination: str) -> logging.Handler:
    if destination in ("stderr", "stdout"):
        return logging.StreamHandler(sys.stderr if destination == "stderr" else sys.stdout)
    try:
        if Path(destination).is_fifo():
            raise OSError(errno.EINVAL, "a pipe, whose reader would be waited for")
        return _LogFile(Path(destination))
    except OSError as error:
        raise KnobError(
            f"DSAGEN_LOG_DEST={destination!r}: cannot be written ({error.strerror}): name a file in an existing "
            "folder, stderr or stdout"
        ) from None
