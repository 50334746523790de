"""The wheel: what it holds, and that it works without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as an import path."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(installed: Path, cwd: Path, *arguments: str) -> str:
    """The command line of the extracted wheel, away from the checkout."""
    done = subprocess.run(
        [sys.executable, "-m", "dsagen", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", ["templates", "specs", "evidence"])
def test_the_wheel_holds_every_data_file(wheel: Path, folder: str) -> None:
    source = ROOT / ("tests/evidence" if folder == "evidence" else folder)
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    prefix = f"dsagen/_data/{folder}/"
    with zipfile.ZipFile(wheel) as archive:
        found = {name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix)}
    assert wanted
    assert found == wanted


def test_the_wheel_holds_every_module_and_nothing_of_the_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dsagen").rglob("*.py")}
    assert modules <= set(names)
    assert all(name.startswith(("dsagen/", "dsagen-")) for name in names)


def test_the_wheel_renders_what_the_checkout_renders(installed: Path, tmp_path: Path) -> None:
    files = json.loads(run_installed(installed, tmp_path, "render", "v32_h16", "--out", "installed", "--json"))["files"]
    rendered = json.loads(run_installed(ROOT, tmp_path, "render", "v32_h16", "--out", "checkout", "--json"))["files"]
    assert len(files) == len(rendered) == 2
    for one, other in zip(files, rendered, strict=True):
        assert (tmp_path / one["path"]).read_bytes() == (tmp_path / other["path"]).read_bytes()


def test_the_wheel_lists_its_own_specs(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(run_installed(installed, tmp_path, "list", "--json"))["specs"]
    assert [spec["spec"] for spec in listed] == sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


def test_the_package_declares_its_command_and_its_toolkit() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"dsagen": "dsagen.cli:main"}
    assert any(text.startswith("cuda-toolkit[nvcc,cccl]==") for text in project["optional-dependencies"]["toolkit"])
