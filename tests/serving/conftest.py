"""The emulator's machine is compiled once per content of its sources, not once per test run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def machine(shared_machine: None) -> None:
    """Every test here runs the machine."""
