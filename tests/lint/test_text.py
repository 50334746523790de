"""House rules that a linter does not know: environment access, names, lengths, promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sorted(path for folder in ("dsagen", "tests") for path in (ROOT / folder).rglob("*.py"))
DEVICE = sorted(path for path in (ROOT / "templates").rglob("*") if path.is_file())
for folder in ("dsagen/emulator/vm", "dsagen/runtime/native_c"):
    DEVICE += sorted(path for path in (ROOT / folder).iterdir() if path.is_file())
PACKAGE = [path for path in PYTHON if path.is_relative_to(ROOT / "dsagen")]

MOST_LINES = 500
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "stuff"}
# Spelled in halves, for this file is searched too.
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK|WI" r"P)\b")
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def relative_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def environment_uses(tree: ast.AST) -> list[int]:
    """Lines that touch the process environment."""
    lines = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in ENVIRONMENT_NAMES]
    return lines


@pytest.mark.parametrize("path", PACKAGE, ids=relative_name)
def test_only_knobs_reads_the_environment(path: Path) -> None:
    if path.name != "knobs.py":
        assert environment_uses(ast.parse(path.read_text())) == []


def test_the_environment_rule_finds_each_spelling() -> None:
    for code in ("import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"):
        assert environment_uses(ast.parse(code))


@pytest.mark.parametrize("path", PYTHON + DEVICE, ids=relative_name)
def test_names_say_what_is_inside(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    assert not VAGUE_NAMES & {part.removesuffix(".cu") for part in parts}


@pytest.mark.parametrize("path", PYTHON + DEVICE, ids=relative_name)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", PYTHON + DEVICE, ids=relative_name)
def test_nothing_is_left_unfinished(path: Path) -> None:
    found = [line for line in path.read_text().splitlines() if UNFINISHED.search(line)]
    assert found == []
