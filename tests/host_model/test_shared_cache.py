"""Processes that compile the same unit share a folder, and must not see each other's half-written files."""

from __future__ import annotations

from pathlib import Path

import pytest
from host import write_source


def test_a_source_is_whole_whenever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "unit.cpp"
    write_source("first", path)
    seen: list[str] = []
    write = Path.write_text

    def writes_in_two_steps(self: Path, text: str, encoding: str) -> int:
        write(self, text[:2], encoding=encoding)
        seen.append(path.read_text())
        return write(self, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", writes_in_two_steps)
    write_source("second", path)
    assert seen == ["first"]
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]
