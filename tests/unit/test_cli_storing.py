"""`dsagen clear`, `compile-commands` and `completion`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_toolchain import FakeUnit, install_kit

from dsagen.arch import ARCHS
from dsagen.build import Store, build_units, find_toolchain
from dsagen.cli import main
from dsagen.spec import shipped_specs

ROOT = Path(__file__).resolve().parents[2]
SLUGS = ("topk-main-x-sm_90a", "topk-main-x-sm_80", "sparse_decode-main-x-sm_90a")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    install_kit(monkeypatch, tmp_path)
    build_units([replace(FakeUnit(), slug=slug) for slug in SLUGS], Store.open())
    return Store.open()


def left(store: Store) -> set[str]:
    return {entry.slug for entry in store.entries()}


def test_clear_takes_what_matches(store, capsys):
    assert main(["clear", "topk-*-sm_90a", "--json"]) == 0
    (name,) = json.loads(capsys.readouterr().out)["removed"]
    assert name.startswith("topk-main-x-sm_90a.")
    assert left(store) == set(SLUGS[1:])
    assert main(["clear", "topk-*", "no-such-*"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 kernel removed"
    assert main(["clear", "--all", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert left(store) == set()


def test_a_dry_run_removes_nothing(store, capsys):
    assert main(["clear", "--all", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 kernels would be removed"
    assert main(["clear", "--all", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["removed"], len(told["matching"])) == ([], 3)
    assert left(store) == set(SLUGS)


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["topk-*", "--all"]])
def test_clear_wants_a_pattern_or_all(store, capsys, arguments):
    assert main(["clear", *arguments]) == 2
    assert "a PATTERN of slugs" in capsys.readouterr().err
    assert left(store) == set(SLUGS)


def test_a_read_only_layer_is_left_alone(store, tmp_path, monkeypatch):
    (tmp_path / "store").rename(tmp_path / "layer")
    monkeypatch.setenv("DSAGEN_CACHE_DIR", f"{tmp_path / 'own'}:{tmp_path / 'layer'}")
    assert main(["clear", "--all"]) == 0
    assert left(Store([tmp_path / "layer"])) == set(SLUGS)


@pytest.mark.compile
def test_compile_commands_are_those_of_a_build(tmp_path, capsys):
    assert main(["compile-commands", "v32_h16", "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = json.loads(Path(told["path"]).read_text())
    assert rows == told["commands"] and len(rows) == 2
    assert Path(told["path"]) == tmp_path / "generated" / "compile_commands.json"
    for row in rows:
        assert row["arguments"][0] == str(find_toolchain().nvcc)
        assert Path(row["directory"], row["file"]).is_file()
    # The shorter one is run as it stands.
    row = min(rows, key=lambda row: Path(row["directory"], row["file"]).stat().st_size)
    subprocess.run(row["arguments"], cwd=row["directory"], check=True)
    assert ".target sm_90a" in Path(row["directory"], row["output"]).read_text()
    assert main(["compile-commands", "v32_h16", "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_of_each_shell(capsys, shell):
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "_DSAGEN_COMPLETE" in out and "dsagen" in out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("dsagen bu", {"build", "bundle"}),
        ("dsagen build v32_h", {name for name in shipped_specs() if name.startswith("v32_h")}),
        ("dsagen build v32_h16 --arch sm_12", {name for name in ARCHS if name.startswith("sm_12")}),
        ("dsagen list --arch sm_90a,sm_12", {f"sm_90a,{name}" for name in ARCHS if name.startswith("sm_12")}),
        ("dsagen clear --dr", {"--dry-run"}),
        ("dsagen check --tier f", {"full"}),
    ],
)
def test_completions(words, wanted):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_DSAGEN_COMPLETE": "bash_complete",
    }
    done = subprocess.run(
        [sys.executable, "-m", "dsagen"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    found = {line.partition(",")[2] for line in done.stdout.splitlines() if line.startswith("plain,")}
    assert found == wanted, done.stderr
