"""Libraries that dsagen compiles for itself: whole or made anew, whatever has become of their files."""

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsagen import kept_library
from dsagen.cli import main
from dsagen.emulator import library
from dsagen.errors import StoreError, ToolchainError
from dsagen.kept_library import boot_mark, obtain, problem

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
NAME = "vm-0123456789abcdef.so"


@pytest.fixture
def small_machine(monkeypatch, tmp_path):
    """A machine that compiles at once, so that the emulator's own code can be seen to fetch it."""
    sources = tmp_path / "vm"
    sources.mkdir()
    (sources / "machine.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(library, "SOURCES", sources)
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def fetch() -> Path:
    """The machine's file, as `load_library` gets it."""
    return obtain(library.WHAT, library._name(), library._folders(), library._compile_in)


def answer(path: Path) -> str:
    """What the library says, in a process of its own: a damaged one would end this one."""
    code = f"import ctypes; print(ctypes.CDLL({str(path)!r}).answer())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(4096)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 3000)


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def without_checksum(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: -kept_library._TRAILER_BYTES])


DAMAGE = [cut, empty, garbage, one_bit, without_checksum]


def test_it_is_compiled_once_and_loads(small_machine, monkeypatch):
    path = fetch()
    assert path.parent == small_machine / "emulator" and path.name.startswith("vm-")
    assert ctypes.CDLL(str(path)).answer() == 42
    monkeypatch.setenv("PATH", "/nowhere")  # what is kept needs no compiler
    assert fetch() == path
    assert library.is_kept()
    assert {item.name for item in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_set_aside_and_made_anew(small_machine, damage, caplog):
    path = fetch()
    damage(path)
    assert not library.is_kept()
    assert fetch() == path
    assert (problem(path), answer(path)) == (None, "42")
    assert path.with_name(f"{path.name}.broken").is_file()
    assert f"{path} was broken; kept as {path.name}.broken" in caplog.text


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_looks_at_libraries(small_machine, damage, capsys):
    path = fetch()
    assert main(["verify"]) == 0
    assert f"{small_machine}: 1 library whole, 0 broken" in capsys.readouterr().out
    damage(path)
    assert main(["verify", "--json"]) == 3
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["store"][0]["broken_libraries"]) == [f"emulator/{path.name}"]
    assert f"1 entries of the kernel store are broken:\n  {small_machine}: emulator/{path.name}: " in captured.err


def test_the_library_of_a_read_only_layer_is_used_as_it_is(small_machine, monkeypatch, tmp_path):
    path = fetch()
    monkeypatch.setenv("DSAGEN_CACHE_DIR", f"{tmp_path / 'upper'}:{small_machine}")
    assert fetch() == path
    assert not (tmp_path / "upper").exists()
    one_bit(path)  # a broken one there is passed over, and left to whom it belongs
    assert fetch().parent == tmp_path / "upper" / "emulator"
    assert problem(path) is not None


@pytest.mark.parametrize("root", ["/proc/nothing/here", "file"])
def test_a_store_that_cannot_be_written(small_machine, monkeypatch, tmp_path, root):
    (tmp_path / "file").write_text("")
    place = tmp_path / root
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(place))
    with pytest.raises(StoreError) as raised:
        fetch()
    said = str(raised.value)
    assert said.startswith(
        "the emulator's machine is not in the kernel store yet, and no folder of it can be written: "
    )
    assert f"{place / 'emulator'} (" in said and "set DSAGEN_CACHE_DIR to a folder that can be written" in said
    assert raised.value.exit_code == 3


def test_a_package_is_no_place_to_write(small_machine, monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "site-packages" / "x"))
    with pytest.raises(StoreError, match="inside an installed package"):
        fetch()


def test_a_file_that_does_not_load_names_the_store(small_machine, monkeypatch):
    path = fetch()
    path.write_bytes(b"no ELF file")
    kept_library._make(path, lambda folder: Path(shutil.copy(path, folder / "x")))  # a checksum of garbage
    library.load_library.cache_clear()
    with pytest.raises(StoreError, match=r"the emulator's machine cannot be loaded \(.*DSAGEN_CACHE_DIR"):
        library.load_library()


def test_leftovers_of_interrupted_compiles_are_swept(tmp_path):
    def make(name: str, days: int) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "machine.o").write_text("")
        os.utime(folder, (time.time() - days * 86400,) * 2)
        return folder

    own, mark = f"{NAME}.{boot_mark()}-1", "00000000"
    gone = [make(own, 0), make("tmpold", 2), make(f"{NAME}.{mark}-2", 2), make(f"vm-other.so.{boot_mark()}-3", 2)]
    stay = [
        make("tmpnew", 0),
        make(f"{NAME}.{mark}-4", 0),
        make(f"vm-other.so.{boot_mark()}-5", 0),
        make("programs", 9),
    ]

    def compile_in(folder: Path) -> Path:
        (folder / "x.so").write_bytes(b"text")
        return folder / "x.so"

    obtain("it", NAME, [tmp_path], compile_in)
    assert [path.exists() for path in gone] == [False] * 4
    assert [path.exists() for path in stay] == [True] * 4


def test_a_compile_that_fails_leaves_nothing(tmp_path):
    def compile_in(folder: Path) -> Path:
        (folder / "x.o").write_text("")
        raise ToolchainError("it failed")

    with pytest.raises(ToolchainError, match="it failed"):
        obtain("it", NAME, [tmp_path], compile_in)
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.lock"]


def test_a_compiler_that_fails_is_the_toolchains_fault(small_machine, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    way_out = r"put a g\+\+ that works first on PATH"
    with pytest.raises(ToolchainError, match=rf"machine does not compile: \S+ ended with 1: {way_out}"):
        fetch()
    compiler.unlink()
    compiler.write_text("no program")
    compiler.chmod(0o755)
    with pytest.raises(ToolchainError, match=rf"cannot be run \(Exec format error\): {way_out}"):
        fetch()


def test_the_first_use_says_that_it_compiles(small_machine, caplog):
    with caplog.at_level(logging.INFO, "dsagen"):
        fetch()
        fetch()
    assert [record.message for record in caplog.records] == [library.COMPILE_NOTE]
