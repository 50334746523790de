"""Compiling units with ninja: one edge per kernel and arch, each nvcc to PTX and then ptxas of that very PTX.

An edge runs a small shell script in a private work folder and leaves its exit code in a file there, so what became of
each kernel is read from the folder and not from ninja's output. Times are of the machine's uptime, which no clock that
is set moves.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsagen import knobs
from dsagen.build.key import compile_flags
from dsagen.build.patience import patiently
from dsagen.build.toolchain import Toolchain
from dsagen.build.unit import Unit
from dsagen.build.watch import CompileWatch, RunningCompile
from dsagen.ending import with_child
from dsagen.errors import BuildError, ToolchainError

SOURCE, PTX, CUBIN, LOG = "kernel.cu", "kernel.ptx", "kernel.cubin", "build.log"
# How long ninja may take to end its compilers.
_STOP_TIMEOUT_S = 5.0
# How often running compiles are looked at.
_TICK_S = 0.1
_TOOLKIT_PATH = r'/\.file/s|"/.*/include/|"include/|'
# "_ZN<length>_INTERNAL_" and eight digits, in the bytes of a debug string.
_MODULE_HASH = (
    r"s/^\(\.b8 95,90,78,[0-9]*,[0-9]*,95,73,78,84,69,82,78,65,76,95\)\(,[0-9]*\)\{8\}/"
    r"\1,48,48,48,48,48,48,48,48/"
)
_SCRIPT, _STARTED, _STATUS = "compile.sh", "started", "status"


@dataclass(frozen=True)
class CompileTask:
    """One unit to compile. `work_dir` is private to it; its subfolder `entry` receives source, PTX, cubin and log."""

    unit: Unit
    name: str
    work_dir: Path

    @property
    def entry_dir(self) -> Path:
        """The folder that becomes the store entry."""
        return self.work_dir / "entry"


@dataclass(frozen=True)
class CompileOutcome:
    """How one task ended; `exit_code` is None when its script left none.

    `seconds` is the wall time of both steps, `memory_bytes` the most memory seen of its processes, 0 where unknown.
    """

    task: CompileTask
    exit_code: int | None
    seconds: float
    memory_bytes: int = 0


def compile_command(unit: Unit, name: str, toolchain: Toolchain) -> str:
    """The shell command that makes kernel.ptx and kernel.cubin from the kernel.cu of the current folder.

    nvcc writes absolute paths into the PTX's line table, and a hash of one into names in its debug strings; the sed
    step puts the entry's name, paths below the toolkit and zeros there, so that equal inputs give equal bytes wherever
    they are compiled, by whatever copy of the toolkit.
    """
    flags = compile_flags(unit.arch)
    to_ptx = shlex.join([*knobs.COMPILER_LAUNCHER.get(), *ptx_arguments(unit.arch, toolchain, SOURCE, PTX)])
    own_path = rf'/\.file/s|"/.*/{SOURCE}"|"{name}/{SOURCE}"|'
    rename = shlex.join(["sed", "-i", "-e", own_path, "-e", _TOOLKIT_PATH, "-e", _MODULE_HASH, PTX])
    to_cubin = shlex.join([str(toolchain.ptxas), *flags.ptxas, PTX, "-o", CUBIN])
    return f"{to_ptx} && {rename} && {to_cubin}"


def ptx_arguments(arch: str, toolchain: Toolchain, source: str, output: str) -> list[str]:
    """The call of nvcc that makes PTX of CUDA text."""
    return [str(toolchain.nvcc), *compile_flags(arch).nvcc, source, "-o", output]


def ninja_binary() -> Path:
    """The ninja of the PyPI package, else the one on PATH; raises ToolchainError where there is none."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        path = Path(ninja.BIN_DIR) / "ninja"
        if path.is_file():
            return path
    found = shutil.which("ninja", path=knobs.foreign("PATH"))
    if found is None:
        raise ToolchainError("no ninja: neither the PyPI package nor PATH has it. Install it with `pip install ninja`.")
    return Path(found)


def run_compiles(
    tasks: Sequence[CompileTask],
    toolchain: Toolchain,
    jobs: int,
    on_finish: Callable[[CompileOutcome], None],
    on_look: Callable[[Sequence[RunningCompile]], None] = lambda _: None,
) -> None:
    """Compile all tasks, `jobs` at once, calling `on_finish` in this thread soon after each one ends.

    `on_look` is called several times a second with what runs. A failing task does not stop the others. Raises
    BuildError only when ninja itself cannot do its work.
    """
    for task in tasks:
        patiently(partial(_write_script, task, toolchain))
    folder = tasks[0].work_dir
    patiently(lambda: (folder / "build.ninja").write_text(_ninja_text(tasks)))
    command = [str(ninja_binary()), "-C", str(folder), f"-j{jobs}", "-k0"]
    pending, watch = list(tasks), CompileWatch()
    printed = bytearray()

    def start() -> subprocess.Popen[bytes]:
        environment = knobs.compiler_environment(NINJA_STATUS="[%f/%t] ")
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=environment, **pipes)

    def follow(process: subprocess.Popen[bytes]) -> int:
        nonlocal pending
        assert process.stdout is not None
        # Ninja prints a line whenever an edge ends, which is the moment to look; in between, what runs is watched.
        while _read_some(process.stdout.fileno(), printed):
            pending = _report_finished(pending, watch, on_finish)
            on_look(_running(pending, watch))
        return process.wait()

    exit_code = with_child(start, follow, lambda process: _stop(process, pending))
    pending = _report_finished(pending, watch, on_finish)
    if len(pending) == len(tasks) and not any((task.work_dir / _STARTED).exists() for task in tasks):
        text = printed.decode(errors="replace").strip()[-2000:]
        raise BuildError(f"ninja compiled nothing (exit code {exit_code}): {text}")
    for task in pending:
        on_finish(CompileOutcome(task, None, 0.0))


def _read_some(handle: int, printed: bytearray) -> bool:
    """Take over what there is to read, waiting a tick at most; False once the other end is closed."""
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        if not selector.select(_TICK_S):
            return True
    chunk = os.read(handle, 1 << 16)
    printed += chunk
    return bool(chunk)


def _running(pending: Sequence[CompileTask], watch: CompileWatch) -> list[RunningCompile]:
    leaders = [(task.name, _leader(task)) for task in pending]
    return [watch.look(name, leader) for name, leader in leaders if leader is not None]


def _write_script(task: CompileTask, toolchain: Toolchain) -> None:
    task.entry_dir.mkdir(exist_ok=True)
    (task.entry_dir / SOURCE).write_text(task.unit.text)
    command = compile_command(task.unit, task.name, toolchain)
    (task.work_dir / _SCRIPT).write_text(
        "up() { read -r now rest < /proc/uptime && echo $now; }\n"
        f"echo $$ $(up) > {_STARTED}\n"
        f"( cd entry && {command} ) > entry/{LOG} 2>&1\n"
        "code=$?\n"
        f"echo $code $(up) > {_STATUS}.part && mv {_STATUS}.part {_STATUS}\n"
        "exit $code\n"
    )


def _ninja_text(tasks: Sequence[CompileTask]) -> str:
    lines = ["rule compile", f"  command = cd $folder && exec sh {_SCRIPT}", "  description = $name", ""]
    for number, task in enumerate(tasks):
        # The output is a name that nothing writes: what exists is decided by the store, never by ninja.
        lines += [f"build edge_{number}: compile", f"  name = {_ninja_escape(task.name)}"]
        lines += [f"  folder = {_ninja_escape(shlex.quote(str(task.work_dir)))}", ""]
    return "\n".join(lines)


def _ninja_escape(text: str) -> str:
    if "\n" in text:
        raise BuildError(f"the path {text!r} holds a line break, which ninja cannot take; move DSAGEN_CACHE_DIR")
    return text.replace("$", "$$")


def _report_finished(
    pending: Sequence[CompileTask], watch: CompileWatch, on_finish: Callable[[CompileOutcome], None]
) -> list[CompileTask]:
    """Call `on_finish` for the tasks that have ended; the others come back."""
    left = []
    for task in pending:
        ended = _numbers(task.work_dir / _STATUS)
        if not ended:
            left.append(task)
            continue
        times = [*_numbers(task.work_dir / _STARTED)[1:2], *ended[1:2]]
        seconds = max(0.0, times[1] - times[0]) if len(times) == 2 else 0.0
        on_finish(CompileOutcome(task, int(ended[0]), seconds, watch.peak_bytes(task.name)))
    return left


def _numbers(path: Path) -> list[float]:
    """The numbers that a script has left in a file; none where it has left nothing."""
    try:
        return [float(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _leader(task: CompileTask) -> int | None:
    """Process id of a task's script while it runs. Ninja makes it the leader of a process group."""
    numbers = [] if _numbers(task.work_dir / _STATUS) else _numbers(task.work_dir / _STARTED)
    # 0 would be the own group.
    return int(numbers[0]) if numbers and numbers[0] > 1 else None


def _stop(process: subprocess.Popen[bytes], pending: Sequence[CompileTask]) -> None:
    """End ninja, which ends its compilers, when the build is left early (an interrupt, or an error in a callback).

    A compiler may hang on the signal that ninja passes on, while ninja waits for it or has left; what is still there
    after a while is killed.
    """
    with process:  # which closes its pipe
        if process.poll() is None:
            _end(process, pending)


def _end(process: subprocess.Popen[bytes], pending: Sequence[CompileTask]) -> None:
    process.terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_TIMEOUT_S)
        while any(_signal_group(task, 0) for task in pending) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        # Also when another interrupt ends the wait.
        for task in pending:
            _signal_group(task, signal.SIGKILL)
        process.kill()
        process.wait()


def _signal_group(task: CompileTask, number: int) -> bool:
    """Send a signal to a task's script and its compilers; False when none of them is left."""
    group = _leader(task)
    if group is None:
        return False
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True
