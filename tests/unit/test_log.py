"""Logging: a command line owns its process, a library touches the `dsagen` logger alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsagen import log
from dsagen.errors import KnobError
from dsagen.log import configure_library_logging, configure_logging

LOGGER = logging.getLogger("dsagen")
CHILD = logging.getLogger("dsagen.build.builder")


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A process that has configured nothing. Its root logger is another, as pytest hangs handlers on the real one."""
    monkeypatch.setattr(log._Owner, "handler", None)
    monkeypatch.setattr(log._Owner, "command_line", False)
    monkeypatch.setattr(LOGGER, "parent", logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "propagate", True)
    before = LOGGER.level
    LOGGER.setLevel(logging.NOTSET)
    assert LOGGER.parent is not None
    yield LOGGER.parent
    LOGGER.setLevel(before)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_without_knobs_a_library_changes_nothing() -> None:
    configure_library_logging()
    assert (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == ([], logging.NOTSET, True)


def test_the_level_reaches_the_applications_handler_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: logging.Logger
) -> None:
    application = Kept()
    root.addHandler(application)
    monkeypatch.setenv("DSAGEN_LOG", "info")
    configure_library_logging()
    CHILD.info("compiled")
    CHILD.debug("looked up")
    assert application.lines == ["compiled"]
    assert LOGGER.handlers == []
    assert root.handlers == [application]
    assert capsys.readouterr().err == ""


def test_where_nobody_would_print_the_lines_they_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: logging.Logger
) -> None:
    monkeypatch.setenv("DSAGEN_LOG", "debug")
    configure_library_logging()
    configure_library_logging()
    CHILD.debug("looked up")
    assert capsys.readouterr().err == "dsagen DEBUG: looked up\n"
    assert root.handlers == []


def test_a_destination_is_written_beside_the_applications_handlers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    application = Kept()
    LOGGER.addHandler(application)
    monkeypatch.setenv("DSAGEN_LOG_DEST", str(tmp_path / "log"))
    configure_library_logging()
    CHILD.warning("slow")
    assert application.lines == ["slow"]
    assert (tmp_path / "log").read_text() == "dsagen WARNING: slow\n"
    monkeypatch.delenv("DSAGEN_LOG_DEST")
    configure_library_logging()
    assert LOGGER.handlers == [application]


def test_a_command_line_decides_for_good(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DSAGEN_LOG", "error")
    configure_logging(verbose=2)
    configure_library_logging()
    CHILD.debug("looked up")
    assert capsys.readouterr().err == "dsagen DEBUG: looked up\n"
    assert LOGGER.propagate is False


@pytest.mark.parametrize(
    ("name", "value"), [("DSAGEN_LOG", "loud"), ("DSAGEN_LOG_DEST", "log.txt"), ("DSAGEN_LOG_DEST", "/missing/log")]
)
def test_load_refuses_a_bad_knob_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, root: logging.Logger, name: str, value: str
) -> None:
    import dsagen

    monkeypatch.setenv(name, value)
    with pytest.raises(KnobError, match=name):
        dsagen.load("v32_h16")
    assert root.handlers == []
