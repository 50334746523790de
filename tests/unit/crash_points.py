"""Run as a program: a build that is killed, or whose system calls fail, at each point where it touches the store.

    crash_points.py <scenario> <fault> <step> <folder>     one JSON line per point, of each step-th

A point is an operation on the store's files (Python's audit events, and what has none: stat and fsync) or a lock. Each
runs in a forked child on a fresh store; afterwards the parent looks at what is left, and
builds again without a fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_toolchain import FakeUnit

from dsagen.build import Store, build_units
from dsagen.errors import DsagenError

UNIT, OTHER = FakeUnit(), FakeUnit(slug="fake.sm90a.other", text="// other\n")
EVENTS = {
    "open",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.remove",
    "os.listdir",
    "os.scandir",
    "fcntl.flock",
}
WRITES = {"os.mkdir", "os.rename", "fsync"}
PR_SET_CHILD_SUBREAPER = 36


class Points:
    """Counts points; at number `at`, or from there on for a lasting fault, `strike` is called."""

    def __init__(self, folder: Path, at: int, strike: Callable[[str], None], only_writes: bool, lasting: bool) -> None:
        self.folder, self.at, self.strike = str(folder), at, strike
        self.only_writes, self.lasting, self.count, self.active = only_writes, lasting, 0, True

    def pass_one(self, event: str, arguments: tuple[Any, ...]) -> None:
        named = any(self.folder in os.fsdecode(a) for a in arguments if isinstance(a, str | bytes | os.PathLike))
        if not self.active or not (named or event in ("fcntl.flock", "fsync")):
            return
        if self.only_writes and not (event in WRITES or (event == "open" and self._writes(arguments))):
            return
        self.count += 1
        if self.count == self.at or (self.lasting and self.count > self.at):
            self.strike(event)

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))

    def install(self) -> None:
        sys.addaudithook(lambda event, arguments: self.pass_one(event, arguments) if event in EVENTS else None)
        real_stat, real_fsync = os.stat, os.fsync

        def stat(path: Any, *rest: Any, **named: Any) -> os.stat_result:
            self.pass_one("stat", (path,))
            return real_stat(path, *rest, **named)

        def fsync(handle: int) -> None:
            self.pass_one("fsync", ())
            real_fsync(handle)

        os.stat, os.fsync = stat, fsync


def killed(event: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int) -> Callable[[str], None]:
    def strike(event: str) -> None:
        raise OSError(number, os.strerror(number))

    return strike


def scenario(name: str, store: Store) -> None:
    if name == "clear":
        store.clear()
    else:
        build_units([UNIT], store, force=name == "rebuild")


def prepare(name: str, root: Path, warm: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    if name != "cold":
        shutil.copytree(warm, root)
    if name == "broken":
        for entry in Store([root]).entries():
            entry.cubin_path.write_bytes(b"")


def run_child(name: str, root: Path, points: Points, report: int) -> None:
    """In the child: the scenario under the fault, and how it ended."""
    points.install()
    try:
        scenario(name, Store([root]))
        ended = "done"
    except DsagenError as error:
        ended = f"{type(error).__name__}: {error}"
    except BaseException as error:
        ended = f"unforeseen {type(error).__name__}: {error}"
    points.active = False
    os.write(report, json.dumps({"ended": ended, "reached": points.count >= points.at}).encode())
    os._exit(0)


def strike_at(name: str, fault: str, at: int, root: Path, warm: Path) -> dict[str, Any]:
    prepare(name, root, warm)
    before = {entry.name for entry in Store([root]).entries()}
    strike = killed if fault == "kill" else failing(getattr(errno, fault))
    full = fault == "ENOSPC"
    points = Points(root, at, strike, only_writes=full, lasting=full)
    reading, writing = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are given to this process, and nobody waits for them
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_child(name, root, points, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    told = json.loads(text) if text else {"ended": "killed", "reached": True}
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)  # until the child, and the compilers that it has left behind, are gone
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    found = {entry.name: entry for entry in Store([root]).entries()}
    # What died is swept by the next build that compiles anything.
    again = build_units([UNIT, OTHER], Store([root]))
    return {
        **told,
        "at": at,
        "before": sorted(before),
        "whole": [name for name, entry in found.items() if wholly_built(entry)],
        "found": sorted(found),
        "rebuilt": [result.entry.name for result in again if wholly_built(result.entry)],
        "left": sorted(path.name for path in (root / "v1" / ".work").iterdir()),
    }


def wholly_built(entry: Any) -> bool:
    text = entry.cubin_path.read_bytes()
    return text.startswith(b"\x7fELF.version") and text.endswith(b'/kernel.cu"\n') and entry.report["registers"] == 168


def main(name: str, fault: str, step: str, folder: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warm, root = Path(folder) / "warm", Path(folder) / "points"
    build_units([UNIT], Store([warm]))
    at = 1
    while True:
        told = strike_at(name, fault, at, root, warm)
        print(json.dumps(told), flush=True)
        if not told["reached"]:
            return
        at += int(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
