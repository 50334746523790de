"""Builds that are killed, or whose system calls fail, at each point where they touch the store (crash_points.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_toolchain import FakeUnit, compiles, install_kit, write_toolchain

from dsagen import knobs
from dsagen.build import Store, build_units

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return install_kit(monkeypatch, tmp_path)


def child_environment(**changes: str) -> dict[str, str]:
    return knobs.child_environment(PYTHONPATH=f"{HERE.parents[1]}:{HERE}", PYTHONDONTWRITEBYTECODE="1", **changes)


def points(tmp_path: Path, scenario: str, fault: str, step: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(HERE / "crash_points.py"), scenario, fault, str(step), str(tmp_path / "crashes")]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_sound(found: list[dict[str, Any]]) -> None:
    """What holds after any fault: no entry is partial, the next build succeeds, and what the dead left is swept."""
    for point in found:
        assert point["whole"] == point["found"], point
        assert len(point["rebuilt"]) == 2, point
        assert point["left"] == [], point


@pytest.mark.spread
@pytest.mark.parametrize(("scenario", "step"), [("cold", 1), ("rebuild", 2), ("broken", 5), ("clear", 1)])
def test_a_kill_at_any_point(tmp_path, scenario, step):
    found = points(tmp_path, scenario, "kill", step)
    require_sound(found)
    assert [point["ended"] for point in found] == ["killed"] * (len(found) - 1) + ["done"]
    assert len(found) >= {"cold": 60, "rebuild": 30, "broken": 12, "clear": 8}[scenario]


@pytest.mark.spread
@pytest.mark.parametrize(
    ("scenario", "fault", "step"),
    [("cold", "EBUSY", 2), ("rebuild", "ESTALE", 3), ("broken", "ESTALE", 5), ("clear", "EBUSY", 1)],
)
def test_a_busy_or_stale_network_file_system_is_waited_for(tmp_path, scenario, fault, step):
    found = points(tmp_path, scenario, fault, step)
    require_sound(found)
    assert {point["ended"] for point in found} == {"done"}


@pytest.mark.spread
@pytest.mark.parametrize(
    ("scenario", "fault", "step"), [("cold", "ENOSPC", 1), ("rebuild", "ENOSPC", 2), ("cold", "EIO", 4)]
)
def test_a_full_or_broken_disk_is_an_error_of_the_store(tmp_path, scenario, fault, step):
    found = points(tmp_path, scenario, fault, step)
    require_sound(found)
    failed = [point["ended"] for point in found if point["ended"] != "done"]
    assert len(failed) > len(found) / 2
    assert all(ended.startswith("StoreError: ") for ended in failed)
    assert all("DSAGEN_CACHE_DIR" in ended or "is its disk sound?" in ended for ended in failed)


LIMITED = """
import resource, sys
from fake_toolchain import FakeUnit
from dsagen.build import Store, build_units
from dsagen.errors import BuildError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    build_units([FakeUnit(text="// a line\\n" * 40)], Store.open())
except BuildError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize("most_bytes", [10, 120, 300, 399, 401, 500, 700, 900])
def test_files_that_end_in_the_middle_are_never_published(kit, most_bytes):
    """As on a full disk, a write stops in the middle, in this process or in a compiler."""
    command = [sys.executable, "-c", LIMITED, str(most_bytes)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert Store.open().entries() == []
    assert not build_units([FakeUnit(text="// a line\n" * 40)], Store.open())[0].was_cached


COMMAND = "import sys; from dsagen.cli import main; sys.exit(main(sys.argv[1:]))"
# What a process does that loads kernels, or compiles one of dsagen's own libraries.
BUILD = """
from fake_toolchain import FakeUnit
from dsagen.build import Store, build_units
build_units([FakeUnit()], Store.open())
"""
LIBRARY = """
import os, sys
from pathlib import Path
from dsagen import kept_library
command = ["sh", "-c", f"echo $$ > {sys.argv[1]}; exec sleep 30"]
kept_library.obtain("it", "it.so", [Path(sys.argv[2])], lambda _: kept_library.run_compiler("it", command))
"""


def as_in_a_terminal():
    """What a test run in the background, or under nohup, has its children ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# As if the signal came right after the fork, before anybody knows the number of the process that was started.
EARLY = """
import pathlib, signal, subprocess, sys
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "--version" not in command:
            pathlib.Path(sys.argv[1]).write_text(str(self.pid))
            signal.raise_signal(signal.SIGTERM)
subprocess.Popen = Popen
"""


def is_gone(process):
    place = Path("/proc") / process
    try:
        return ") Z " in (place / "stat").read_text()
    except OSError:
        return True


def end_while_it_compiles(kit, number, *command):
    """(exit code, last line of what it said) of a process that gets a signal once a compiler runs, which it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", *command],
        env=child_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )
    deadline = time.monotonic() + 60
    while not (kit / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert is_gone((kit / "pid").read_text().strip())
    return process.returncode, said.strip().rpartition("\n")[2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_command_that_is_ended_ends_its_compilers_and_cleans_up(kit, tmp_path, number, code):
    write_toolchain(kit, before_nvcc=f"echo $$ > {kit}/pid; exec sleep 30")
    found = end_while_it_compiles(kit, number, COMMAND, "build", "v32_h16", "--out", str(tmp_path / "out"))
    assert found == (code, "error: interrupted")
    assert list((tmp_path / "store" / "v1" / ".work").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_ended_while_it_loads_cleans_up_and_dies_of_it(kit, tmp_path, number):
    write_toolchain(kit, before_nvcc=f"echo $$ > {kit}/pid; exec sleep 30")
    code, _ = end_while_it_compiles(kit, number, BUILD)
    assert code == -number
    assert list((tmp_path / "store" / "v1" / ".work").iterdir()) == []


def test_a_process_that_is_ended_while_it_makes_a_library_leaves_none_of_it(kit, tmp_path):
    code, _ = end_while_it_compiles(kit, signal.SIGTERM, LIBRARY, str(kit / "pid"), str(tmp_path / "kept"))
    assert code == -signal.SIGTERM
    assert [path for path in (tmp_path / "kept").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("what", [BUILD, LIBRARY], ids=["build", "library"])
def test_a_compiler_that_is_just_being_started_is_ended_too(kit, tmp_path, what):
    write_toolchain(kit, before_nvcc="exec sleep 30")
    command = [sys.executable, "-c", EARLY + what, str(kit / "pid"), str(tmp_path / "kept")]
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, timeout=60, check=False, preexec_fn=as_in_a_terminal
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert is_gone((kit / "pid").read_text().strip())


HANDLED = """
import signal, sys
from dsagen.ending import cleaning_up_first
signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
with cleaning_up_first():
    signal.raise_signal(signal.SIGTERM)
print("on")
"""


def test_a_process_that_handles_signals_itself_goes_on_to_do_so():
    done = subprocess.run([sys.executable, "-c", HANDLED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["mine", "on"]


def test_the_lock_of_a_dead_process_holds_nothing_up(kit):
    code = (
        "import os, signal; from fake_toolchain import FakeUnit; from dsagen.build import Store, find_toolchain\n"
        "from dsagen.build.key import entry_key, entry_name, source_key\n"
        "unit = FakeUnit(); name = entry_name(unit.slug, entry_key(source_key(unit), find_toolchain().version))\n"
        "assert Store.open().lock(name).acquire(wait=False)\n"
        "print(name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    lock = Store.open().writable_root() / "v1" / ".locks" / f"{done.stdout.strip()}.lock"
    assert lock.is_file()
    # A file that is left, whatever its age and owner, is no lock.
    os.utime(lock, (1, 1))
    start = time.monotonic()
    assert build_units([FakeUnit()], Store.open())[0].entry.name == done.stdout.strip()
    assert time.monotonic() - start < 5
    assert compiles(kit) == 1
