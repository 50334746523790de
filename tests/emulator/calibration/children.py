"""Cases in child processes, side by side compiled: a fault on a device ends what a process can do there.

A child is told the cases and where their cubins are, and answers a line at a time: which case it begins, and what came
out. Where one faults, hangs or takes the process with it, that is its result, and another child goes on. What is of the
same group as a case that ended a child then comes last, so that one kind of fault does not keep others from their turn.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from calibration.case import Case
from calibration.device import Device, Emulated
from calibration.records import cases, packed
from dsagen.build import Toolchain

Row = dict[str, Any]
# How long a child may take for one case, or to start, which takes a second or two.
PATIENCE_SECONDS = 30.0
# Each start of one takes time of a device that others may wait for.
MOST_CHILDREN = 60
MAPS = "tensor maps"
_ROOT = Path(__file__).parents[3]


@dataclass
class Outcome:
    """Rows of what ran, errors of what did not, by case; what was said of tensor maps and of the device."""

    rows: dict[str, Row] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    maps: dict[str, Row] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)


def cubin_of(case: Case, toolchain: Toolchain) -> bytes:
    """What the case's PTX becomes for sm_90a. CalledProcessError with ptxas's words where it declines."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "case.ptx", Path(folder) / "case.cubin"
        source.write_text(case.ptx)
        command = [str(toolchain.nvcc), "-arch=sm_90a", "-cubin", str(source), "-o", str(cubin)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return cubin.read_bytes()


def compile_all(wanted: Sequence[Case], toolchain: Toolchain, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The files of the cubins by case, and why there is none of others."""
    files: dict[str, str] = {}
    failed: dict[str, str] = {}

    def compile_one(numbered: tuple[int, Case]) -> None:
        number, case = numbered
        try:
            path = folder / f"{number}.cubin"
            path.write_bytes(cubin_of(case, toolchain))
            files[case.name] = str(path)
        except subprocess.CalledProcessError as error:
            failed[case.name] = f"does not compile: {' '.join(str(error.stderr).split())[:500]}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, enumerate(wanted)))
    return files, failed


# ---- the parent -----------------------------------------------------------------------------------------------------


def group_of(name: str) -> str:
    """What a case is of: cases of one group do much the same, and fault together."""
    return ".".join(name.split(".")[:2]).rstrip("0123456789")


def behind(tasks: dict[str, str], group: str) -> dict[str, str]:
    """The tasks, those of the group after all others."""
    return dict(sorted(tasks.items(), key=lambda task: group_of(task[0]) == group))


def run_in_children(
    command: Sequence[str],
    tasks: dict[str, str],
    outcome: Outcome,
    patience: float = PATIENCE_SECONDS,
    deadline: float = float("inf"),
) -> None:
    """Have children that the command starts do all tasks (a case's name, its cubin), whatever becomes of them.

    At the deadline, which time.monotonic() counts to, what is left is not begun any more.
    """
    left = dict(tasks)
    fruitless = 0
    for _ in range(MOST_CHILDREN):
        if not left:
            return
        before = len(left)
        with tempfile.TemporaryFile("w+") as errors:
            at, why = _run_child(command, left, outcome, errors, patience, deadline)
            errors.seek(0)
            words = " ".join(errors.read().split())[-500:]
        if at in left:
            outcome.failed[at] = f"{why}: {words}" if words else why
            del left[at]
        if time.monotonic() >= deadline:
            outcome.failed |= dict.fromkeys(left, "not begun: the time is up")
            return
        fruitless = fruitless + 1 if len(left) == before else 0
        if fruitless == 2:
            # Two children in turn that did not come to any case: no other would.
            outcome.failed |= dict.fromkeys(left, f"not begun: {why}: {words}")
            return
        left = behind(left, group_of(at)) if at else left
    outcome.failed |= dict.fromkeys(left, f"not begun: {MOST_CHILDREN} children have ended on the way")


def _run_child(
    command: Sequence[str], left: dict[str, str], outcome: Outcome, errors: IO[str], patience: float, deadline: float
) -> tuple[str, str]:
    """One child; takes what it has done off `left`. The case that it was at when it ended, and how it did."""
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=_ROOT
    )
    assert child.stdin is not None and child.stdout is not None
    at, why = "", ""
    try:
        child.stdin.write(json.dumps(left))
        child.stdin.close()
    except OSError as error:
        why = f"the child took no tasks ({error})"
    for message in _messages(child.stdout, patience, deadline):
        if message is None:
            why = "the time was up" if time.monotonic() >= deadline else f"nothing came for {patience:g} s"
            break
        if "begin" in message:
            at = message["begin"]
            continue
        _take(message, left, outcome)
        # Behind an error the child may be at its end, without another word.
        at = at if "error" in message else ""
    if why:
        child.kill()
    try:
        why = why or f"the child ended with code {child.wait(patience)}"
        child.wait(patience)
    except subprocess.TimeoutExpired:
        # What a device holds up may not even be killed: it is left behind.
        child.kill()
        why = f"{why or 'all was said'}, and the child does not end"
    return at, why


def _take(message: dict[str, Any], left: dict[str, str], outcome: Outcome) -> None:
    outcome.about |= message.get("about", {})
    outcome.maps |= message.get("maps", {})
    name = message.get("case", "")
    if "row" in message:
        outcome.rows[name] = message["row"]
    elif "error" in message:
        outcome.failed[name] = message["error"]
    left.pop(name, None)


def _messages(stream: IO[str], patience: float, deadline: float) -> Iterator[dict[str, Any] | None]:
    """What a child says, to its end; None once nothing has come for too long. Other lines are skipped."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, min(patience, deadline - time.monotonic())))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


# ---- the child ------------------------------------------------------------------------------------------------------


def _guarded(name: str, say: Callable[[dict[str, Any]], None], what: Callable[[], dict[str, Any]]) -> bool:
    """Says that it begins, and what came out; False where that is an error."""
    say({"begin": name})
    try:
        found = what()
    except Exception as error:
        # Whatever it is, it is what the record tells of this case.
        say({"case": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
        return False
    say({"case": name, **found})
    return True


def serve(device: str, tasks: IO[str], answers: IO[str]) -> None:
    """What a child does: every task that it is given, until one leaves the device unusable."""

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    known = {case.name: case for case in cases()}
    machine = Emulated() if device == "emulator" else Device.open(int(device))
    say({"about": machine.about()})
    for name, path in json.load(tasks).items():

        def work(name: str = name, path: str = path) -> dict[str, Any]:
            if name == MAPS:
                return {"maps": machine.maps()}
            cubin = Path(path).read_bytes() if path else b""
            return {"row": packed(known[name], machine.run(known[name], cubin))}

        if not _guarded(name, say, work) and not machine.is_usable():
            return


def child_command(device: str) -> list[str]:
    return [sys.executable, "-m", "tests.emulator.calibration", "--child", device]


def record(device: str, wanted: Sequence[Case], toolchain: Toolchain, seconds: float = float("inf")) -> Outcome:
    """Run cases on a device, each in a child that may fail; those that the emulator declines, which may, at the end."""
    deadline = time.monotonic() + seconds
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        files, outcome.failed = compile_all(wanted, toolchain, Path(folder))
        ordered = sorted((case for case in wanted if case.name in files), key=lambda case: case.refused != "")
        tasks = {MAPS: "", **{case.name: files[case.name] for case in ordered}}
        run_in_children(child_command(device), tasks, outcome, deadline=deadline)
    return outcome
