"""The emulator's machine is compiled once per content of its sources, not once per test run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsagen.emulator import library


@pytest.fixture(autouse=True, scope="session")
def shared_machine() -> Iterator[None]:
    folder = Path(tempfile.gettempdir()) / f"dsagen-emulator-{os.getuid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_folders", lambda: (folder,))
        yield
