"""What every test shares: an own kernel store, a clean environment, and an honest count of what did not run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from dsagen import knobs
from dsagen.build import find_toolchain
from dsagen.emulator import library
from dsagen.errors import ToolchainError
from dsagen.quantity import quantity
from dsagen.runtime.survey import survey_devices

# A deadline says how busy the machine is, and nothing of the code.
settings.register_profile("dsagen", deadline=None)
settings.load_profile("dsagen")

NOT_RUN: dict[str, list[str]] = {"gpu": [], "compile": []}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden and the README's tables")
    parser.addoption(
        "--all-mutants",
        action="store_true",
        help="mutants that make no difference on all inputs; every order; every arch",
    )


def _missing() -> dict[str, str]:
    """Marker -> why tests with it cannot run here."""
    missing = {}
    problem = survey_devices().problem
    if problem is not None:
        missing["gpu"] = problem
    try:
        find_toolchain()
    except ToolchainError as error:
        missing["compile"] = str(error).splitlines()[0]
    return missing


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # With `--dist loadgroup` a file's tests share a worker, and what they have compiled, unless they say otherwise.
        if item.get_closest_marker("spread") is None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    for marker, why in _missing().items():
        for item in items:
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=why))
                item.user_properties.append(("not_run", marker))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "setup" and report.skipped:
        for name, marker in report.user_properties:
            if name == "not_run":
                NOT_RUN[str(marker)].append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker, what in (("gpu", "a CUDA device"), ("compile", "nvcc")):
        if NOT_RUN[marker]:
            terminalreporter.write_line(
                f"{quantity(len(NOT_RUN[marker]), 'test')} did not run, for want of {what}", yellow=True
            )


@pytest.fixture(scope="session")
def session_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel store of this test run."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel store that all workers of this test run share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "shared-store"


@pytest.fixture(autouse=True)
def own_environment(session_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or writes the user's store, nor obeys a knob that the user has set."""
    for name in [name for name in os.environ if name.startswith(knobs.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(session_store))
    yield


@pytest.fixture
def common_store(own_environment: None, shared_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test builds, other tests of this run find, those of other workers, too."""
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))


@pytest.fixture
def no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shipped evidence, so that a test does not depend on what has been recorded."""
    monkeypatch.setattr("dsagen.evidence.shipped_folder", lambda: tmp_path / "no-evidence")


@pytest.fixture(scope="module")
def shared_machine() -> Iterator[None]:
    """The emulator's machine is compiled once per content of its sources, not once per test run.

    For a module and no longer: tests of how libraries are kept run in the same process.
    """
    folder = Path(tempfile.gettempdir()) / f"dsagen-emulator-{os.getuid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_folders", lambda: (folder,))
        yield
