"""Wheel and sdist: what they hold, and that they work without the checkout, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from dsagen.build import find_toolchain

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
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist of the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    (root,) = (found for found in folder.iterdir() if found.is_dir())
    return root


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment into which the wheel is installed; what it depends on is lent by this one."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    (site,) = folder.glob("lib/python3*/site-packages")
    # A folder that a .pth file names comes last, and its own .pth files, such as an editable install's, are not read.
    (site / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder


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


def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=sdist, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        names = [name for name in one.namelist() if not name.endswith("RECORD")]
        assert names == [name for name in other.namelist() if not name.endswith("RECORD")]
        assert all(one.read(name) == other.read(name) for name in names)


def test_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "dsagen/py.typed" in archive.namelist()


@pytest.mark.compile
def test_build_bundle_and_load_in_a_fresh_environment(environment: Path, tmp_path: Path) -> None:
    """As on a fresh machine: the installed command builds and packs; without nvcc, store and home the bundle loads."""
    nvcc = find_toolchain().nvcc
    home = tmp_path / "home"
    home.mkdir()
    command = str(environment / "bin" / "dsagen")
    bare = {"HOME": str(home), "PATH": "/usr/bin:/bin", "DSAGEN_NVCC": str(nvcc), "LANG": "C.UTF-8"}

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            arguments, cwd=tmp_path, env={**bare, **changes}, capture_output=True, text=True, check=False, timeout=300
        )

    built = run(command, "build", "v32_h16", "--arch", "sm_90a", "--json")
    assert built.returncode == 0, built.stderr
    kernels = json.loads(built.stdout)["kernels"]
    assert all(kernel["path"].startswith(str(home / ".cache" / "dsagen")) for kernel in kernels)
    packed = run(command, "bundle", "v32_h16", "--arch", "sm_90a", "-o", "kernels.dsagen")
    assert packed.returncode == 0, packed.stderr
    assert str(ROOT) not in built.stdout + packed.stdout
    nowhere = {"HOME": "/nonexistent", "PATH": str(tmp_path / "nothing"), "DSAGEN_NVCC": "/nonexistent/nvcc"}
    # A main kernel, since no shipped choice table names another, and a combine.
    verified = run(command, "verify", "kernels.dsagen", "--json", **nowhere)
    assert len(json.loads(verified.stdout)["bundles"][0]["kernels"]) == 2
    loading = run(str(environment / "bin" / "python"), "-c", LOAD_WITHOUT_DEVICE, **nowhere)
    assert (loading.returncode, loading.stdout) == (0, "2 kernels of v32_h16\n"), loading.stderr


LOAD_WITHOUT_DEVICE = """
import dsagen
from dsagen.build.bundle import read_bundle
from dsagen.matrix import expand
from dsagen.runtime.bundled import BundledCode
bundle = read_bundle(__import__("pathlib").Path("kernels.dsagen"))
chosen = bundle.choose(None)
cubins = BundledCode.of(bundle, chosen.kernels)(expand(chosen.spec, chosen.archs).plans())
assert all(cubin.startswith(b"\x7fELF") and plan.encode() for plan, cubin in cubins.items())
try:
    dsagen.load("kernels.dsagen").prepare()
except dsagen.errors.DeviceError:
    pass  # no device here: everything else has been looked at before one is looked for
print(len(cubins), "kernels of", chosen.spec.name)
"""


def test_the_package_declares_its_command_and_its_toolkit() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"dsagen": "dsagen.cli:main"}
    assert any(text.startswith("cuda-toolkit[nvcc,cccl]==") for text in project["optional-dependencies"]["toolkit"])
