"""Entries and folders that something else than dsagen has made: broken ones, never an error and never a wait."""

import errno
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from fake_toolchain import FakeUnit, install_kit, write_toolchain

from dsagen.build import Store, build_units, builder, write_generated
from dsagen.build import compile as compile_module
from dsagen.build import store as store_module
from dsagen.build.entry import CUBIN, MARKER, REPORT
from dsagen.build.progress import QuietProgress
from dsagen.build.store import EntryLock, boot_mark
from dsagen.errors import BuildError, StoreError

UNIT = FakeUnit()


@pytest.fixture(autouse=True)
def kit(monkeypatch, tmp_path):
    return install_kit(monkeypatch, tmp_path)


def build():
    return build_units([UNIT], Store.open())[0]


def forge(folder: Path, member: str, content: bytes) -> None:
    """Put other content into a member, with the checksum that fits."""
    (folder / member).write_bytes(content)
    marker = json.loads((folder / MARKER).read_text())
    marker["members"][member] = hashlib.sha256(content).hexdigest()
    (folder / MARKER).write_text(json.dumps(marker))


def stamp(folder: Path, **changes: object) -> None:
    (folder / MARKER).write_text(json.dumps({**json.loads((folder / MARKER).read_text()), **changes}))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MARKER).write_text("[" * 10**5),
        lambda folder: stamp(folder, nvcc_version=13),
        lambda folder: stamp(folder, symbol=None),
        lambda folder: forge(folder, REPORT, b"no json"),
        lambda folder: forge(folder, REPORT, b"[1]"),
        lambda folder: forge(folder, REPORT, b"[" * 10**5),
        lambda folder: pipe(folder / CUBIN),
        lambda folder: pipe(folder / MARKER),
    ],
    ids=["deep", "version", "symbol", "text", "list", "deep-report", "pipe", "marker-pipe"],
)
def test_a_forged_entry_is_broken_and_rebuilt(damage, caplog):
    folder = build().entry.path
    damage(folder)
    assert Store.open().lookup(UNIT) is None
    assert Store.open().entries() == []
    assert "the entry is broken" in caplog.text
    assert not build().was_cached
    assert build().was_cached


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "line\nbreak", "byte\udcff"])
def test_a_folder_whose_name_the_compilers_do_not_take(monkeypatch, tmp_path, name):
    store = Store([tmp_path / name])
    with pytest.raises(StoreError, match="which the compilers do not take"):
        build_units([UNIT], store)
    assert not (tmp_path / name).exists()


def test_a_loop_of_links_is_no_folder(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match=r"no folder of the kernel store can be written: .*loop"):
        build_units([UNIT], Store([tmp_path / "loop"]))


def test_generated_text_replaces_bytes_and_opens_no_pipe(tmp_path):
    (path,) = write_generated([UNIT], tmp_path)
    path.write_bytes(b"\xff\xfe")
    write_generated([UNIT], tmp_path)
    assert path.read_text() == UNIT.text
    pipe(path)
    with pytest.raises(OSError, match="neither a file nor a folder"):
        write_generated([UNIT], tmp_path)


def test_a_silent_failure_on_a_full_disk_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(tmp_path / "mute", before_nvcc="exit 1")))
    with pytest.raises(BuildError) as roomy:
        build()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(builder.shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(BuildError, match="hint: the disk of the store is full"):
        build()
    assert "disk" not in str(roomy.value)


def test_compilers_that_hang_on_the_signal_are_killed(monkeypatch, tmp_path):
    kit = tmp_path / "deaf"
    # A child that outlives its shell, as nvcc's do, and hears neither of ninja's signals.
    deaf = f"trap '' INT TERM; sh -c 'echo $$ > {kit}/pid; while :; do sleep 1; done'"
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(kit, before_nvcc=deaf)))
    monkeypatch.setattr(compile_module, "_STOP_TIMEOUT_S", 0.5)

    class Leaves(QuietProgress):
        def begin(self, kernels, jobs):
            self.timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGALRM))
            self.timer.start()

    def leave(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, leave)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_units([UNIT], Store.open(), progress=Leaves())
    finally:
        signal.signal(signal.SIGALRM, before)
    compiler = Path("/proc") / (kit / "pid").read_text().strip() / "stat"
    for _ in range(100):
        if not compiler.exists() or ") Z " in compiler.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"{compiler.parent} still runs")
    assert list((tmp_path / "store" / "v1" / ".work").iterdir()) == []


def test_builds_of_other_machines_are_left_alone_for_a_day(tmp_path):
    """Their locks may not reach here, as on a network file system without them."""
    name = build().entry.name
    work = tmp_path / "store" / "v1" / ".work"
    own, other, old = (work / f"{name}.{mark}-x" for mark in (boot_mark(), "00000000", "11111111"))
    for folder in (own, other, old):
        (folder / "entry").mkdir(parents=True)
    os.utime(old, (1, 1))
    build_units([FakeUnit(slug="fake.sm90a.other")], Store.open())
    assert list(work.iterdir()) == [other]
    build_units([UNIT], Store.open(), force=True)
    assert list(work.iterdir()) == [other]


def test_a_file_system_without_locks_is_named(monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(store_module.fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=r"cannot be locked \(No locks available\).*DSAGEN_CACHE_DIR"):
        build()


def test_a_lock_that_is_a_folder_is_an_error_of_the_store(tmp_path):
    entry = build().entry
    shutil.rmtree(entry.path)
    lock = tmp_path / "store" / "v1" / ".locks" / f"{entry.name}.lock"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(StoreError, match="DSAGEN_CACHE_DIR names its folder"):
        build()
    with pytest.raises(IsADirectoryError):
        EntryLock(lock).acquire(wait=False)
